// A mask says, for each query row, which keys that row may see.
//
// Causal, window, chunk, prefix and the sequence's length make bands: row i sees the keys of one half-open range, and
// both ends of the range never move left as i grows. `first` beside a window adds a second band. From that one promise
// this file derives all that a kernel needs: the keys that some row of a tile sees (tiles to visit), the keys that
// every row sees (tiles that need no test), and the rows that see a tile of keys (backward). No kernel repeats the
// rule. Element parts (keep, exclude_keys, documents, bias = -inf) are operands; kernels test them inside these ranges.
#pragma once
#include "rules/base.h"

namespace tessera::rules {

template <class Int>
struct RangeOf {  // half open; empty when end <= begin
  Int begin, end;
  TESSERA_RULE bool empty() const { return end <= begin; }
  TESSERA_RULE bool has(Int x) const { return begin <= x && x < end; }
  TESSERA_RULE bool covers(RangeOf inner) const { return inner.empty() || (begin <= inner.begin && inner.end <= end); }
  TESSERA_RULE Int size() const { return empty() ? 0 : end - begin; }
};
using Range = RangeOf<Index>;
template <class Int>
TESSERA_RULE RangeOf<Int> overlap(RangeOf<Int> a, RangeOf<Int> b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}
TESSERA_RULE Range overlap(Range a, Range b) {
  return overlap<Index>(a, b);
}
template <class Int>
TESSERA_RULE RangeOf<Int> hull(RangeOf<Int> a, RangeOf<Int> b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {min(a.begin, b.begin), max(a.end, b.end)};
}

// Farther than any position can be, so that sums of two positions and one bound cannot wrap: lengths stay below 2^31,
// and below 2^27 where 32 bits count them.
template <class Int>
inline constexpr Int farthest = Int{1} << (sizeof(Int) == 8 ? 40 : 30);
inline constexpr Index far_away = farthest<Index>;
TESSERA_RULE Index saturate(Index bound) {
  return max(-far_away, min(bound, far_away));
}

// In 64 bits, or on a device whose sequences are short enough in 32.
template <class Int>
struct BandOf {
  using Range = RangeOf<Int>;

  Int keys = 0;              // the sequence's used keys: 0 <= j < keys, always
  Int offset = 0;            // row i has position p = i + offset
  Int left = farthest<Int>;  // window: p - left <= j <= p + right
  Int right = farthest<Int>;
  Int chunk = farthest<Int>;  // floor(j / chunk) == floor(p / chunk), if `chunked`
  Int prefix = 0;             // causal: j < prefix or j <= p, if `causal`
  Int first = 0;              // j < first is kept whatever the window says
  bool causal = false;
  bool chunked = false;

  // What holds for both bands of a row: length, causal or prefix, chunk.
  TESSERA_RULE Range frame(Int row) const {
    const Int p = row + offset;
    Range r = {0, keys};
    if (causal) r.end = min(r.end, max(prefix, p + 1));
    if (chunked) {
      const Int begin = floor_div<Int>(p, chunk) * chunk;
      r = overlap<Int>(r, {begin, begin + chunk});
    }
    return r;
  }
  // The row's keys are these two bands together; they may overlap.
  TESSERA_RULE Range near(Int row) const {
    const Int p = row + offset;
    return overlap<Int>(frame(row), {p - left, p + right + 1});
  }
  TESSERA_RULE Range head(Int row) const { return overlap<Int>(frame(row), {0, first}); }

  TESSERA_RULE bool keeps(Int row, Int key) const { return near(row).has(key) || head(row).has(key); }

  // The other way round: rows whose near, or head, band has a key of 0 <= key < keys. Neither end moves left as keys
  // grow.
  TESSERA_RULE Range rows_near(Int key) const {
    return overlap<Int>(rows_framing(key), {key - right - offset, key + left + 1 - offset});
  }
  TESSERA_RULE Range rows_heading(Int key) const { return key < first ? rows_framing(key) : Range{0, 0}; }

 private:
  TESSERA_RULE Range rows_framing(Int key) const {
    static_assert(sizeof(Int) == 8);  // four times the farthest
    Range positions = {-4 * farthest<Int>, 4 * farthest<Int>};
    if (causal && key >= prefix) positions.begin = key;
    if (chunked) {
      const Int begin = key / chunk * chunk;
      positions = overlap<Int>(positions, {begin, begin + chunk});
    }
    return {positions.begin - offset, positions.end - offset};
  }
};
using BandMask = BandOf<Index>;
using NarrowBand = BandOf<int>;
inline constexpr Index narrow_length = Index{1} << 27;  // of sequences, bounded windows and chunks
TESSERA_RULE bool can_narrow(const BandMask& m) {
  const auto fits = [](Index x) { return x <= narrow_length || x >= far_away; };
  return fits(m.left) && fits(m.right) && fits(m.chunk);
}
// The same mask for sequences of at most narrow_length, wherever its corner lies: a row that is farther away sees what
// one at half of `farthest` does.
TESSERA_RULE int narrow_offset(Index offset) {
  constexpr Index most = farthest<int> / 2;
  return static_cast<int>(max(-most, min(offset, most)));
}
TESSERA_RULE NarrowBand narrowed(const BandMask& m) {
  const auto narrow = [](Index x) { return static_cast<int>(min<Index>(x, farthest<int>)); };
  return {narrow(m.keys),   narrow_offset(m.offset), narrow(m.left), narrow(m.right), narrow(m.chunk),
          narrow(m.prefix), narrow(m.first),         m.causal,       m.chunked};
}

// A band over several rows: the keys that some row of `rows` sees (a hull), and those that every row sees (exact).
template <class Band, class Int>
TESSERA_RULE RangeOf<Int> seen_by_any(Band&& band, RangeOf<Int> rows) {
  return {band(rows.begin).begin, band(rows.end - 1).end};
}
template <class Band, class Int>
TESSERA_RULE RangeOf<Int> seen_by_all(Band&& band, RangeOf<Int> rows) {
  return {band(rows.end - 1).begin, band(rows.begin).end};
}
// What a tile of rows has to do with the keys.
template <class Int>
struct VisitOf {
  RangeOf<Int> head, near;  // keys to visit: two ranges in order, which do not overlap
  RangeOf<Int> full;        // keys that every row keeps, as far as bands go
};
using Visit = VisitOf<Index>;
template <class Int>
TESSERA_RULE VisitOf<Int> visit_of(const BandOf<Int>& mask, RangeOf<Int> rows) {
  const auto near = [&](Int row) { return mask.near(row); };
  const auto head = [&](Int row) { return mask.head(row); };
  VisitOf<Int> v = {{0, 0}, seen_by_any(near, rows), seen_by_all(near, rows)};
  if (mask.first > 0) {
    v.head = seen_by_any(head, rows);
    const RangeOf<Int> all = seen_by_all(head, rows);
    // Every row's two bands together: one range where they touch, else the larger of the two.
    const bool touch = !all.empty() && !v.full.empty() && all.begin <= v.full.end && v.full.begin <= all.end;
    if (touch) v.full = hull(all, v.full);
    else if (all.size() > v.full.size()) v.full = all;
    if (v.near.empty() || v.head.end > v.near.begin) {
      v.near = hull(v.head, v.near);
      v.head = {0, 0};
    }
  }
  return v;
}
TESSERA_RULE Visit visit(const BandMask& mask, Range rows) {
  return visit_of<Index>(mask, rows);
}
// The rows that may see some key of `keys`: a hull.
TESSERA_RULE Range rows_visiting(const BandMask& mask, Range rows, Range keys) {
  keys = overlap(keys, {0, mask.keys});
  if (keys.empty()) return {0, 0};
  const Range near = {mask.rows_near(keys.begin).begin, mask.rows_near(keys.end - 1).end};
  const Range heading = {0, min(keys.end, mask.first)};
  const Range head = keys.begin < heading.end
                         ? Range{mask.rows_heading(keys.begin).begin, mask.rows_heading(heading.end - 1).end}
                         : Range{0, 0};
  return hull(overlap(near, rows), overlap(head, rows));
}

// Where a window lies off the diagonal (p - left > p or p + right < p), some rows may see nothing, and the hulls above
// may hold keys that no row sees. Elsewhere each row's keys touch the next row's and hulls are exact.
TESSERA_RULE bool hulls_have_gaps(const BandMask& mask) {
  return mask.left < 0 || mask.right < 0;
}
TESSERA_RULE bool some_row_sees(const BandMask& mask, Range rows, Index key) {
  return !overlap(mask.rows_near(key), rows).empty() || !overlap(mask.rows_heading(key), rows).empty();
}

}  // namespace tessera::rules
