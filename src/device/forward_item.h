// What forward kernels do alike: the order of their items, the masks of a sequence and its rows, rows past the last
// one.
#pragma once
#include "device/sequence.h"

namespace tessera::device {

using rules::ForwardParams;
using rules::Range;

struct Sequence {
  Rows q, k;
  rules::BandMask band;
  TESSERA_DEVICE bool sound() const { return q.sound && k.sound; }
};
TESSERA_DEVICE Sequence sequence(const ForwardParams& p, int batch) {
  Sequence s = {rows_of(p.queries, batch), rows_of(p.keys, batch), p.band};
  s.band.keys = s.k.used;
  if (p.corner == rules::Corner::bottom_right) s.band.offset = s.k.used - s.q.used;
  if (p.corner == rules::Corner::per_sequence) s.band.offset = p.corner_offsets[batch];
  return s;
}

struct alignas(16) Row {
  Keys near, head;  // that it keeps
};

struct Item {
  int tile, head, batch;
};
// Heads come in sections whose K and V fit the L2 cache; in a section last tiles, which under a causal mask see the
// most keys, come first.
TESSERA_DEVICE Item item_of(const ForwardParams& p, int block) {
  const int heads = p.heads * p.batch, whole = p.section * p.row_tiles;
  const int first = block / whole * p.section, side_by_side = min(p.section, heads - first);
  const int rest = block % whole;
  const int head = first + rest % side_by_side;
  return {p.row_tiles - 1 - rest / side_by_side, head % p.heads, head / p.heads};
}

// Rows of a packed q past its last sequence, by the blocks past the last item.
TESSERA_DEVICE void clear_tail(const ForwardParams& p, int dim, int block, int blocks) {
  const int* const cu = p.queries.cu;
  bool unsound = cu[0] != 0 || cu[p.batch] > p.queries.rows;
  for (int b = thread_index(); b < p.batch; b += static_cast<int>(blockDim.x)) unsound |= cu[b + 1] < cu[b];
  if (__syncthreads_or(unsound)) {
    if (p.status && threadIdx.x == 0) atomicOr(p.status, rules::unsound_length);
    return;
  }
  const int end = cu[p.batch];
  const Index numbers = (p.queries.rows - end) * p.heads * dim;
  for (Index n = block * Index{blockDim.x} + threadIdx.x; n < numbers; n += blocks * Index{blockDim.x}) {
    const Index row = end + n / dim / p.heads, head = n / dim % p.heads, d = n % dim;
    const Index at = row * p.out_step.row + head * p.out_step.head + d;
    if (p.out_is_f32) static_cast<float*>(p.out)[at] = 0;
    else static_cast<unsigned short*>(p.out)[at] = 0;
    if (p.lse && d == 0) p.lse[row * p.lse_step.row + head * p.lse_step.head] = minus_infinity;
  }
}

}  // namespace tessera::device
