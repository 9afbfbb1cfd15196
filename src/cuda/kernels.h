// The CUDA engine's kernels, each in its own file.
#pragma once
#include "core/plan.h"
#include "cuda/launch.h"
#include "rules/params.h"

namespace tessera::cuda {

extern const core::Kernel sm90_forward;       // bf16 and f16 forward with bands on sm_90a: kernel_sm90_forward.cc
extern const core::Kernel portable_forward;   // bf16 and f16 forward, D = Dv of 64, 128 and 256: kernel_forward.cc
extern const core::Kernel portable_backward;  // the same backward, its dQ in no fixed order: kernel_backward.cc
extern const core::Kernel general;            // every option of the contract: kernel_general.cc

// A kernel that a plan may choose by itself, whatever the work; it merges nothing.
constexpr core::Kernel gpu_kernel(const char* name, decltype(core::Kernel::refuse) refuse,
                                  decltype(core::Kernel::fill) fill, decltype(core::Kernel::run) run) {
  return {.name = name,
          .engine = "cuda",
          .automatic = true,
          .least_flops = 0,
          .refuse = refuse,
          .fill = fill,
          .run = run,
          .merge_bytes = nullptr,
          .merge = nullptr};
}

// Steps that other kernels take from the general ones: new tokens go into a cache; splits of each row's keys become one
// (from `partials` in the workspace); rows past the last sequence of packed results are cleared.
int64_t partial_bytes(const core::Problem& p, int64_t splits);  // of `partials`
void add_append_step(core::Plan& plan);
void add_combine_step(core::Plan& plan, int splits);
void add_clear_step(core::Plan& plan);
void launch_general(const Launcher& launcher, const core::Step& step, rules::GeneralParams& params);

}  // namespace tessera::cuda
