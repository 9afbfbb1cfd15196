// Where a sequence's rows lie, from lengths that only the device knows. Unsound lengths are told and never followed.
#pragma once
#include "device/ptx/sm80.h"
#include "rules/params.h"

namespace tessera::device {

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

struct Sequence {
  Rows q, k;
  rules::BandMask band;
  TESSERA_DEVICE bool sound() const { return q.sound && k.sound; }
};
TESSERA_DEVICE Sequence sequence(const rules::ForwardParams& p, int batch) {
  Sequence s = {rows_of(p.queries, batch), rows_of(p.keys, batch), p.band};
  s.band.keys = s.k.used;
  if (p.corner == rules::Corner::bottom_right) s.band.offset = s.k.used - s.q.used;
  if (p.corner == rules::Corner::per_sequence) s.band.offset = p.corner_offsets[batch];
  return s;
}

}  // namespace tessera::device
