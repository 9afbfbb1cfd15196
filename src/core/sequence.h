// What the lengths in the bindings say: where each sequence's rows lie, and what its mask is.
#pragma once
#include "core/operand.h"
#include "rules/slots.h"

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
  Rows q, k;           // k.used is Lk: new tokens are counted, left padding is not
  Rows fresh;          // of k_new and v_new
  int64_t offset = 0;  // p_i = i + offset
  rules::Slots slots;  // where its keys lie in k and v

  int64_t old_keys() const { return k.used - fresh.used; }  // and the position of new token 0
};

// Lengths, page ids and positions that are malformed are TESSERA_INVALID, with a tessera_status in the Error. Reads
// only host memory, O(batch) and the page ids in use.
void check_lengths(const Problem& p, const Bindings& bound);
Sequence sequence(const Problem& p, const Bindings& bound, int64_t batch);
// Two new tokens for one slot are TESSERA_INVALID. Needs room for `most_targets` numbers.
int64_t most_targets(const Problem& p);
void check_targets(const Problem& p, const Bindings& bound, int64_t* room);
// All keys that some of `rows` may see, as far as bands go.
struct Seen {
  rules::BandMask band;
  rules::Range rows;
  rules::Range head, near;  // hulls, in order; they do not overlap
  bool gaps = false;        // hulls may hold keys that no row sees
  bool has(int64_t key) const { return !gaps || rules::some_row_sees(band, rows, key); }  // of a key of the hulls
};
Seen seen_keys(const rules::BandMask& band, const rules::Visit& visit, rules::Range rows);
Seen seen_keys(const Problem& p, const Sequence& s);  // by all used rows
// Rows past the last sequence of a packed operand.
Rows tail_q(const Problem& p, const Bindings& bound);
Rows tail_k(const Problem& p, const Bindings& bound);

rules::BandMask band_mask(const Problem& p, int64_t keys, int64_t offset);
inline rules::BandMask band_mask(const Problem& p, const Sequence& s) {
  return band_mask(p, s.k.used, s.offset);
}

}  // namespace tessera::core
