// The portable forward kernel: what it refuses, its tiles, its launch.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/loaded.h"
#include "cuda/params.h"
#include "cuda/portable.h"
#include "rules/dtype.h"
#include "rules/params.h"

namespace tessera::cuda {
namespace {

using core::Device;
using core::Operand;
using core::Plan;
using core::Problem;
using rules::ForwardParams;
using rules::ForwardSpec;

static_assert(rules::unsound_length == TESSERA_STATUS_LENGTH);

rules::Float float_of(const Problem& p) {
  return core::data_dtype(p) == TESSERA_BF16 ? rules::Float::bf16 : rules::Float::f16;
}
bool has_pairs(const Problem& p) {
  return core::has(p, TESSERA_BIAS) || core::has(p, TESSERA_KEEP);
}
// What ships for this dtype, dim and masks; nullptr: nothing.
const ForwardSpec* shipped_for(const Problem& p) {
  for (const ForwardSpec& spec : shipped_forward())
    if (spec.dtype == float_of(p) && spec.dim == p.dim && spec.pairs == has_pairs(p)) return &spec;
  return nullptr;
}

int64_t blocks_of(const Problem& p, int tile_rows) {
  if (core::packed_q(p) && p.rows_q == 0) return 0;  // whatever the bounds say
  const int64_t items = p.heads_q * p.batch * rules::ceil_div(p.len_q, tile_rows);
  const int64_t tail = core::packed_q(p) ? std::min<int64_t>(rules::ceil_div(p.rows_q, tile_rows), 64) : 0;
  return items + tail;
}

// Under a hint other tiles than the shipped, if such a kernel can be; they are compiled at first use.
ForwardSpec spec_for(const Problem& p, const Device& device, const core::Hints& hints) {
  const ForwardSpec shipped = *shipped_for(p);
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
  if (p.pass != TESSERA_FORWARD)
    return p.pass == TESSERA_BACKWARD ? "it attends forward only" : "an append has no products";
  if (std::string why = refuse_portable(p, device); !why.empty()) return why;
  for (const int name : {TESSERA_K, TESSERA_V})
    if (core::operand(p, name).dtype != core::data_dtype(p))
      return fmt::format("{} is {}, the kernel reads q's dtype", core::operand_row(name).text,
                         rules::dtype_rows[core::operand(p, name).dtype].text);
  if (p.dim != p.dim_v || !shipped_for(p))
    return fmt::format("dims are {} and {}; it has D = Dv of 64 and 128, and without bias and keep mask 256", p.dim,
                       p.dim_v);
  if (core::is_cache(p) || core::appends(p)) return "k and v are a cache; it reads tensors";
  if (p.cache.rotary_dim) return "it rotates nothing";
  if (p.batch_invariant) return "it does not answer every chunk of a sequence, and another kernel has other bits";
  if (std::string why = has_pairs(p) ? refuse_pairs(p) : refuse_scale(p); !why.empty()) return why;
  const ForwardSpec& spec = *shipped_for(p);
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

// Of bias and keep, whose dimensions are (batch, head, query, key).
rules::Steps pair_steps_of(const Problem& p, int name) {
  const Operand& o = core::operand(p, name);
  const auto step = [&](int d) { return o.extent[d] > 1 ? o.stride[d] : 0; };
  return {step(0), step(2), step(1)};
}
bool even(const rules::Steps& s) {
  return s.batch % 2 == 0 && s.row % 2 == 0 && s.head % 2 == 0;
}
// Heads side by side: those that share keys; under a causal mask as many as keep K and V in half of a large L2 cache,
// so that the heaviest tiles of all of them come first.
int section_of(const Problem& p) {
  constexpr double cache_bytes = 32 << 20;
  const int64_t heads = p.heads_q * p.batch, group = core::group(p);
  if (!p.mask.causal && !p.mask.has_prefix) return static_cast<int>(group);
  const double pair = 2.0 * static_cast<double>(std::max<int64_t>(1, p.len_k) * (p.dim + p.dim_v));
  const double pairs = std::clamp(cache_bytes / pair, 1.0, static_cast<double>(std::max<int64_t>(1, heads)));
  return static_cast<int>(std::clamp<int64_t>(static_cast<int64_t>(pairs) * group, 1, std::max<int64_t>(1, heads)));
}

ForwardParams params_of(const Plan& plan, const core::Bindings& bound) {
  const Problem& p = plan.problem;
  const bool f32 = core::operand(p, TESSERA_OUT).dtype == TESSERA_F32;
  const CornerParams corner = corner_params(p, bound);
  return {
      .q = bound.data[TESSERA_Q],
      .k = bound.data[TESSERA_K],
      .v = bound.data[TESSERA_V],
      .out = bound.data[TESSERA_OUT],
      .lse = data_of<float>(p, bound, TESSERA_LSE),
      .status = data_of<int>(p, bound, TESSERA_STATUS),
      .corner_offsets = corner.offsets,
      .q_step = steps_of(p, TESSERA_Q),
      .k_step = steps_of(p, TESSERA_K),
      .v_step = steps_of(p, TESSERA_V),
      .out_step = steps_of(p, TESSERA_OUT),
      .lse_step = steps_of(p, TESSERA_LSE),
      .queries = query_lengths(p, bound),
      .keys = key_lengths(p, bound),
      .band = corner.band,
      .corner = corner.corner,
      .batch = static_cast<int>(p.batch),
      .heads = static_cast<int>(p.heads_q),
      .group = static_cast<int>(core::group(p)),
      .row_tiles = static_cast<int>(rules::ceil_div(p.len_q, plan.tile_rows)),
      .section = section_of(p),
      .scale = has_pairs(p) ? 1.0f : static_cast<float>(scale_of(p)),
      .scale_log2 = static_cast<float>((has_pairs(p) ? 1 : scale_of(p)) * M_LOG2E),
      .slack =
          f32 ? 0.0f : 8.0f,  // rounded to 16 bits, a weight of 2^8 costs a float32 result more than the contract has
      .out_is_f32 = f32,
      .bias = data_of<const unsigned short>(p, bound, TESSERA_BIAS),
      .keep = data_of<const unsigned char>(p, bound, TESSERA_KEEP),
      .bias_step = pair_steps_of(p, TESSERA_BIAS),
      .keep_step = pair_steps_of(p, TESSERA_KEEP),
      .pair_scale = static_cast<float>(scale_of(p)),
      .keep_in_words = p.len_k % 2 == 0 && (reinterpret_cast<uintptr_t>(bound.data[TESSERA_KEEP]) & 1) == 0 &&
                       even(pair_steps_of(p, TESSERA_KEEP)),
  };
}

void run(const Plan& plan, const core::Bindings& bound, void* stream) {
  const core::Step& step = plan.steps.front();
  if (step.launch.blocks == 0) return;
  check_rows(plan.problem, bound, rows_by_16);
  const Launcher launcher(plan, bound, TESSERA_Q, stream);
  ForwardParams params = params_of(plan, bound);
  launcher.launch(step, &params);
}

}  // namespace

constinit const core::Kernel portable_forward = gpu_kernel("cuda.portable", refuse, fill, run);

}  // namespace tessera::cuda
