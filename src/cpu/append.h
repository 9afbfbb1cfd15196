// New tokens enter the cache: rotated, quantised if the cache is, each row written to its slot.
#pragma once
#include "cpu/tile.h"

namespace tessera::cpu::TESSERA_ISA {

// The row as the cache keeps it: e4m3 holds x / scale.
template <class T>
void unscale(const Task& t, int scale_name, const rules::Run& slot, Index kv, T* row, Index n) {
  if (!t.has(scale_name)) return;
  const T scale = scale_at<T>(t, scale_name, slot, 0, kv);
  for (Index c = 0; c < n; ++c) row[c] /= scale;
}

template <class T>
void append(const Task& t, const NewItem& item, std::byte* scratch) {
  const Problem& p = t.p;
  const Sequence& s = item.s;
  Carver carve(scratch);
  AppendBuffers<T> b(carve, p);
  for (Index n = item.tokens.begin; n < item.tokens.end; ++n) {
    const Index key = s.old_keys() + n;
    const rules::Run slot = s.slots.run(key, key + 1);
    for (Index kv = 0; kv < p.heads_kv; ++kv) {
      load_row(b.row, plane_of(t, TESSERA_K_NEW, s.fresh.plane, s.fresh.first, kv), n, p.dim);
      if (b.rotary.pairs) rotate_row(t, b.rotary, key, b.row);
      unscale(t, TESSERA_K_SCALE, slot, kv, b.row, p.dim);
      store_row(b.row, plane_of(t, TESSERA_K, slot.plane, slot.row, kv), 0, p.dim);
      if (p.cache.v_in_k) continue;
      load_row(b.row, plane_of(t, TESSERA_V_NEW, s.fresh.plane, s.fresh.first, kv), n, p.dim_v);
      unscale(t, TESSERA_V_SCALE, slot, kv, b.row, p.dim_v);
      store_row(b.row, plane_of(t, TESSERA_V, slot.plane, slot.row, kv), 0, p.dim_v);
    }
  }
}

}  // namespace tessera::cpu::TESSERA_ISA
