// The portable forward kernel: what it refuses, its tiles, its launch.
#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "cuda/cuda.h"
#include "cuda/device.h"
#include "cuda/loaded.h"
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
// What ships for this dtype and dim; nullptr: nothing.
const ForwardSpec* shipped_for(const Problem& p) {
  for (const ForwardSpec& spec : shipped_forward())
    if (spec.dtype == float_of(p) && spec.dim == p.dim) return &spec;
  return nullptr;
}
double scale_of(const Problem& p) {
  return p.has_scale ? p.scale : 1 / std::sqrt(static_cast<double>(p.dim));
}
constexpr int64_t longest = int64_t{1} << 30;  // of a sequence; 32 bits count its keys
constexpr int64_t most_blocks = (int64_t{1} << 31) - 1;

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

// Operands that other kernels must answer.
struct Option {
  int name;
  const char* text;
};
constexpr Option options[] = {{TESSERA_BIAS, "bias"},
                              {TESSERA_KEEP, "keep mask"},
                              {TESSERA_EXCLUDE_KEYS, "excluded keys"},
                              {TESSERA_DOCUMENTS_Q, "documents"},
                              {TESSERA_SLOPES, "ALiBi slopes"},
                              {TESSERA_SINKS, "sinks"},
                              {TESSERA_MAX_SCORE, "max_score"}};

std::string refuse_strides(const Problem& p) {
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_OUT}) {
    const Operand& o = core::operand(p, name);
    const char* const text = core::operand_row(name).text;
    if (o.extent[3] > 1 && o.stride[3] != 1)
      return fmt::format("{} has stride {} along its dim; the kernel copies rows 16 bytes at a time", text,
                         o.stride[3]);
    for (int d = 0; d < 3; ++d)
      if (o.extent[d] > 1 && o.stride[d] * core::dtype_bytes(o.dtype) % 16)
        return fmt::format("{}.stride[{}] is {}; the kernel needs rows at multiples of 16 bytes", text, d, o.stride[d]);
  }
  if (p.alignment && p.alignment < 16)
    return fmt::format("pointers are promised at multiples of {} bytes, the kernel needs 16", p.alignment);
  return "";
}

std::string refuse(const Problem& p, const Device& device) {
  if (device.kind != TESSERA_GPU)
    return fmt::format("device {} is a processor, the kernel runs on NVIDIA GPUs", device.name);
  if (device.sm_arch < 80)
    return fmt::format("device {} is sm_{}; the kernel's instructions begin with sm_80", device.name, device.sm_arch);
  if (p.pass != TESSERA_FORWARD)
    return p.pass == TESSERA_BACKWARD ? "it attends forward only" : "an append has no products";
  const int32_t dtype = core::data_dtype(p);
  if (dtype != TESSERA_BF16 && dtype != TESSERA_F16)
    return fmt::format("its products are bf16 or f16, q is {}", rules::dtype_rows[dtype].text);
  for (const int name : {TESSERA_K, TESSERA_V})
    if (core::operand(p, name).dtype != dtype)
      return fmt::format("{} is {}, the kernel reads q's dtype", core::operand_row(name).text,
                         rules::dtype_rows[core::operand(p, name).dtype].text);
  if (p.dim != p.dim_v || !shipped_for(p))
    return fmt::format("dims are {} and {}; it has D = Dv of 64 and 128", p.dim, p.dim_v);
  if (core::is_cache(p) || core::appends(p)) return "k and v are a cache; it reads tensors";
  if (p.cache.rotary_dim) return "it rotates nothing";
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
  const ForwardSpec& spec = *shipped_for(p);
  if (const int64_t blocks = blocks_of(p, spec.tile_rows); blocks > most_blocks)
    return fmt::format("it would take {} blocks; a launch has at most {}", blocks, most_blocks);
  const int needs = rules::shared_bytes(spec);
  if (device.shared_per_block < needs)
    return fmt::format("a block needs {} bytes of shared memory, device {} has {}", needs, device.name,
                       device.shared_per_block);
  return refuse_strides(p);
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

rules::Steps steps_of(const Operand& o) {
  const auto step = [&](int d) { return o.extent[d] > 1 ? o.stride[d] : 0; };
  return {step(0), step(1), step(2)};
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
  const auto list = [&](int name) { return core::has(p, name) ? static_cast<const int*>(bound.data[name]) : nullptr; };
  const bool f32 = core::operand(p, TESSERA_OUT).dtype == TESSERA_F32;
  const bool per_sequence = p.mask.corner == TESSERA_CORNER_AT && core::has(p, TESSERA_CORNER_OFFSETS);
  return {
      .q = bound.data[TESSERA_Q],
      .k = bound.data[TESSERA_K],
      .v = bound.data[TESSERA_V],
      .out = bound.data[TESSERA_OUT],
      .lse = core::has(p, TESSERA_LSE) ? static_cast<float*>(bound.data[TESSERA_LSE]) : nullptr,
      .status = core::has(p, TESSERA_STATUS) ? static_cast<int*>(bound.data[TESSERA_STATUS]) : nullptr,
      .corner_offsets = per_sequence ? list(TESSERA_CORNER_OFFSETS) : nullptr,
      .q_step = steps_of(core::operand(p, TESSERA_Q)),
      .k_step = steps_of(core::operand(p, TESSERA_K)),
      .v_step = steps_of(core::operand(p, TESSERA_V)),
      .out_step = steps_of(core::operand(p, TESSERA_OUT)),
      .lse_step = steps_of(core::operand(p, TESSERA_LSE)),
      .queries = {list(TESSERA_CU_SEQLENS_Q), list(TESSERA_SEQUSED_Q), p.rows_q, static_cast<int>(p.len_q)},
      .keys = {list(TESSERA_CU_SEQLENS_K), list(TESSERA_SEQUSED_K), p.rows_k, static_cast<int>(p.len_k)},
      .band = core::band_mask(p, 0, p.mask.corner == TESSERA_CORNER_AT ? p.mask.corner_at : 0),
      .corner = per_sequence                            ? rules::Corner::per_sequence
                : p.mask.corner == TESSERA_BOTTOM_RIGHT ? rules::Corner::bottom_right
                                                        : rules::Corner::fixed,
      .batch = static_cast<int>(p.batch),
      .heads = static_cast<int>(p.heads_q),
      .group = static_cast<int>(core::group(p)),
      .row_tiles = static_cast<int>(rules::ceil_div(p.len_q, plan.tile_rows)),
      .section = section_of(p),
      .scale = static_cast<float>(scale_of(p)),
      .scale_log2 = static_cast<float>(scale_of(p) * M_LOG2E),
      .slack =
          f32 ? 0.0f : 8.0f,  // rounded to 16 bits, a weight of 2^8 costs a float32 result more than the contract has
      .out_is_f32 = f32,
  };
}

void check_alignment(const Problem& p, const core::Bindings& bound) {
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_OUT}) {
    const auto address = reinterpret_cast<uintptr_t>(bound.data[name]);
    core::require(address % 16 == 0,
                  "{} is at address {:#x}; the problem promised multiples of {} bytes. Copy it, or say its alignment.",
                  core::operand_row(name).text, address, p.alignment ? p.alignment : 16);
  }
}

void run(const Plan& plan, const core::Bindings& bound, void* stream) {
  const core::Launch& launch = plan.steps.front().launch;
  if (launch.blocks == 0) return;
  check_alignment(plan.problem, bound);
  const Driver& driver = need_driver();
  const OnDevice here(driver, bound.data[TESSERA_Q], "q");
  const Ordinal ordinal = here.ordinal();
  const Device& device = device_at(driver, ordinal);
  core::require(device.sm_arch == plan.device.sm_arch,
                "the plan was made for {} (sm_{}); q lies on {} (sm_{}). Make it for \"cuda:{}\".", plan.device.name,
                plan.device.sm_arch, device.name, device.sm_arch, ordinal);
  const auto on = static_cast<Stream>(stream);
  const Function function = static_cast<const Loaded*>(launch.code)->on(ordinal, device.sm_arch, on);
  ForwardParams params = params_of(plan, bound);
  void* arguments[] = {&params};
  require_ok(
      driver,
      driver.cuLaunchKernel(function, static_cast<unsigned>(launch.blocks), 1, 1, static_cast<unsigned>(launch.threads),
                            1, 1, static_cast<unsigned>(launch.shared_bytes), on, arguments, nullptr),
      "launching the forward kernel");
}

constexpr core::Kernel forward_kernel = {.name = "cuda.portable",
                                         .engine = "cuda",
                                         .automatic = true,
                                         .least_flops = 0,
                                         .refuse = refuse,
                                         .fill = fill,
                                         .run = run,
                                         .merge_bytes = nullptr,
                                         .merge = nullptr};
constexpr std::array<const core::Kernel*, 1> all = {&forward_kernel};

}  // namespace

std::span<const core::Kernel* const> kernels() {
  return all;
}

}  // namespace tessera::cuda
