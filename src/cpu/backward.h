// Backward by recomputation. Each walk writes its own outputs once, in a fixed order: over tiles of keys (dK, dV), over
// tiles of rows (dQ; each row's share of dSlopes) and over tiles of the bias (dBias). Nothing is added to from two
// threads, so every result is repeatable.
#pragma once
#include "cpu/scores.h"

namespace tessera::cpu::TESSERA_ISA {

// dO . out of each row: what backward takes off every dO . v.
template <class T>
void row_deltas(const Task& t, const RowItem& item, std::byte* scratch) {
  Carver carve(scratch);
  BackwardBuffers<T> b(carve, t.p, t.tile_rows, t.tile_keys);
  const Sequence& s = item.s;
  const rules::BandMask band = core::band_mask(t.p, s);
  name_rows(b.rows, t, item.kv, item.rows);
  for (Index r = 0; r < b.rows.count; ++r) {
    const Index i = b.rows.i[r], h = b.rows.h[r];
    T* out = b.line;
    T* dout = b.dout;
    load_row(out, plane_q(t, TESSERA_OUT, s, h), i, t.p.dim_v);
    load_row(dout, plane_q(t, TESSERA_DOUT, s, h), i, t.p.dim_v);
    // The very chain of multiply-adds that makes dO . v: a row that sees one key has out = v, and its gradient is 0,
    // not the difference of two ways to round.
    Vec<T> chain{};
    for (Index c = 0; c < t.p.dim_v; ++c) chain = Plain<T>::step(chain, splat(dout[c]), splat(out[c]));
    T delta = chain[0];
    // An empty row gives nothing to anybody, whatever dO holds there; only a sink keeps its lse finite.
    const T lse = read_row<T>(t, TESSERA_LSE, s, h, i);
    if (lse == -infinity<T>) delta = 0;
    if (!std::isfinite(delta)) {
      bool empty = true;
      for (Index j = 0; j < s.k.used && empty; ++j) empty = !core::keeps(t.p, t.bound, s, band, h, i, j);
      if (empty) delta = 0;
    }
    t.delta<T>()[t.row_slot(s, h, i)] = delta;
  }
}

// Rows as backward needs them: q, dO, lse, delta, dLSE. A row without keys (lse = -inf) is all zeros.
template <class T>
void load_backward_rows(const Task& t, const Sequence& s, BackwardBuffers<T>& b) {
  for (Index r = 0; r < b.rows.count; ++r) {
    const Index i = b.rows.i[r], h = b.rows.h[r];
    b.lse[r] = read_row<T>(t, TESSERA_LSE, s, h, i);
    b.delta[r] = t.delta<T>()[t.row_slot(s, h, i)];
    b.dlse[r] = t.has(TESSERA_DLSE) ? read_row<T>(t, TESSERA_DLSE, s, h, i) : T{0};
    if (b.lse[r] == -infinity<T>) {
      clear(b.q + r * b.d, b.d);
      clear(b.dout + r * b.dv, b.dv);
    } else {
      load_row(b.q + r * b.d, plane_q(t, TESSERA_Q, s, h), i, t.p.dim);
      load_row(b.dout + r * b.dv, plane_q(t, TESSERA_DOUT, s, h), i, t.p.dim_v);
    }
  }
}
template <class T>
void load_backward_keys(const Task& t, const Sequence& s, Index kv, Range keys, BackwardBuffers<T>& b) {
  core::Seen all;
  all.near = keys;
  load_keys(t, TESSERA_K, s, kv, keys, all, t.p.dim, b.k, b.d);
  load_keys(t, TESSERA_V, s, kv, keys, all, t.p.dim_v, b.v, b.dv);
  transpose(b.k, b.d, keys.size(), t.p.dim, b.kt, b.n);
  transpose(b.v, b.dv, keys.size(), t.p.dim_v, b.vt, b.n);
}

// One tile: scores -> P D (of dV) and G, then dZ = G dt/dz in `dz` (of dQ and dK); G stays in `g`.
// False if no row sees a key.
template <class T>
bool gradient_tile(const Task& t, const Sequence& s, const rules::BandMask& band, TileMask mask, Range keys,
                   BackwardBuffers<T>& b) {
  if (mask.elements && fill_kept(t, s, band, b.rows, keys, b.kept, b.n) == 0) return false;
  const Index columns = padded(keys.size());
  clear(b.scores, b.rows.count * b.n);
  clear(b.dz, b.rows.count * b.n);
  multiply<Plain<T>>(b.rows.count, columns, t.p.dim, {b.q, b.d, 1}, b.kt, b.n, b.scores, b.n);
  multiply<Plain<T>>(b.rows.count, columns, t.p.dim_v, {b.dout, b.dv, 1}, b.vt, b.n, b.dz, b.n);
  for (Index r = 0; r < b.rows.count; ++r) {
    T *row = b.scores + r * b.n, *dz = b.dz + r * b.n, *g = b.g + r * b.n, *cap = b.cap + r * b.n;
    const Index i = b.rows.i[r], h = b.rows.h[r];
    score_row<T>(t, s, band, mask, i, h, keys, b.kept + r * b.n, row, cap, b.line);
    if (b.lse[r] == -infinity<T>)
      for (Index c = 0; c < columns; ++c) row[c] = -infinity<T>;
    if (t.p.dropout > 0) dropout_row(t, s, i, h, keys, b.line);
    for (Index c = 0; c < columns; c += lanes<T>) {
      const Vec<T> score = load(row + c);
      const Vec<T> weight = score == -infinity<T> ? Vec<T>{} : exp(score - b.lse[r]);
      Vec<T> dropped = weight, through = load(dz + c);
      if (t.p.dropout > 0) {
        dropped = weight * load(b.line + c);
        through = through * load(b.line + c);
      }
      const Vec<T> gradient = score == -infinity<T> ? Vec<T>{} : weight * ((through - b.delta[r]) + b.dlse[r]);
      store(row + c, dropped);
      store(g + c, gradient);
      store(dz + c, gradient);
      if (t.p.softcap > 0) store(dz + c, score == -infinity<T> ? Vec<T>{} : gradient * load(cap + c));
    }
  }
  return true;
}

template <class T>
TileMask tile_mask(const Task& t, const rules::BandMask& band, const RowTile& rows, Range keys) {
  const rules::Visit v = rules::visit(band, {rows.i[0], rows.i[rows.count - 1] + 1});
  return {v.full.covers(keys), core::has_element_mask(t.p)};
}

// A product in which excluded pairs must not take part: the plain one unless B holds numbers that are not finite.
template <class T>
struct Guard {
  const Task& t;
  const Sequence& s;
  const rules::BandMask& band;
  TileMask mask;
  Range keys;
  BackwardBuffers<T>& b;

  // Are there excluded pairs, and could B spoil them?
  bool needed(const T* right, Index rows, Index width) const {
    return !(mask.full && !mask.elements && !t.has(TESSERA_BIAS)) && !all_finite(right, rows, width);
  }
  void fill() const {
    if (!mask.elements) fill_kept(t, s, band, b.rows, keys, b.kept, b.n);
  }
  // C[key] += sum_row A(row, key) B[row]
  void onto_keys(const T* a, const T* right, Index width, T* c) const {
    const Index n = keys.size(), depth = b.rows.count;
    if (!needed(right, depth, width)) return multiply<Plain<T>>(n, width, depth, {a, 1, b.n}, right, width, c, width);
    fill();
    multiply_kept<T>(n, width, depth, {a, 1, b.n}, {b.kept, 1, b.n}, right, width, c, width);
  }
  // C[row] += sum_key A(row, key) B[key]
  void onto_rows(const T* a, const T* right, Index width, T* c) const {
    const Index m = b.rows.count, depth = keys.size();
    if (!needed(right, depth, width)) return multiply<Plain<T>>(m, width, depth, {a, b.n, 1}, right, width, c, width);
    fill();
    multiply_kept<T>(m, width, depth, {a, b.n, 1}, {b.kept, b.n, 1}, right, width, c, width);
  }
};

template <class T>
void gradients_of_keys(const Task& t, const KeyItem& item, std::byte* scratch) {
  Carver carve(scratch);
  BackwardBuffers<T> b(carve, t.p, t.tile_rows, t.tile_keys);
  const Sequence& s = item.s;
  const rules::BandMask band = core::band_mask(t.p, s);
  const Index group = core::group(t.p);
  load_backward_keys(t, s, item.kv, item.keys, b);
  clear(b.grad_k, item.keys.size() * b.d);
  clear(b.grad_v, item.keys.size() * b.dv);

  const Range seeing = rules::rows_visiting(band, {0, s.q.used}, item.keys);
  const Range rows = {seeing.begin * group, seeing.end * group};
  for (Index tile = rows.begin / t.tile_rows; tile * t.tile_rows < rows.end; ++tile) {
    name_rows(b.rows, t, item.kv,
              rules::overlap({tile * t.tile_rows, (tile + 1) * t.tile_rows}, {0, s.q.used * group}));
    load_backward_rows(t, s, b);
    const TileMask mask = tile_mask<T>(t, band, b.rows, item.keys);
    if (!gradient_tile(t, s, band, mask, item.keys, b)) continue;
    const Guard<T> guard = {t, s, band, mask, item.keys, b};
    if (t.has(TESSERA_DV)) guard.onto_keys(b.scores, b.dout, b.dv, b.grad_v);
    if (t.has(TESSERA_DK)) guard.onto_keys(b.dz, b.q, b.d, b.grad_k);
  }
  for (Index j = item.keys.begin; j < item.keys.end; ++j) {
    T* dk = b.grad_k + (j - item.keys.begin) * b.d;
    settle(dk, b.d, static_cast<T>(t.scale));
    if (t.has(TESSERA_DK)) store_row(dk, plane_k(t, TESSERA_DK, s, item.kv), j, t.p.dim);
    T* dv = b.grad_v + (j - item.keys.begin) * b.dv;
    settle(dv, b.dv, T{1});
    if (t.has(TESSERA_DV)) store_row(dv, plane_k(t, TESSERA_DV, s, item.kv), j, t.p.dim_v);
  }
}

// A tile of rows against all keys it sees: after(guard) for each tile of keys, with its gradients in the buffers.
template <class T, class After>
TESSERA_ALWAYS void walk_rows(const Task& t, const RowItem& item, BackwardBuffers<T>& b, After&& after) {
  const Sequence& s = item.s;
  name_rows(b.rows, t, item.kv, item.rows);
  load_backward_rows(t, s, b);
  visit_tiles(item.visit, {0, s.k.used}, t.tile_keys, [&](Range keys) {
    load_backward_keys(t, s, item.kv, keys, b);
    const Guard<T> guard = {t, s, item.band, {item.visit.full.covers(keys), core::has_element_mask(t.p)}, keys, b};
    if (gradient_tile(t, s, item.band, guard.mask, keys, b)) after(guard);
  });
}

template <class T>
void gradients_of_rows(const Task& t, const RowItem& item, std::byte* scratch) {
  Carver carve(scratch);
  BackwardBuffers<T> b(carve, t.p, t.tile_rows, t.tile_keys);
  clear(b.grad_q, item.rows.size() * b.d);
  walk_rows(t, item, b, [&](const Guard<T>& guard) { guard.onto_rows(b.dz, b.k, b.d, b.grad_q); });
  for (Index r = 0; r < b.rows.count; ++r) {
    settle(b.grad_q + r * b.d, b.d, static_cast<T>(t.scale));
    store_row(b.grad_q + r * b.d, plane_q(t, TESSERA_DQ, item.s, b.rows.h[r]), b.rows.i[r], t.p.dim);
  }
}

// sum_j -|p - j| G_ij of each row.
template <class T>
void gradients_of_slopes(const Task& t, const RowItem& item, std::byte* scratch) {
  Carver carve(scratch);
  BackwardBuffers<T> b(carve, t.p, t.tile_rows, t.tile_keys);
  T* const shares = b.shares;
  clear(shares, item.rows.size());
  walk_rows(t, item, b, [&](const Guard<T>& guard) {
    for (Index r = 0; r < b.rows.count; ++r)
      for (Index c = 0; c < guard.keys.size(); ++c) {
        const Index away = b.rows.i[r] + item.s.offset - guard.keys.begin - c;
        shares[r] -= static_cast<T>(away < 0 ? -away : away) * b.g[r * b.n + c];
      }
  });
  for (Index r = 0; r < b.rows.count; ++r)
    t.slope_rows[t.row_slot(item.s, b.rows.h[r], b.rows.i[r])] = static_cast<double>(shares[r]);
}

// A tile of dbias sums G over all that its broadcast dimensions stand for.
template <class T>
void gradients_of_bias(const Task& t, const BiasItem& item, std::byte* scratch) {
  Carver carve(scratch);
  BackwardBuffers<T> b(carve, t.p, t.tile_rows, t.tile_keys);
  const Operand& o = t.operand(TESSERA_DBIAS);
  const bool one_row = o.extent[2] == 1, one_key = o.extent[3] == 1;
  const Index height = one_row ? 1 : item.rows.size(), width = one_key ? 1 : item.keys.size();
  clear(b.grad_bias, height * b.n);
  const auto line_of = [&](Index i) { return b.grad_bias + (one_row ? 0 : i - item.rows.begin) * b.n; };

  for (Index batch = item.batches.begin; batch < item.batches.end; ++batch) {
    const Sequence s = core::sequence(t.p, t.bound, batch);
    const rules::BandMask band = core::band_mask(t.p, s);
    const Range rows = rules::overlap(item.rows, {0, s.q.used}), all_keys = rules::overlap(item.keys, {0, s.k.used});
    if (rows.empty() || all_keys.empty()) continue;
    for (Index h = item.heads.begin; h < item.heads.end; ++h)
      for (Index i = rows.begin; i < rows.end; i += t.tile_rows) {
        b.rows.count = rules::min(t.tile_rows, rows.end - i);
        for (Index r = 0; r < b.rows.count; ++r) b.rows.i[r] = i + r, b.rows.h[r] = h;
        load_backward_rows(t, s, b);
        clear(b.shares, b.rows.count);
        rules::Visit visit = rules::visit(band, {i, i + b.rows.count});
        visit.head = rules::overlap(visit.head, all_keys);
        visit.near = rules::overlap(visit.near, all_keys);
        visit_tiles(visit, {0, s.k.used}, t.tile_keys, [&](Range keys) {
          load_backward_keys(t, s, h / core::group(t.p), keys, b);
          if (!gradient_tile(t, s, band, {visit.full.covers(keys), core::has_element_mask(t.p)}, keys, b)) return;
          for (Index r = 0; r < b.rows.count; ++r) {
            const T* g = b.g + r * b.n;
            if (one_key) {
              Vec<T> sums{};
              for (Index c = 0; c < padded(keys.size()); c += lanes<T>) sums += load(g + c);
              b.shares[r] += sum<T>(sums);
            } else {
              for (Index c = 0; c < keys.size(); ++c) line_of(i + r)[c] += g[c];
            }
          }
        });
        // A row's keys first, then the rows in their order: how many rows a tile has must not show.
        for (Index r = 0; one_key && r < b.rows.count; ++r) line_of(i + r)[0] += b.shares[r];
      }
  }
  const auto place = [&](Index i) {
    const Index at = core::offset_of(o, item.batches.begin, item.heads.begin, i, item.keys.begin);
    return Plane{static_cast<char*>(t.bound.data[TESSERA_DBIAS]) + at * bytes_of(o.dtype), o.dtype, 0, o.stride[3]};
  };
  for (Index r = 0; r < height; ++r) {
    settle(b.grad_bias + r * b.n, b.n, T{1});
    store_row(b.grad_bias + r * b.n, place(item.rows.begin + r), 0, width);
  }
}

}  // namespace tessera::cpu::TESSERA_ISA
