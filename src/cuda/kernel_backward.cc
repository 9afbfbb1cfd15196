// The portable backward kernel: what it refuses, its steps, its launches.
#include <algorithm>
#include <cmath>

#include "core/error.h"
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
constexpr int64_t longest = int64_t{1} << 30;

const BackwardSpec* shipped_for(const Problem& p, BackwardPart part) {
  const rules::Float dtype = core::data_dtype(p) == TESSERA_BF16 ? rules::Float::bf16 : rules::Float::f16;
  for (const BackwardSpec& spec : shipped_backward())
    if (spec.part == part && spec.dim == p.dim && (part != BackwardPart::attend || spec.dtype == dtype)) return &spec;
  return nullptr;
}
int64_t key_tiles(const Problem& p, const BackwardSpec& spec) {
  return rules::ceil_div(p.len_k, spec.tile_keys);
}

struct Option {
  int name;
  const char* text;
};
constexpr Option options[] = {{TESSERA_BIAS, "bias"},
                              {TESSERA_KEEP, "keep mask"},
                              {TESSERA_EXCLUDE_KEYS, "excluded keys"},
                              {TESSERA_DOCUMENTS_Q, "documents"},
                              {TESSERA_SLOPES, "ALiBi slopes"},
                              {TESSERA_SINKS, "sinks"}};

std::string refuse(const Problem& p, const Device& device) {
  if (device.kind != TESSERA_GPU)
    return fmt::format("device {} is a processor, the kernel runs on NVIDIA GPUs", device.name);
  if (device.sm_arch < 80)
    return fmt::format("device {} is sm_{}; the kernel's instructions begin with sm_80", device.name, device.sm_arch);
  if (p.pass != TESSERA_BACKWARD) return "it computes gradients only";
  const int32_t dtype = core::data_dtype(p);
  if (dtype != TESSERA_BF16 && dtype != TESSERA_F16)
    return fmt::format("its products are bf16 or f16, q is {}", rules::dtype_rows[dtype].text);
  if (core::operand(p, TESSERA_DOUT).dtype != dtype)
    return fmt::format("dout is {}, the kernel reads q's dtype",
                       rules::dtype_rows[core::operand(p, TESSERA_DOUT).dtype].text);
  if (p.dim != p.dim_v || !shipped_for(p, BackwardPart::attend))
    return fmt::format("dims are {} and {}; it has D = Dv of 64 and 128", p.dim, p.dim_v);
  if (p.deterministic || p.batch_invariant) return "dQ is summed in no fixed order, which the problem asks for";
  if (!core::has(p, TESSERA_DQ)) return "dq is not wanted; it computes all three";
  for (const Option& option : options)
    if (core::has(p, option.name)) return fmt::format("it has no {}", option.text);
  if (p.softcap != 0) return "it has no softcap";
  if (p.dropout != 0) return "it has no dropout";
  const double scale_log2 = scale_of(p) * M_LOG2E;
  if (!(scale_log2 >= 0x1p-126 && scale_log2 <= 0x1p126))
    return fmt::format("scale is {}; it must be above 0 and moderate", scale_of(p));
  if (rules::hulls_have_gaps(core::band_mask(p, 0, 0)))
    return "the window lies off the diagonal; some keys inside a tile may be seen by no row";
  if (std::max({p.len_q, p.len_k}) > longest) return fmt::format("a sequence is longer than {}", longest);
  const BackwardSpec& spec = *shipped_for(p, BackwardPart::attend);
  if (const int64_t blocks = p.batch * p.heads_kv * key_tiles(p, spec); blocks > most_blocks)
    return fmt::format("it would take {} blocks; a launch has at most {}", blocks, most_blocks);
  if (const int needs = rules::shared_bytes(spec); device.shared_per_block < needs)
    return fmt::format("a block needs {} bytes of shared memory, device {} has {}", needs, device.name,
                       device.shared_per_block);
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
  const int64_t most = int64_t{plan.device.sms} * 16, rows = p.batch * p.heads_q * p.len_q;
  add_part(plan, "prepare", BackwardPart::prepare, std::min<int64_t>(rules::ceil_div(rows, 4), most),
           "dLSE - dO . out of each row; dQ's sums are zeros");
  const int64_t blocks = p.batch * p.heads_kv * key_tiles(p, spec);
  add_part(plan, "attend", BackwardPart::attend, blocks,
           fmt::format("tile {} keys x {} queries; {} blocks of {} threads, {} KiB shared", spec.tile_keys,
                       spec.tile_rows, blocks, rules::threads(spec), rules::ceil_div(rules::shared_bytes(spec), 1024)));
  add_part(plan, "convert", BackwardPart::convert,
           std::min<int64_t>(rules::ceil_div(p.batch * p.heads_q * rules::ceil_div(p.len_q, 16), 4), most),
           "dQ's sums to dq");
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
  rules::GeneralParams tails = general_params(plan, bound);
  for (const core::Step& step : plan.steps)
    launcher.launch(step, step.name == "clear" ? static_cast<void*>(&tails) : &params);
}

}  // namespace

const core::Kernel portable_backward = {.name = "cuda.portable_backward",
                                        .engine = "cuda",
                                        .automatic = true,
                                        .least_flops = 0,
                                        .refuse = refuse,
                                        .fill = fill,
                                        .run = run,
                                        .merge_bytes = nullptr,
                                        .merge = nullptr};

}  // namespace tessera::cuda
