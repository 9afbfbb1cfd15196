// The portable backward kernel: what it refuses, its steps, its launches.
#include <algorithm>
#include <cmath>

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
using core::Plan;
using core::Problem;
using rules::BackwardParams;
using rules::BackwardPart;
using rules::BackwardSpec;

constexpr int rows_by_16[] = {TESSERA_Q,    TESSERA_K,  TESSERA_V,  TESSERA_OUT,
                              TESSERA_DOUT, TESSERA_DQ, TESSERA_DK, TESSERA_DV};

const BackwardSpec* shipped_for(const Problem& p, BackwardPart part) {
  const rules::Float dtype = core::data_dtype(p) == TESSERA_BF16 ? rules::Float::bf16 : rules::Float::f16;
  for (const BackwardSpec& spec : shipped_backward())
    if (spec.part == part && spec.dim == p.dim && (part != BackwardPart::attend || spec.dtype == dtype)) return &spec;
  return nullptr;
}
int64_t key_tiles(const Problem& p, const BackwardSpec& spec) {
  return rules::ceil_div(p.len_k, spec.tile_keys);
}

std::string refuse(const Problem& p, const Device& device) {
  if (p.pass != TESSERA_BACKWARD) return "it computes gradients only";
  if (std::string why = refuse_fast(p, device); !why.empty()) return why;
  if (std::string why = refuse_options(p); !why.empty()) return why;
  const int32_t dtype = core::data_dtype(p);
  if (core::operand(p, TESSERA_DOUT).dtype != dtype)
    return fmt::format("dout is {}, the kernel reads q's dtype",
                       rules::dtype_rows[core::operand(p, TESSERA_DOUT).dtype].text);
  if (p.dim != p.dim_v || !shipped_for(p, BackwardPart::attend))
    return fmt::format("dims are {} and {}; it has D = Dv of 64 and 128", p.dim, p.dim_v);
  if (p.deterministic || p.batch_invariant) return "dQ is summed in no fixed order, which the problem asks for";
  if (!core::has(p, TESSERA_DQ)) return "dq is not wanted; it computes all three";
  for (const int name : {TESSERA_BIAS, TESSERA_KEEP})
    if (core::has(p, name)) return fmt::format("it has no {}", core::operand_row(name).text);
  if (std::string why = refuse_scale(p); !why.empty()) return why;
  const BackwardSpec& spec = *shipped_for(p, BackwardPart::attend);
  if (const int64_t blocks = p.batch * p.heads_kv * key_tiles(p, spec); blocks > most_blocks)
    return fmt::format("it would take {} blocks; a launch has at most {}", blocks, most_blocks);
  if (std::string why = refuse_shared(rules::shared_bytes(spec), device); !why.empty()) return why;
  return refuse_rows(p, rows_by_16);
}

// Rows of dQ's sums for one head: whole tiles of each sequence.
int64_t sum_rows(const Problem& p) {
  return core::packed_q(p) ? (p.rows_q / 64 + p.batch + 1) * 64 : p.batch * rules::round_up(p.len_q, 64);
}

void add_part(Plan& plan, const char* name, BackwardPart part, int64_t blocks, std::string text) {
  const Loaded& kernel = Loaded::of(*shipped_for(plan.problem, part));
  core::Step step = {.name = name,
                     .text = std::move(text),
                     .launch = {.code = &kernel,
                                .blocks = blocks,
                                .threads = kernel.code().threads,
                                .shared_bytes = kernel.code().shared_bytes}};
  plan.steps.push_back(std::move(step));
}

void fill(Plan& plan, const core::Hints&) {
  const Problem& p = plan.problem;
  const BackwardSpec& spec = *shipped_for(p, BackwardPart::attend);
  plan.threads = 1;
  plan.tile_rows = spec.tile_rows;
  plan.tile_keys = spec.tile_keys;
  const int64_t pairs = p.heads_q * (core::packed_q(p) ? p.rows_q : p.batch * p.len_q);
  core::add_region(plan, "row_lse", pairs * 4);
  core::add_region(plan, "row_term", pairs * 4);
  core::add_region(plan, "dq_sums", sum_rows(p) * p.heads_q * p.dim * 4);
  const int64_t of_groups = std::min<int64_t>(rules::ceil_div(p.batch * p.heads_q * rules::ceil_div(p.len_q, 16), 4),
                                              int64_t{plan.device.sms} * 16);
  add_part(plan, "prepare", BackwardPart::prepare, of_groups, "dLSE - dO . out of each row; dQ's sums are zeros");
  const int64_t blocks = p.batch * p.heads_kv * key_tiles(p, spec);
  add_part(plan, "attend", BackwardPart::attend, blocks,
           fmt::format("tile {} keys x {} queries; {} blocks of {} threads, {} KiB shared", spec.tile_keys,
                       spec.tile_rows, blocks, rules::threads(spec), rules::ceil_div(rules::shared_bytes(spec), 1024)));
  add_part(plan, "convert", BackwardPart::convert, of_groups, "dQ's sums to dq");
  add_clear_step(plan);
}

// Heads side by side, whose q and dO stay in half of a large L2 cache; under a causal mask the first tiles of all of
// them, which are seen by most queries, come first.
int section_of(const Problem& p) {
  if (!p.mask.causal && !p.mask.has_prefix) return 1;
  constexpr double cache_bytes = 32 << 20;
  const double pair = 2.0 * static_cast<double>(core::group(p) * std::max<int64_t>(1, p.len_q) * (p.dim + p.dim_v));
  const double pairs = static_cast<double>(std::max<int64_t>(1, p.batch * p.heads_kv));
  return static_cast<int>(std::clamp(cache_bytes / pair, 1.0, pairs));
}

BackwardParams params_of(const Plan& plan, const core::Bindings& bound) {
  const Problem& p = plan.problem;
  const BackwardSpec& spec = *shipped_for(p, BackwardPart::attend);
  const CornerParams corner = corner_params(p, bound);
  return {.q = bound.data[TESSERA_Q],
          .k = bound.data[TESSERA_K],
          .v = bound.data[TESSERA_V],
          .out = bound.data[TESSERA_OUT],
          .dout = bound.data[TESSERA_DOUT],
          .dq = bound.data[TESSERA_DQ],
          .dk = data_of<void>(p, bound, TESSERA_DK),
          .dv = data_of<void>(p, bound, TESSERA_DV),
          .lse = data_of<float>(p, bound, TESSERA_LSE),
          .dlse = data_of<float>(p, bound, TESSERA_DLSE),
          .status = data_of<int>(p, bound, TESSERA_STATUS),
          .corner_offsets = corner.offsets,
          .q_step = steps_of(p, TESSERA_Q),
          .k_step = steps_of(p, TESSERA_K),
          .v_step = steps_of(p, TESSERA_V),
          .out_step = steps_of(p, TESSERA_OUT),
          .dout_step = steps_of(p, TESSERA_DOUT),
          .dq_step = steps_of(p, TESSERA_DQ),
          .dk_step = steps_of(p, TESSERA_DK),
          .dv_step = steps_of(p, TESSERA_DV),
          .lse_step = steps_of(p, TESSERA_LSE),
          .dlse_step = steps_of(p, TESSERA_DLSE),
          .queries = query_lengths(p, bound),
          .keys = key_lengths(p, bound),
          .band = corner.band,
          .corner = corner.corner,
          .batch = static_cast<int>(p.batch),
          .heads = static_cast<int>(p.heads_q),
          .heads_kv = static_cast<int>(p.heads_kv),
          .group = static_cast<int>(core::group(p)),
          .key_tiles = static_cast<int>(key_tiles(p, spec)),
          .section = section_of(p),
          .scale = static_cast<float>(scale_of(p)),
          .scale_log2 = static_cast<float>(scale_of(p) * M_LOG2E),
          .is_f16 = core::data_dtype(p) == TESSERA_F16,
          .row_lse = region_of<float>(plan, bound, "row_lse"),
          .row_term = region_of<float>(plan, bound, "row_term"),
          .dq_sums = region_of<float>(plan, bound, "dq_sums"),
          .sum_rows = rules::round_up(p.len_q, 64),
          .sum_rows_in_all = sum_rows(p)};
}

void run(const Plan& plan, const core::Bindings& bound, void* stream) {
  const Problem& p = plan.problem;
  const auto idle = [](const core::Step& step) { return step.launch.blocks == 0; };
  if (std::all_of(plan.steps.begin(), plan.steps.end(), idle)) return;
  check_rows(p, bound, rows_by_16);
  const bool no_rows = core::elements(core::operand(p, TESSERA_Q)) == 0;
  const Launcher launcher(plan, bound, no_rows ? TESSERA_K : TESSERA_Q, stream);
  BackwardParams params = params_of(plan, bound);
  for (const core::Step& step : plan.steps) {
    if (step.name == "clear") {
      rules::GeneralParams tails = general_params(plan, bound);
      launcher.launch(step, &tails);
    } else {
      launcher.launch(step, &params);
    }
  }
}

}  // namespace

constinit const core::Kernel portable_backward = gpu_kernel("cuda.portable_backward", refuse, fill, run);

}  // namespace tessera::cuda
