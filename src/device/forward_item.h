// What forward kernels do alike: the order of their items, the masks of a sequence and its rows, rows past the last
// one.
#pragma once
#include "device/sequence.h"

namespace tessera::device {

using rules::ForwardParams;

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

}  // namespace tessera::device
