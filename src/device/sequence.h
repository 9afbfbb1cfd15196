// Where a sequence's rows lie, from lengths that only the device knows, and ranges of keys in few bits. Unsound lengths
// are told and never followed.
#pragma once
#include "device/ptx/portable.h"
#include "rules/params.h"

namespace tessera::device {

struct Keys {  // bounds of an empty range are equal
  int begin, end;
  TESSERA_DEVICE bool has(int key) const { return begin <= key && key < end; }
  TESSERA_DEVICE Keys from(int key) const { return {begin - key, end - key}; }  // counted from there
  // Bit n: has(first + n).
  TESSERA_DEVICE Word bits(int first) const { return below(end - first) & ~below(begin - first); }

 private:
  static TESSERA_DEVICE Word below(int n) { return n >= 32 ? ~0u : n <= 0 ? 0 : (1u << n) - 1; }
};
template <class Int>
TESSERA_DEVICE Keys keys_of(rules::RangeOf<Int> r) {  // bounds of an empty range may lie anywhere
  return r.empty() ? Keys{0, 0} : Keys{static_cast<int>(r.begin), static_cast<int>(r.end)};
}

struct Rows {  // as core::Rows, which reads the same lists on the host
  int plane, first, used, stored;
  bool sound;
};
TESSERA_DEVICE Rows rows_of(const rules::DeviceLengths& lengths, int batch) {
  Rows r = {batch, 0, lengths.longest, lengths.longest, true};
  if (lengths.cu) {
    const Index begin = lengths.cu[batch], end = lengths.cu[batch + 1];
    r.plane = 0;
    r.first = static_cast<int>(begin);
    r.used = r.stored = static_cast<int>(end - begin);
    r.sound = (batch > 0 || begin == 0) && begin >= 0 && end >= begin && end <= lengths.rows &&
              end - begin <= lengths.longest;
  }
  if (lengths.used) {
    r.used = lengths.used[batch];
    r.sound = r.sound && r.used >= 0 && r.used <= r.stored;
  }
  return r;
}

// Where a cache has a sequence's keys: rows [first, first + used) of a plane, or pages that a table names.
struct CachedKeys {
  Rows rows;  // first: key 0's slot, where slots are not paged
  const int* table;
  int unsound;  // bits of the status word
};
TESSERA_DEVICE CachedKeys cached_keys(const rules::CacheParams& c, const rules::DeviceLengths& keys, int fresh,
                                      int batch) {
  const int filled = c.lens ? c.lens[batch * c.lens_step] : keys.used ? keys.used[batch] : keys.longest;
  const int pad = c.left_pad ? c.left_pad[batch] : 0, row = c.rows ? c.rows[batch] : batch;
  const Index used = Index{filled} - pad + fresh;
  CachedKeys k = {{row, pad, static_cast<int>(used), keys.longest, true}, nullptr, 0};
  if (c.table) k.table = c.table + row * c.table_row;
  if (pad < 0 || filled < pad || used > keys.longest) k.unsound |= rules::unsound_length;
  if (row < 0 || row >= c.most_rows) k.unsound |= rules::unsound_page;
  if (!c.ring && Index{filled} + fresh > c.slots) k.unsound |= rules::unsound_capacity;
  return k;
}

}  // namespace tessera::device
