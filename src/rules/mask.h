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

struct Range {  // half open; empty when end <= begin
  Index begin, end;
  TESSERA_RULE bool empty() const { return end <= begin; }
  TESSERA_RULE bool has(Index x) const { return begin <= x && x < end; }
  TESSERA_RULE bool covers(Range inner) const { return inner.empty() || (begin <= inner.begin && inner.end <= end); }
  TESSERA_RULE Index size() const { return empty() ? 0 : end - begin; }
};
TESSERA_RULE Range overlap(Range a, Range b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}
TESSERA_RULE Range hull(Range a, Range b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {min(a.begin, b.begin), max(a.end, b.end)};
}

// Farther than any position can be: lengths stay below 2^31, so sums of two positions and one bound cannot wrap.
inline constexpr Index far_away = Index{1} << 40;
TESSERA_RULE Index saturate(Index bound) {
  return max(-far_away, min(bound, far_away));
}

struct BandMask {
  Index keys = 0;         // the sequence's used keys: 0 <= j < keys, always
  Index offset = 0;       // row i has position p = i + offset
  Index left = far_away;  // window: p - left <= j <= p + right
  Index right = far_away;
  Index chunk = far_away;  // floor(j / chunk) == floor(p / chunk), if `chunked`
  Index prefix = 0;        // causal: j < prefix or j <= p, if `causal`
  Index first = 0;         // j < first is kept whatever the window says
  bool causal = false;
  bool chunked = false;

  // What holds for both bands of a row: length, causal or prefix, chunk.
  TESSERA_RULE Range frame(Index row) const {
    const Index p = row + offset;
    Range r = {0, keys};
    if (causal) r.end = min(r.end, max(prefix, p + 1));
    if (chunked) {
      const Index begin = floor_div(p, chunk) * chunk;
      r = overlap(r, {begin, begin + chunk});
    }
    return r;
  }
  // The row's keys are these two bands together; they may overlap.
  TESSERA_RULE Range near(Index row) const {
    const Index p = row + offset;
    return overlap(frame(row), {p - left, p + right + 1});
  }
  TESSERA_RULE Range head(Index row) const { return overlap(frame(row), {0, first}); }

  TESSERA_RULE bool keeps(Index row, Index key) const { return near(row).has(key) || head(row).has(key); }

  // The other way round: rows whose near, or head, band has a key of 0 <= key < keys. Neither end moves left as keys
  // grow.
  TESSERA_RULE Range rows_near(Index key) const {
    return overlap(rows_framing(key), {key - right - offset, key + left + 1 - offset});
  }
  TESSERA_RULE Range rows_heading(Index key) const { return key < first ? rows_framing(key) : Range{0, 0}; }

 private:
  TESSERA_RULE Range rows_framing(Index key) const {
    Range positions = {-4 * far_away, 4 * far_away};
    if (causal && key >= prefix) positions.begin = key;
    if (chunked) {
      const Index begin = key / chunk * chunk;
      positions = overlap(positions, {begin, begin + chunk});
    }
    return {positions.begin - offset, positions.end - offset};
  }
};

// A band over several rows: the keys that some row of `rows` sees (a hull), and those that every row sees (exact).
template <class Band>
TESSERA_RULE Range seen_by_any(Band&& band, Range rows) {
  return {band(rows.begin).begin, band(rows.end - 1).end};
}
template <class Band>
TESSERA_RULE Range seen_by_all(Band&& band, Range rows) {
  return {band(rows.end - 1).begin, band(rows.begin).end};
}
// What a tile of rows has to do with the keys.
struct Visit {
  Range head, near;  // keys to visit: two ranges in order, which do not overlap
  Range full;        // keys that every row keeps, as far as bands go
};
TESSERA_RULE Visit visit(const BandMask& mask, Range rows) {
  const auto near = [&](Index row) { return mask.near(row); };
  const auto head = [&](Index row) { return mask.head(row); };
  Visit v = {{0, 0}, seen_by_any(near, rows), seen_by_all(near, rows)};
  if (mask.first > 0) {
    v.head = seen_by_any(head, rows);
    const Range all = seen_by_all(head, rows);
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
