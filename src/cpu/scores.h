// From products to scores, in the contract's order: scale, softcap, slope, bias, mask. Forward and backward share it.
#pragma once
#include "cpu/tile.h"
#include "rules/score.h"

namespace tessera::cpu::TESSERA_ISA {

template <class T>
inline constexpr T infinity = static_cast<T>(__builtin_huge_val());

// The rule for a tile, as bytes. Returns how many are kept.
inline Index fill_kept(const Task& t, const Sequence& s, const rules::BandMask& band, const RowTile& rows, Range keys,
                       uint8_t* kept, Index kept_row) {
  Index count = 0;
  for (Index r = 0; r < rows.count; ++r)
    for (Index j = keys.begin; j < keys.end; ++j) {
      const bool keep = core::keeps(t.p, t.bound, s, band, rows.h[r], rows.i[r], j);
      kept[r * kept_row + j - keys.begin] = keep;
      count += keep;
    }
  return count;
}

// A tile of scores and what is known about its mask.
struct TileMask {
  bool full;      // every row sees every key, as far as bands go
  bool elements;  // `kept` is filled and decides
};

template <class T>
struct Tanh {
  TESSERA_ALWAYS Vec<T> operator()(Vec<T> x) const { return tanh(x); }
};

template <class T>
void cut(T* row, Range keep, Index n) {  // -inf outside of `keep`, both in 0..n
  const Index begin = rules::min(rules::max(keep.begin, Index{0}), n), end = rules::max(rules::min(keep.end, n), begin);
  for (Index c = 0; c < begin; ++c) row[c] = -infinity<T>;
  for (Index c = end; c < n; ++c) row[c] = -infinity<T>;
}

// As `cut`, for a row that sees two bands.
template <class T>
void cut(T* row, Range one, Range two, Index n) {
  if (one.empty()) return cut(row, two, n);
  if (two.empty()) return cut(row, one, n);
  for (Index c = 0; c < n; ++c)
    if (!one.has(c) && !two.has(c)) row[c] = -infinity<T>;
}

// In place: products of row r become scores, -inf where excluded and past the keys. `cap` receives dt/dz if not null.
template <class T>
void score_row(const Task& t, const Sequence& s, const rules::BandMask& band, TileMask mask, Index i, Index h,
               Range keys, const uint8_t* kept, T* row, T* cap, T* line) {
  const Index n = keys.size(), end = padded(n);
  const Problem& p = t.p;
  const T scale = static_cast<T>(t.scale);
  const T softcap = static_cast<T>(p.softcap), inverse = static_cast<T>(p.softcap > 0 ? 1 / p.softcap : 0);
  for (Index c = 0; c < end; c += lanes<T>) {
    Vec<T> z = load(row + c) * scale;
    if (p.softcap > 0) {
      const auto capped = rules::softcapped(z, splat(softcap), splat(inverse), Tanh<T>{});
      z = capped.value;
      if (cap) store(cap + c, capped.slope);
    }
    store(row + c, z);
  }
  if (t.has(TESSERA_SLOPES)) {
    const T slope = head_number<T>(t, TESSERA_SLOPES, s.batch, h);
    const T ahead = static_cast<T>(i + s.offset - keys.begin);
    for (Index c = 0; c < end; c += lanes<T>) {
      const Vec<T> away = ahead - (ramp<T>() + static_cast<T>(c));
      store(row + c, load(row + c) - rules::alibi(splat(slope), away < 0 ? -away : away));
    }
  }
  if (t.has(TESSERA_BIAS)) {
    const Operand& o = t.operand(TESSERA_BIAS);
    const Index at = core::offset_of(o, s.batch, h, i, keys.begin) * bytes_of(o.dtype);
    const Plane from = {static_cast<char*>(t.bound.data[TESSERA_BIAS]) + at, o.dtype, 0,
                        o.extent[3] == 1 ? 0 : o.stride[3]};
    load_row(line, from, 0, n);
    for (Index c = 0; c < end; c += lanes<T>) {
      const Vec<T> bias = load(line + c);
      store(row + c, bias == -infinity<T> ? bias : load(row + c) + bias);  // -inf excludes, even beside a NaN
    }
  }
  if (mask.elements) {
    for (Index c = 0; c < n; ++c)
      if (!kept[c]) row[c] = -infinity<T>;
  } else if (!mask.full) {
    const auto shift = [&](Range r) { return Range{r.begin - keys.begin, r.end - keys.begin}; };
    cut(row, shift(band.near(i)), band.first > 0 ? shift(band.head(i)) : Range{0, 0}, n);
  }
  for (Index c = n; c < end; ++c) row[c] = -infinity<T>;
}

// The factors keep / (1 - p) of row i, keys.begin onwards.
template <class T>
void dropout_row(const Task& t, const Sequence& s, Index i, Index h, Range keys, T* factors) {
  const rules::Dropout dropout =
      rules::make_dropout(t.p.dropout, t.bound.seed, t.bound.offset, static_cast<Word>(s.batch * t.p.heads_q + h));
  const T scale = static_cast<T>(1 / (1 - t.p.dropout));
  const Index below = i & ~Index{8}, half = (i >> 3) & 1;
  for (Index block = keys.begin & ~Index{15}; block < keys.end; block += 16)
    for (Index j = block; j < block + 8; ++j) {
      if (j >= keys.end || j + 8 < keys.begin) continue;
      const rules::Words4 words = dropout.words(below, j);
      if (j >= keys.begin) factors[j - keys.begin] = words.at[half * 2] >= dropout.threshold ? scale : T{0};
      if (j + 8 < keys.end) factors[j + 8 - keys.begin] = words.at[half * 2 + 1] >= dropout.threshold ? scale : T{0};
    }
  for (Index c = keys.size(); c < padded(keys.size()); ++c) factors[c] = 0;
}

// A finished row: scaled, and -0 made 0, since whether a sum of nothing ends as one or the other depends on how many
// empty tiles came after it.
template <class T>
void settle(T* row, Index n, T scale, T divisor = 1) {
  for (Index c = 0; c < n; c += lanes<T>) store(row + c, load(row + c) * scale / divisor + T{0});
}

// Which tiles of `keys` a tile of rows visits: runs f(keys) in order. A tile is named by its place in the sequence, so
// that a row meets the same tiles whatever rows stand beside it; `keys` begins where a tile does.
template <class F>
TESSERA_ALWAYS void visit_tiles(const rules::Visit& v, Range keys, Index tile, F&& f) {
  Index next = 0;
  for (const Range seen : {v.head, v.near}) {
    const Range range = rules::overlap(seen, keys);
    if (range.empty()) continue;
    for (Index n = rules::max(next, range.begin / tile); n * tile < range.end; ++n) {
      f(Range{n * tile, rules::min((n + 1) * tile, keys.end)});
      next = n + 1;
    }
  }
}

}  // namespace tessera::cpu::TESSERA_ISA
