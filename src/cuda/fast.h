// What the fast kernels refuse alike. Each function returns a sentence, or nothing.
#pragma once
#include <span>
#include <string>

#include "core/plan.h"

namespace tessera::cuda {

// Device, dtype, lengths, and options that none of them has.
std::string refuse_fast(const core::Problem& p, const core::Device& device);
// That, other passes, and caches.
std::string refuse_forward(const core::Problem& p, const core::Device& device);
// Weights are powers of the scaled product.
std::string refuse_scale(const core::Problem& p);
std::string refuse_shared(int bytes, const core::Device& device);
// Rows are copied 16 bytes at a time: strides in a plan, addresses at a run (TESSERA_INVALID).
std::string refuse_rows(const core::Problem& p, std::span<const int> names);
void check_rows(const core::Problem& p, const core::Bindings& bound, std::span<const int> names);

}  // namespace tessera::cuda
