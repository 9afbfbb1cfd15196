// Forward: one tile of query rows against the keys it sees, by online softmax.
#pragma once
#include "cpu/scores.h"

namespace tessera::cpu::TESSERA_ISA {

template <class T>
inline constexpr T smallest_normal = sizeof(T) == 4 ? static_cast<T>(0x1p-126) : static_cast<T>(0x1p-1022);

// One row's step: scores become weights exp(score - m), the row's state moves on. Returns what to scale `out` by.
template <class T>
T softmax_row(T* row, Index end, T& largest_score, T& total) {
  Vec<T> top = splat(-infinity<T>);
  for (Index c = 0; c < end; c += lanes<T>) top = larger(top, load(row + c));
  const T before = largest_score, here = largest<T>(top);
  largest_score = here > before || here != here ? here : before;
  const T reference = rules::reference_score(largest_score);
  Vec<T> sums{};
  for (Index c = 0; c < end; c += lanes<T>) {
    const Vec<T> weight = exp(load(row + c) - reference);
    store(row + c, weight);
    sums += weight;
  }
  T rescale = rules::weight(before, largest_score, [](T x) { return std::exp(x); });
  // What went before weighs nothing now, but an infinite out must stay infinite: 0 * inf would be NaN.
  if (before != -infinity<T>) rescale = rules::max(rescale, smallest_normal<T>);
  total = total * rescale + sum<T>(sums);
  return rescale;
}

template <class P>
struct Operands {  // the packed tiles of one kind of product
  using Number = typename P::Number;
  using Element = typename P::Element;
  static constexpr bool pairs = P::width == 2;

  // Query rows as A; keys transposed as B; values as B.
  static void load_queries(const Task& t, const Sequence& s, ForwardBuffers<Number>& b) {
    if constexpr (!pairs) {
      load_rows(t, TESSERA_Q, s, b.rows, t.p.dim, b.q, b.d);
    } else {
      for (Index r = 0; r < b.rows.count; ++r)
        copy_row(reinterpret_cast<Half*>(b.q) + r * b.d, plane_q(t, TESSERA_Q, s, b.rows.h[r]), b.rows.i[r], t.p.dim);
    }
  }
  static Factor<Element> queries(const ForwardBuffers<Number>& b) {
    return {reinterpret_cast<const Element*>(b.q), b.d / P::width, 1};
  }
  static void load_keys_transposed(const Task& t, const Sequence& s, Index kv, Range keys, ForwardBuffers<Number>& b) {
    const Plane from = plane_k(t, TESSERA_K, s, kv);
    if constexpr (pairs) copy_keys(t, s, from, keys, t.p.dim, reinterpret_cast<Half*>(b.k), b.d);
    else load_keys(t, s, from, keys, t.p.dim, b.k, b.d);
    transpose(reinterpret_cast<const Element*>(b.k), b.d / P::width, keys.size(), depth(t.p.dim),
              reinterpret_cast<Element*>(b.kt), b.n);
  }
  static Index depth(Index n) { return (n + P::width - 1) / P::width; }

  // bf16 as it is. False if a number is not finite.
  static bool copy_row(Half* to, const Plane& from, Index row, Index n) {
    const char* at = from.at + row * from.row_stride * 2;
    if (from.dim_stride == 1) std::memcpy(to, at, static_cast<size_t>(n) * 2);
    else
      for (Index i = 0; i < n; ++i) std::memcpy(to + i, at + i * from.dim_stride * 2, 2);
    for (Index i = n; i < padded(n); ++i) to[i] = 0;
    Half bad = 0;
    for (Index i = 0; i < padded(n); ++i) bad = static_cast<Half>(bad | ((to[i] & 0x7F80u) == 0x7F80u));
    return bad == 0;
  }
  static bool copy_keys(const Task& t, const Sequence& s, const Plane& from, Range keys, Index n, Half* to,
                        Index to_row) {
    bool finite = true;
    for (Index j = keys.begin; j < keys.end; ++j) {
      Half* row = to + (j - keys.begin) * to_row;
      if (core::excluded_for_all(t.p, t.bound, s, j)) clear(row, to_row);
      else finite &= copy_row(row, from, j, n);
    }
    return finite;
  }
  // Values, in pairs of keys if need be. False if a number is not finite. `b.k` is free again by now and serves as the
  // stage.
  static bool load_values(const Task& t, const Sequence& s, Index kv, Range keys, ForwardBuffers<Number>& b) {
    const Plane from = plane_k(t, TESSERA_V, s, kv);
    if constexpr (!pairs) {
      load_keys(t, s, from, keys, t.p.dim_v, b.v, b.dv);
      return all_finite(b.v, keys.size(), b.dv);
    } else {
      Half* stage = reinterpret_cast<Half*>(b.k);
      const bool finite = copy_keys(t, s, from, keys, t.p.dim_v, stage, b.dv);
      if (keys.size() & 1) clear(stage + keys.size() * b.dv, b.dv);
      uint32_t* to = reinterpret_cast<uint32_t*>(b.v);
      for (Index j = 0; j < depth(keys.size()); ++j)
        for (Index c = 0; c < b.dv; ++c)
          to[j * b.dv + c] = stage[2 * j * b.dv + c] | static_cast<uint32_t>(stage[(2 * j + 1) * b.dv + c]) << 16;
      return finite;
    }
  }
  static void clear_nonfinite(Range keys, ForwardBuffers<Number>& b) {
    using Part = std::conditional_t<pairs, Half, Number>;
    Part* const v = reinterpret_cast<Part*>(b.v);
    for (Index n = 0; n < depth(keys.size()) * P::width * b.dv; ++n) {
      if constexpr (pairs) v[n] = (v[n] & 0x7F80u) == 0x7F80u ? Half{0} : v[n];
      else v[n] = is_finite(v[n]) ? v[n] : Number{0};
    }
  }
  // The weights of a tile as A.
  static Factor<Element> weights(Range keys, ForwardBuffers<Number>& b) {
    if constexpr (!pairs) {
      return {b.scores, b.n, 1};
    } else {
      Half* to = b.weights;
      for (Index r = 0; r < b.rows.count; ++r)
        for (Index c = 0; c < padded(keys.size()); c += lanes<float>)
          store_bf16(to + r * b.n + c, load(b.scores + r * b.n + c));
      return {reinterpret_cast<const Element*>(to), b.n / 2, 1};
    }
  }
};

template <class P>
void attend_tile(const Task& t, const RowItem& item, const rules::BandMask& band, const rules::Visit& visit, Range keys,
                 ForwardBuffers<typename P::Number>& b) {
  using T = typename P::Number;
  using Op = Operands<P>;
  const Sequence& s = item.s;
  TileMask mask = {visit.full.covers(keys), core::has_element_mask(t.p)};
  const auto fill = [&] { return fill_kept(t, s, band, b.rows, keys, b.kept, b.n); };
  if (mask.elements && fill() == 0) return;

  Op::load_keys_transposed(t, s, item.kv, keys, b);
  const Index columns = padded(keys.size());
  clear(b.scores, b.rows.count * b.n);
  multiply<P>(b.rows.count, columns, Op::depth(t.p.dim), Op::queries(b), reinterpret_cast<typename P::Element*>(b.kt),
              b.n, b.scores, b.n);

  for (Index r = 0; r < b.rows.count; ++r) {
    T* row = b.scores + r * b.n;
    score_row<T>(t, s, band, mask, b.rows.i[r], b.rows.h[r], keys, b.kept + r * b.n, row, nullptr, b.line);
    const T rescale = softmax_row(row, columns, b.largest[r], b.sum[r]);
    T* out = b.out + r * b.dv;
    if (rescale != 1)
      for (Index c = 0; c < b.dv; c += lanes<T>) store(out + c, load(out + c) * rescale);
    if (t.p.dropout > 0) {
      dropout_row(t, s, b.rows.i[r], b.rows.h[r], keys, b.line);
      for (Index c = 0; c < columns; c += lanes<T>) store(row + c, load(row + c) * load(b.line + c));
    }
  }

  // Numbers of V that are not finite count as 0 in the product and are added where they are kept: a row's bits depend
  // neither on them where it excludes them, nor on what its neighbours see.
  const bool finite = Op::load_values(t, s, item.kv, keys, b);
  if (!finite) Op::clear_nonfinite(keys, b);
  multiply<P>(b.rows.count, b.dv, Op::depth(keys.size()), Op::weights(keys, b),
              reinterpret_cast<typename P::Element*>(b.v), b.dv, b.out, b.dv);
  if (finite) return;
  if (!mask.elements) fill();
  load_keys(t, s, plane_k(t, TESSERA_V, s, item.kv), keys, t.p.dim_v, b.v, b.dv);
  for (Index r = 0; r < b.rows.count; ++r)
    for (Index j = 0; j < keys.size(); ++j)
      for (Index c = 0; b.kept[r * b.n + j] && c < b.dv; ++c) {
        // A kept key's weight is above 0 even if it is too small for its type.
        const T weight = t.p.dropout > 0 ? b.scores[r * b.n + j] : larger(b.scores[r * b.n + j], smallest_normal<T>);
        if (!is_finite(b.v[j * b.dv + c])) b.out[r * b.dv + c] += weight * b.v[j * b.dv + c];
      }
}

// The sink joins, the sum divides, and the row leaves.
template <class T>
void finish_row(const Task& t, const Sequence& s, Index i, Index h, T largest_score, T total, T* out, Index dv) {
  if (t.has(TESSERA_MAX_SCORE)) write_row(t, TESSERA_MAX_SCORE, s, h, i, largest_score);
  T rescale = 1;
  if (t.has(TESSERA_SINKS)) {
    const T sink = head_number<T>(t, TESSERA_SINKS, 0, h);
    const T whole = rules::max(largest_score, sink);
    const auto exponential = [](T x) { return std::exp(x); };
    rescale = rules::weight(largest_score, whole, exponential);
    total = total * rescale + rules::weight(sink, whole, exponential);
    largest_score = whole;
  }
  const bool empty = total == 0;
  if (empty) clear(out, dv);
  else settle(out, dv, rescale, total);
  store_row(out, plane_q(t, TESSERA_OUT, s, h), i, t.p.dim_v);
  if (t.has(TESSERA_LSE)) write_row(t, TESSERA_LSE, s, h, i, empty ? -infinity<T> : largest_score + std::log(total));
}

template <class P>
void attend(const Task& t, const RowItem& item, std::byte* scratch) {
  using T = typename P::Number;
  Carver carve(scratch);
  ForwardBuffers<T> b(carve, t.p, t.tile_rows, t.tile_keys);
  const Sequence& s = item.s;
  const rules::BandMask band = core::band_mask(t.p, s);
  name_rows(b.rows, t, item.kv, item.rows);
  Operands<P>::load_queries(t, s, b);
  clear(b.out, b.rows.count * b.dv);
  for (Index r = 0; r < b.rows.count; ++r) b.largest[r] = -infinity<T>, b.sum[r] = 0;

  const rules::Visit visit = rules::visit(band, {b.rows.i[0], b.rows.i[b.rows.count - 1] + 1});
  visit_tiles(visit, t.tile_keys, s.k.used, [&](Range keys) { attend_tile<P>(t, item, band, visit, keys, b); });

  for (Index r = 0; r < b.rows.count; ++r)
    finish_row(t, s, b.rows.i[r], b.rows.h[r], b.largest[r], b.sum[r], b.out + r * b.dv, b.dv);
}

}  // namespace tessera::cpu::TESSERA_ISA
