// The CPU engine: tiled online softmax, forward and backward, one body compiled per instruction set.
#pragma once
#include <span>

#include "core/plan.h"

namespace tessera::cpu {

std::span<const core::Kernel* const> kernels();  // best instruction set first
void check_merge(const tessera_merge& m);        // throws core::Error(TESSERA_INVALID)
int64_t merge_bytes(const tessera_merge& m);     // of workspace
void merge(const tessera_merge& m, std::byte* workspace);

}  // namespace tessera::cpu
