// Shared prefixes: several problems over the same query rows and disjoint keys, answered as one. A level is a problem
// of its own; its sequences are the groups that share its keys. Their results are merged in order.
#pragma once
#include "core/plan.h"

namespace tessera::core {

inline constexpr size_t most_levels = 16;

// As `choose`, for each level; the last one's out and lse are the results.
Plan choose_cascade(std::span<const Kernel* const> kernels, std::span<const Problem> levels, const Device& device,
                    const Hints& hints);

// Runs the levels and merges them. bound[n] binds the inputs of level n; the last also out, lse and the workspace.
void run_cascade(const Plan& plan, std::span<const Bindings> bound, void* stream);

}  // namespace tessera::core
