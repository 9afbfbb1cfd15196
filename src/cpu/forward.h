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
    for (Index r = 0; r < b.rows.count; ++r) load_query(t, s, r, b);
  }
  static void load_query(const Task& t, const Sequence& s, Index r, ForwardBuffers<Number>& b) {
    const Plane from = plane_q(t, TESSERA_Q, s, b.rows.h[r]);
    const Index i = b.rows.i[r];
    if constexpr (!pairs) {
      Number* const row = b.q + r * b.d;
      load_row(row, from, i, t.p.dim);
      if (rotates(t, s)) rotate_row(t, b.rotary, i + s.offset, row);
    } else {
      Half* const row = reinterpret_cast<Half*>(b.q) + r * b.d;
      if (!rotates(t, s)) {
        copy_row(row, from, i, t.p.dim);
        return;
      }
      load_row(b.rotary.row, from, i, t.p.dim);
      rotate_row(t, b.rotary, i + s.offset, b.rotary.row);
      for (Index c = 0; c < b.d; c += lanes<float>) store_bf16(row + c, load(b.rotary.row + c));
    }
  }
  static Factor<Element> queries(const ForwardBuffers<Number>& b) {
    return {reinterpret_cast<const Element*>(b.q), b.d / P::width, 1};
  }
  static void load_keys_transposed(const Task& t, const Sequence& s, Index kv, Range keys, const core::Seen& seen,
                                   ForwardBuffers<Number>& b) {
    if constexpr (pairs) copy_keys(t, TESSERA_K, s, kv, keys, seen, t.p.dim, reinterpret_cast<Half*>(b.k), b.d);
    else load_keys(t, TESSERA_K, s, kv, keys, seen, t.p.dim, b.k, b.d);
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
  static bool copy_keys(const Task& t, int name, const Sequence& s, Index kv, Range keys, const core::Seen& seen,
                        Index n, Half* to, Index to_row) {
    bool finite = true;
    clear(to, keys.size() * to_row);
    const bool picky = is_picky(t, seen);
    for_seen_runs(s, keys, seen, [&](Index first, const rules::Run& run) {
      if (picky && !any_seen(t, s, seen, {first, first + run.count})) return;
      const Plane from = plane_of(t, name, run.plane, run.row, kv);
      for (Index at = 0; at < run.count; ++at)
        if (!picky || is_seen(t, s, seen, first + at))
          finite &= copy_row(to + (first + at - keys.begin) * to_row, from, at, n);
    });
    return finite;
  }
  // Values, in pairs of keys if need be. False if a number is not finite. `b.k` is free again by now and serves as the
  // stage.
  static bool load_values(const Task& t, const Sequence& s, Index kv, Range keys, const core::Seen& seen,
                          ForwardBuffers<Number>& b) {
    if constexpr (!pairs) {
      load_keys(t, TESSERA_V, s, kv, keys, seen, t.p.dim_v, b.v, b.dv);
      return all_finite(b.v, keys.size(), b.dv);
    } else {
      Half* stage = reinterpret_cast<Half*>(b.k);
      const bool finite = copy_keys(t, TESSERA_V, s, kv, keys, seen, t.p.dim_v, stage, b.dv);
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
void attend_tile(const Task& t, const RowItem& item, Range keys, ForwardBuffers<typename P::Number>& b,
                 State<typename P::Number>& state) {
  using T = typename P::Number;
  using Op = Operands<P>;
  const Sequence& s = item.s;
  TileMask mask = {item.visit.full.covers(keys), core::has_element_mask(t.p)};
  const auto fill = [&] { return fill_kept(t, s, item.band, b.rows, keys, b.kept, b.n); };
  if (mask.elements && fill() == 0) return;

  Op::load_keys_transposed(t, s, item.kv, keys, item.seen, b);
  const Index columns = padded(keys.size());
  clear(b.scores, b.rows.count * b.n);
  multiply<P>(b.rows.count, columns, Op::depth(t.p.dim), Op::queries(b), reinterpret_cast<typename P::Element*>(b.kt),
              b.n, b.scores, b.n);

  for (Index r = 0; r < b.rows.count; ++r) {
    T* row = b.scores + r * b.n;
    score_row<T>(t, s, item.band, mask, b.rows.i[r], b.rows.h[r], keys, b.kept + r * b.n, row, nullptr, b.line);
    const T rescale = softmax_row(row, columns, state.largest[r], state.sum[r]);
    T* out = state.out + r * b.dv;
    if (rescale != 1)
      for (Index c = 0; c < b.dv; c += lanes<T>) store(out + c, load(out + c) * rescale);
    if (t.p.dropout > 0) {
      dropout_row(t, s, b.rows.i[r], b.rows.h[r], keys, b.line);
      for (Index c = 0; c < columns; c += lanes<T>) store(row + c, load(row + c) * load(b.line + c));
    }
  }

  // Numbers of V that are not finite count as 0 in the product and are added where they are kept: a row's bits depend
  // neither on them where it excludes them, nor on what its neighbours see.
  const bool finite = Op::load_values(t, s, item.kv, keys, item.seen, b);
  if (!finite) Op::clear_nonfinite(keys, b);
  multiply<P>(b.rows.count, b.dv, Op::depth(keys.size()), Op::weights(keys, b),
              reinterpret_cast<typename P::Element*>(b.v), b.dv, state.out, b.dv);
  if (finite) return;
  if (!mask.elements) fill();
  load_keys(t, TESSERA_V, s, item.kv, keys, item.seen, t.p.dim_v, b.v, b.dv);
  for (Index r = 0; r < b.rows.count; ++r)
    for (Index j = 0; j < keys.size(); ++j)
      for (Index c = 0; b.kept[r * b.n + j] && c < b.dv; ++c) {
        // A kept key's weight is above 0 even if it is too small for its type.
        const T weight = t.p.dropout > 0 ? b.scores[r * b.n + j] : larger(b.scores[r * b.n + j], smallest_normal<T>);
        if (!is_finite(b.v[j * b.dv + c])) state.out[r * b.dv + c] += weight * b.v[j * b.dv + c];
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

template <class T>
void begin(State<T>& state, Index rows, Index dv) {
  clear(state.out, rows * dv);
  for (Index r = 0; r < rows; ++r) state.largest[r] = -infinity<T>, state.sum[r] = 0;
}

// One row's state takes in that of later keys. An empty one, on either side, changes no bit.
template <class T>
void join(T* out, T& largest_score, T& total, const T* part_out, T part_largest, T part_total, Index dv) {
  const auto exponential = [](T x) { return std::exp(x); };
  const T whole = part_largest > largest_score || part_largest != part_largest ? part_largest : largest_score;
  const auto scale = [&](T largest) {
    if (largest == whole && whole != -infinity<T>) return T{1};
    const T weight = rules::weight(largest, whole, exponential);
    return largest != -infinity<T> ? rules::max(weight, smallest_normal<T>) : weight;  // as softmax_row
  };
  const T mine = scale(largest_score), its = scale(part_largest);
  largest_score = whole;
  total = total * mine + part_total * its;
  for (Index c = 0; c < dv; c += lanes<T>) store(out + c, fma(load(part_out + c), splat(its), load(out + c) * mine));
}

// A tile of query rows, loaded, and its walk over chunks of keys.
template <class P>
struct Attention {
  using T = typename P::Number;
  const Task& t;
  const RowItem& item;
  ForwardBuffers<T> b;

  Attention(const Task& task, const RowItem& rows, std::byte* scratch)
      : t(task), item(rows), b(buffers(task, scratch)) {
    name_rows(b.rows, t, item.kv, item.rows);
    Operands<P>::load_queries(t, item.s, b);
  }
  static ForwardBuffers<T> buffers(const Task& t, std::byte* scratch) {
    Carver carve(scratch);
    return ForwardBuffers<T>(carve, t.p, t.tile_rows, t.tile_keys);
  }
  Range keys_of(Index chunk) const {
    return rules::overlap({chunk * t.chunk_keys(), (chunk + 1) * t.chunk_keys()}, {0, item.s.k.used});
  }
  bool sees(Range keys) const {
    return !rules::overlap(item.visit.head, keys).empty() || !rules::overlap(item.visit.near, keys).empty();
  }
  void attend_chunk(Range keys, State<T>& state) {
    begin(state, b.rows.count, b.dv);
    visit_tiles(item.visit, keys, t.tile_keys, [&](Range tile) { attend_tile<P>(t, item, tile, b, state); });
  }
};

// A tile of rows against all its keys.
template <class P>
void attend(const Task& t, const RowItem& item, std::byte* scratch) {
  Attention<P> a(t, item, scratch);
  auto& b = a.b;
  begin(b.whole, b.rows.count, b.dv);
  const Range seen = rules::hull(item.visit.head, item.visit.near);
  bool first = true;
  for (Index chunk = seen.begin / t.chunk_keys(); chunk * t.chunk_keys() < seen.end; ++chunk) {
    const Range keys = a.keys_of(chunk);
    if (!a.sees(keys)) continue;
    a.attend_chunk(keys, first ? b.whole : b.part);  // joined to nothing it would be the same
    for (Index r = 0; !first && r < b.rows.count; ++r)
      join(b.whole.out + r * b.dv, b.whole.largest[r], b.whole.sum[r], b.part.out + r * b.dv, b.part.largest[r],
           b.part.sum[r], b.dv);
    first = false;
  }
  for (Index r = 0; r < b.rows.count; ++r)
    finish_row(t, item.s, b.rows.i[r], b.rows.h[r], b.whole.largest[r], b.whole.sum[r], b.whole.out + r * b.dv, b.dv);
}

// The state of one row after one chunk, in the workspace: out, then its largest score and its sum of weights.
template <class T>
T* state_of(const Task& t, const Sequence& s, Index h, Index i, Index chunk) {
  return reinterpret_cast<T*>(t.states) + (t.row_slot(s, h, i) * t.most_chunks() + chunk) * state_size(t.p);
}

// A tile of rows against one chunk.
template <class P>
void attend_chunk(const Task& t, const ChunkItem& item, std::byte* scratch) {
  using T = typename P::Number;
  Attention<P> a(t, item.rows, scratch);
  const auto& b = a.b;
  const Range keys = a.keys_of(item.chunk);
  if (a.sees(keys)) a.attend_chunk(keys, a.b.part);
  else begin(a.b.part, b.rows.count, b.dv);
  for (Index r = 0; r < b.rows.count; ++r) {
    T* const to = state_of<T>(t, item.rows.s, b.rows.h[r], b.rows.i[r], item.chunk);
    std::memcpy(to, b.part.out + r * b.dv, static_cast<size_t>(b.dv) * sizeof(T));
    to[b.dv] = b.part.largest[r];
    to[b.dv + 1] = b.part.sum[r];
  }
}

// The chunks of a tile of rows, joined in their order.
template <class T>
void combine(const Task& t, const RowItem& item, std::byte* scratch) {
  Carver carve(scratch);
  ForwardBuffers<T> b(carve, t.p, t.tile_rows, t.tile_keys);
  name_rows(b.rows, t, item.kv, item.rows);
  begin(b.whole, b.rows.count, b.dv);
  const Range chunks = t.chunks(item.s);
  for (Index r = 0; r < b.rows.count; ++r) {
    T* const out = b.whole.out + r * b.dv;
    for (Index chunk = chunks.begin; chunk < chunks.end; ++chunk) {
      const T* const part = state_of<T>(t, item.s, b.rows.h[r], b.rows.i[r], chunk);
      join(out, b.whole.largest[r], b.whole.sum[r], part, part[b.dv], part[b.dv + 1], b.dv);
    }
    finish_row(t, item.s, b.rows.i[r], b.rows.h[r], b.whole.largest[r], b.whole.sum[r], out, b.dv);
  }
}

}  // namespace tessera::cpu::TESSERA_ISA
