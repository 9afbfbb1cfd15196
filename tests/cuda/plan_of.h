// Plans of lines by the CUDA engine alone, for devices that are known or made up.
#pragma once
#include <string>

#include "core/line.h"
#include "core/plan.h"
#include "cuda/cuda.h"

namespace tessera::cuda {

inline core::Plan plan_of(const std::string& line, const core::Device& device, const core::Hints& hints = {}) {
  return core::choose(kernels(), core::parse(line).problem, device, hints);
}
inline core::Plan plan_of(const std::string& line, const char* device = "h200", const core::Hints& hints = {}) {
  return plan_of(line, core::find_device(device), hints);
}

}  // namespace tessera::cuda
