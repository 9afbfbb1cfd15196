// The portable forward kernel: what it refuses, its tiles, its launch.
#include <algorithm>

#include "core/error.h"
#include "cuda/fast.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/loaded.h"
#include "cuda/params.h"
#include "rules/dtype.h"

namespace tessera::cuda {
namespace {

using core::Device;
using core::Operand;
using core::Plan;
using core::Problem;
using rules::ForwardSpec;

// What ships for this dtype, dim and masks, the first whose tiles the device's shared memory holds, else the last;
// nullptr: nothing.
const ForwardSpec* shipped_for(const Problem& p, const Device& device) {
  const ForwardSpec* found = nullptr;
  for (const ForwardSpec& spec : shipped_forward()) {
    if (spec.dtype != float_of(p) || spec.dim != p.dim || spec.pairs != has_pairs(p)) continue;
    found = &spec;
    if (rules::shared_bytes(spec) <= device.shared_per_block) break;
  }
  return found;
}

int64_t blocks_of(const Problem& p, int tile_rows) {
  if (core::packed_q(p) && p.rows_q == 0) return 0;  // whatever the bounds say
  const int64_t items = p.heads_q * p.batch * rules::ceil_div(p.len_q, tile_rows);
  const int64_t tail = core::packed_q(p) ? std::min<int64_t>(rules::ceil_div(p.rows_q, tile_rows), 64) : 0;
  return items + tail;
}

// Under a hint other tiles than the shipped, if such a kernel can be; they are compiled at first use.
ForwardSpec spec_for(const Problem& p, const Device& device, const core::Hints& hints) {
  const ForwardSpec shipped = *shipped_for(p, device);
  ForwardSpec wished = shipped;
  if (hints.tile_rows) wished.tile_rows = hints.tile_rows;
  if (hints.tile_keys) wished.tile_keys = hints.tile_keys;
  const bool fits = rules::legal(wished) && rules::shared_bytes(wished) <= device.shared_per_block &&
                    blocks_of(p, wished.tile_rows) <= most_blocks;
  return fits ? wished : shipped;
}

constexpr int rows_by_16[] = {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_OUT};

// Biases and keep masks are read two keys at a time.
std::string refuse_pairs(const Problem& p) {
  for (const int name : {TESSERA_BIAS, TESSERA_KEEP}) {
    if (!core::has(p, name)) continue;
    const Operand& o = core::operand(p, name);
    const char* const text = core::operand_row(name).text;
    if (o.extent[3] != p.len_k || (o.extent[3] > 1 && o.stride[3] != 1))
      return fmt::format("{} has {} keys of stride {}; it reads all keys one after the other", text, o.extent[3],
                         o.stride[3]);
    if (name == TESSERA_KEEP) continue;
    if (o.dtype != core::data_dtype(p))
      return fmt::format("bias is {}, it reads q's dtype", rules::dtype_rows[o.dtype].text);
    for (int d = 0; d < 4; ++d)
      if (d == 3 ? o.extent[3] % 2 : o.extent[d] > 1 && o.stride[d] % 2)
        return fmt::format("bias has rows of {} numbers, stride[{}] {}; it reads two at once", o.extent[3], d,
                           o.stride[d]);
  }
  return "";
}

std::string refuse(const Problem& p, const Device& device) {
  if (std::string why = refuse_forward(p, device); !why.empty()) return why;
  if (std::string why = refuse_cache(p); !why.empty()) return why;
  if (std::string why = refuse_options(p); !why.empty()) return why;
  if (p.dim != p.dim_v || !shipped_for(p, device))
    return fmt::format("dims are {} and {}; it has D = Dv of 64 and 128, and without bias and keep mask 256", p.dim,
                       p.dim_v);
  if (std::string why = has_pairs(p) ? refuse_pairs(p) : refuse_scale(p); !why.empty()) return why;
  const ForwardSpec& spec = *shipped_for(p, device);
  if (const int64_t blocks = blocks_of(p, spec.tile_rows); blocks > most_blocks)
    return fmt::format("it would take {} blocks; a launch has at most {}", blocks, most_blocks);
  if (std::string why = refuse_shared(rules::shared_bytes(spec), device); !why.empty()) return why;
  return refuse_rows(p, rows_by_16);
}

void fill(Plan& plan, const core::Hints& hints) {
  const Problem& p = plan.problem;
  const ForwardSpec spec = spec_for(p, plan.device, hints);
  const Loaded& kernel = Loaded::of(spec);
  plan.threads = 1;
  plan.tile_rows = spec.tile_rows;
  plan.tile_keys = spec.tile_keys;
  core::Step step = {.name = "attend",
                     .text = {},
                     .launch = {.code = &kernel,
                                .blocks = blocks_of(p, spec.tile_rows),
                                .threads = kernel.code().threads,
                                .shared_bytes = kernel.code().shared_bytes}};
  step.text = fmt::format("tile {} rows x {} keys, {} stages; {} blocks of {} threads, {} KiB shared", spec.tile_rows,
                          spec.tile_keys, spec.stages, step.launch.blocks, step.launch.threads,
                          rules::ceil_div(step.launch.shared_bytes, 1024));
  plan.steps.push_back(std::move(step));
}

void run(const Plan& plan, const core::Bindings& bound, void* stream) {
  const core::Step& step = plan.steps.front();
  if (step.launch.blocks == 0) return;
  check_rows(plan.problem, bound, rows_by_16);
  const Launcher launcher(plan, bound, TESSERA_Q, stream);
  rules::ForwardParams params = forward_params(plan, bound);
  launcher.launch(step, &params);
}

}  // namespace

constinit const core::Kernel portable_forward = gpu_kernel("cuda.portable", refuse, fill, run);

}  // namespace tessera::cuda
