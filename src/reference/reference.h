// The oracle and the yardstick. They state every rule of the contract again as plain formulas and share none with the
// engines (they read Problems and bindings through core, and nothing from rules).
#pragma once
#include <span>
#include <vector>

#include "core/plan.h"
#include "reference/view.h"

namespace tessera::reference {

// "reference.oracle" (float64) and "reference.naive" (materialised float32 with a fused kernel's roundings).
std::span<const core::Kernel* const> kernels();

// Contract section 9: judges the outputs bound in `got`. Allocates.
std::vector<tessera_verdict> verify(const core::Problem& p, const core::Bindings& got, int64_t sample_pairs);

// Both passes in float64.
void merge(const tessera_merge& m);

// One unit of work: a batch and a KV head, with the query heads that read it.
struct Pair {
  int64_t batch, head_kv;
};
// `n` pairs evenly spread, the first and the last among them; all if n is 0 or no less than there are.
std::vector<Pair> sampled_pairs(int64_t batch, int64_t heads_kv, int64_t n);

struct Task {
  int64_t sample_pairs = 0;  // 0: all. A sample leaves other outputs and the gradients summed over pairs untouched
  int threads = 1;           // results do not depend on it
  Target row_facts = {};     // if present, (B, Sq, Hq, 1) f64: `nothing_kept`, else what bounds an error of the row's
                             // lse: max_j |scale| sum_d |q_id k_jd| over its kept keys (forward; 0 in backward)
};
inline constexpr double nothing_kept = -1;

// Outputs may be declared with any float dtype here: they are rounded once, as they are written. k and v may not: what
// is appended is read again. STATUS is left alone.
void oracle(const core::Problem& p, const core::Bindings& bound, const Task& task);
void naive(const core::Problem& p, const core::Bindings& bound, const Task& task);

}  // namespace tessera::reference
