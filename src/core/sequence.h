// What the lengths in the bindings say: where each sequence's rows lie, and what its mask is.
#pragma once
#include "core/operand.h"
#include "rules/mask.h"

namespace tessera::core {

using Bindings = tessera_bindings;

// Rows of q (or k) of one sequence. Element [sequence = row] of an operand at batch index `plane`:
// dense: plane = b, first = 0; packed: plane = 0, first = cu[b].
struct Rows {
  int64_t plane = 0;
  int64_t first = 0;
  int64_t used = 0;
  int64_t stored = 0;  // rows the operand has for it; [used, stored) are unused
};

struct Sequence {
  int64_t batch = 0;
  Rows q, k;
  int64_t offset = 0;  // p_i = i + offset
};

// Lengths that are malformed are TESSERA_INVALID. Reads only host memory, O(batch).
void check_lengths(const Problem& p, const Bindings& bound);
Sequence sequence(const Problem& p, const Bindings& bound, int64_t batch);
// Rows past the last sequence of a packed operand.
Rows tail_q(const Problem& p, const Bindings& bound);
Rows tail_k(const Problem& p, const Bindings& bound);

rules::BandMask band_mask(const Problem& p, int64_t keys, int64_t offset);
inline rules::BandMask band_mask(const Problem& p, const Sequence& s) {
  return band_mask(p, s.k.used, s.offset);
}

}  // namespace tessera::core
