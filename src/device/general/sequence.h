// One sequence as the device's own lists describe it: its rows, its keys' places in a tensor or cache, its mask. What
// is unsound is noted in the status word and left out.
#pragma once
#include "device/general/numbers.h"
#include "device/sequence.h"

namespace tessera::device {

using rules::BandMask;
using rules::GeneralParams;
using rules::Range;

TESSERA_DEVICE void note(const GeneralParams& p, int unsound) {
  if (unsound && p.status) atomicOr(p.status, unsound);
}

struct Sequence {
  int batch, unsound;  // bits of the status word
  Rows q, k, fresh;    // k.used counts new tokens and not the padding
  BandMask band;
  int plane, first;  // of key 0's slot, where slots are not paged
  const int* table;
  TESSERA_DEVICE int old_keys() const { return k.used - fresh.used; }  // and the position of new token 0
};

namespace detail {

TESSERA_DEVICE void check_positions(const GeneralParams& p, Sequence& s) {
  const auto within = [&](Index begin, int count) {
    if (count > 0 && (begin < 0 || begin + count > p.rotary.positions)) s.unsound |= rules::unsound_position;
  };
  within(s.old_keys(), s.fresh.used);
  if (s.k.used > 0) within(s.band.offset, s.q.used);  // without keys a query's rotation does not matter
}

}  // namespace detail

TESSERA_DEVICE Sequence sequence(const GeneralParams& p, int batch) {
  Sequence s = {};
  s.batch = batch;
  if (p.q.present()) s.q = rows_of(p.queries, batch);
  if (p.k_new.present()) s.fresh = rows_of(p.fresh, batch);
  if ((p.q.present() && !s.q.sound) || (p.k_new.present() && !s.fresh.sound)) s.unsound |= rules::unsound_length;
  if (p.cache.is_cache) {
    const CachedKeys cached = cached_keys(p.cache, p.keys, s.fresh.used, batch);
    s.k = {batch, 0, cached.rows.used, cached.rows.stored, true};
    s.plane = cached.rows.plane;
    s.first = cached.rows.first;
    s.table = cached.table;
    s.unsound |= cached.unsound;
  } else {
    s.k = rows_of(p.keys, batch);
    s.plane = s.k.plane;
    s.first = s.k.first;
    if (!s.k.sound) s.unsound |= rules::unsound_length;
  }
  s.band = p.band;
  s.band.keys = s.k.used;
  if (p.corner == rules::Corner::bottom_right) s.band.offset = s.k.used - s.q.used;
  if (p.corner == rules::Corner::per_sequence) s.band.offset = p.corner_offsets[batch];
  if (p.rotary.pairs && !s.unsound) detail::check_positions(p, s);
  return s;
}

// Where key j lies in k and v; the page id is read here and nowhere else.
struct KeyPlace {
  Index plane, row;
  bool there;
};
TESSERA_DEVICE KeyPlace place_of_key(const GeneralParams& p, const Sequence& s, int key) {
  const rules::CacheParams& c = p.cache;
  unsigned slot = static_cast<unsigned>(s.first) + static_cast<unsigned>(key);
  if (c.ring) slot %= static_cast<unsigned>(c.slots);
  if (c.page == 0) return {s.plane, slot, true};
  const unsigned page = slot / static_cast<unsigned>(c.page);
  const int id = s.table[page * c.table_step];
  const bool there = 0 <= id && id < c.pages;
  if (!there) note(p, rules::unsound_page);
  return {id, slot - page * static_cast<unsigned>(c.page), there};
}

// Where row r of q, out, lse, dO ... lies; `row` counts inside the sequence.
TESSERA_DEVICE Index at_row(const View& view, const Rows& rows, int row, int head) {
  return view.at(rows.plane, Index{rows.first} + row, head);
}
// Its number among all (row, head) pairs, for what the workspace keeps of each.
TESSERA_DEVICE Index row_number(const GeneralParams& p, const Rows& rows, int row, int head) {
  const Index stored = p.queries.cu ? p.queries.rows : p.queries.longest;
  return (Index{rows.plane} * p.heads + head) * stored + rows.first + row;
}

}  // namespace tessera::device
