// What the fast kernels refuse alike. Each function returns a sentence, or nothing.
#pragma once
#include <span>
#include <string>

#include "core/plan.h"

namespace tessera::cuda {

// Device, dtype, lengths, windows off the diagonal.
std::string refuse_fast(const core::Problem& p, const core::Device& device);
// What only pairs of a query and a key have, biases and keep masks aside, and sinks.
std::string refuse_options(const core::Problem& p);
// That, and other passes.
std::string refuse_forward(const core::Problem& p, const core::Device& device);
// Caches and rotation.
std::string refuse_cache(const core::Problem& p);
// Weights are powers of the scaled product.
std::string refuse_scale(const core::Problem& p);
std::string refuse_shared(int bytes, const core::Device& device);
// Rows are copied 16 bytes at a time: strides in a plan, addresses at a run (TESSERA_INVALID).
std::string refuse_rows(const core::Problem& p, std::span<const int> names);
void check_rows(const core::Problem& p, const core::Bindings& bound, std::span<const int> names);

}  // namespace tessera::cuda
