// The CUDA engine: kernels for NVIDIA GPUs through the driver's interface alone.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "core/plan.h"

namespace tessera::cuda {

std::span<const core::Kernel* const> kernels();

// "cuda" and "cuda:N" are this machine's GPUs. Throws core::Error: no driver, no such device.
bool is_name_of_gpu(const std::string& name);
core::Device find_device(const std::string& name);
// In one sentence: ready, for which devices and with which kernels; or why not.
std::string status();

struct KernelFacts {
  std::string spec, target, origin;
  int registers, spill_bytes, threads;
  int64_t shared_bytes, code_bytes;
};
std::vector<KernelFacts> shipped_kernels();  // of the pack; those it lacks have no registers and no code
// Targets as "sm_80,sm_90,compute_80", empty for all that ship; NVRTC at that path, or the one that is found.
void build_pack(const std::string& path, const std::string& targets, const std::string& nvrtc);
void dump_pack(const std::string& folder);  // one file an image

}  // namespace tessera::cuda
