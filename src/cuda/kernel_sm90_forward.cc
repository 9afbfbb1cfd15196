// Hopper's forward kernel: what it refuses, its tiles, its launch.
#include <algorithm>
#include <span>

#include "core/error.h"
#include "cuda/fast.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/loaded.h"
#include "cuda/params.h"
#include "cuda/tensor_map.h"
#include "rules/dtype.h"

namespace tessera::cuda {
namespace {

using core::Device;
using core::Plan;
using core::Problem;
using rules::Sm90ForwardSpec;

static_assert(sizeof(rules::Sm90ForwardParams) <= 4096, "a launch's parameters");

constexpr int rows_by_16[] = {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_OUT};
constexpr int64_t most_items = (int64_t{1} << 31) - (1 << 16);  // each block counts one past the last

// What ships for this dtype and the smallest dims that hold the problem's; it pads rows with zeros. Empty: nothing.
std::span<const Sm90Choice> choices_for(const Problem& p) {
  const std::span<const Sm90Choice> all = shipped_sm90_forward();
  if (p.dim % 8 != 0 || p.dim_v % 8 != 0) return {};
  const auto begin = std::find_if(all.begin(), all.end(), [&](const Sm90Choice& c) {
    return c.spec.dtype == float_of(p) && c.spec.dim >= p.dim && c.spec.dim_v >= p.dim_v;
  });
  const auto end = std::find_if(begin, all.end(), [&](const Sm90Choice& c) {
    return c.spec.dtype != begin->spec.dtype || c.spec.dim != begin->spec.dim || c.spec.dim_v != begin->spec.dim_v;
  });
  return {begin, end};
}

int64_t items_of(const Problem& p, int tile_rows) {
  if (core::packed_q(p) && p.rows_q == 0) return 0;  // whatever the bounds say
  return p.heads_q * p.batch * rules::ceil_div(p.len_q, tile_rows);
}

// By the keys that a row sees; under a hint another that ships, if there is one.
const Sm90ForwardSpec& spec_for(const Problem& p, const Device& device, const core::Hints& hints) {
  const std::span<const Sm90Choice> choices = choices_for(p);
  const double keys = p.len_q > 0 ? core::kept_pairs(p) / static_cast<double>(p.len_q) : 0;
  const auto wished = [&](const Sm90Choice& c) {
    return (!hints.tile_rows || hints.tile_rows == rules::tile_rows(c.spec)) &&
           (!hints.tile_keys || hints.tile_keys == c.spec.tile_keys);
  };
  const auto fits = [&](const Sm90Choice& c) {
    return rules::shared_bytes(c.spec) <= device.shared_per_block &&
           items_of(p, rules::tile_rows(c.spec)) <= most_items;
  };
  const Sm90Choice& best =
      *std::find_if(choices.begin(), choices.end(), [&](const Sm90Choice& c) { return keys >= c.least_keys; });
  if (wished(best)) return best.spec;
  const auto other =
      std::find_if(choices.begin(), choices.end(), [&](const Sm90Choice& c) { return wished(c) && fits(c); });
  return other == choices.end() ? best.spec : other->spec;
}

// It counts rows, keys and bands in 32 bits.
std::string refuse_long(const Problem& p) {
  for (const auto& [text, length] : {std::pair("len_q", p.len_q), std::pair("len_k", p.len_k)})
    if (length > rules::narrow_length)
      return fmt::format("{} is {}; it takes sequences of at most {}", text, length, rules::narrow_length);
  const rules::BandMask band = core::band_mask(p, 0, 0);
  for (const int64_t bound : {band.left, band.right, band.chunk})
    if (!rules::can_narrow({.left = bound}))
      return fmt::format("the mask has a window or chunk of {}; it takes at most {}, or unbounded", bound,
                         rules::narrow_length);
  return "";
}

std::string refuse(const Problem& p, const Device& device) {
  if (device.kind == TESSERA_GPU && device.sm_arch != 90)
    return fmt::format("device {} is sm_{}; the kernel's instructions are those of sm_90a alone", device.name,
                       device.sm_arch);
  if (std::string why = refuse_forward(p, device); !why.empty()) return why;
  if (choices_for(p).empty())
    return fmt::format("dims are {} and {}; it takes multiples of 8 up to 256", p.dim, p.dim_v);
  if (has_pairs(p)) return fmt::format("it has no {}", core::has(p, TESSERA_BIAS) ? "bias" : "keep mask");
  // Its weights are fused multiply-adds.
  if (const int32_t out = core::operand(p, TESSERA_OUT).dtype; out != core::data_dtype(p))
    return fmt::format("out is {}, which would show how its weights are rounded; it writes q's dtype",
                       rules::dtype_rows[out].text);
  if (std::string why = refuse_scale(p); !why.empty()) return why;
  if (std::string why = refuse_long(p); !why.empty()) return why;
  const Sm90ForwardSpec& spec = spec_for(p, device, {});
  if (const int64_t items = items_of(p, rules::tile_rows(spec)); items > most_items)
    return fmt::format("it would take {} items; it counts to {}", items, most_items);
  if (std::string why = refuse_shared(rules::shared_bytes(spec), device); !why.empty()) return why;
  if (std::string why = refuse_rows(p, rows_by_16); !why.empty()) return why;
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V})
    if (std::string why = refuse_map(p, name); !why.empty()) return why;
  return "";
}

void fill(Plan& plan, const core::Hints& hints) {
  const Problem& p = plan.problem;
  const Sm90ForwardSpec& spec = spec_for(p, plan.device, hints);
  const Loaded& kernel = Loaded::of(spec);
  plan.threads = 1;
  plan.tile_rows = rules::tile_rows(spec);
  plan.tile_keys = spec.tile_keys;
  core::add_region(plan, "next", sizeof(int));
  const int64_t items = items_of(p, plan.tile_rows);
  core::Step step = {.name = "attend",
                     .text = {},
                     .launch = {.code = &kernel,
                                .blocks = std::min<int64_t>(items, plan.device.sms),
                                .threads = kernel.code().threads,
                                .shared_bytes = kernel.code().shared_bytes}};
  step.text =
      fmt::format("tile {} rows x {} keys, {} stages; {} blocks of {} threads take turns at {} items, {} KiB shared",
                  plan.tile_rows, spec.tile_keys, spec.stages, step.launch.blocks, step.launch.threads, items,
                  rules::ceil_div(step.launch.shared_bytes, 1024));
  plan.steps.push_back(std::move(step));
  if (core::packed_q(p) && p.rows_q > 0) add_clear_step(plan);
}

rules::Sm90ForwardParams params_of(const Plan& plan, const core::Bindings& bound) {
  const Problem& p = plan.problem;
  const auto map = [&](int name, int rows) { return tensor_map(need_driver(), p, bound, name, rows); };
  const rules::ForwardParams params = forward_params(plan, bound);
  return {params,
          map(TESSERA_Q, 64),
          map(TESSERA_K, plan.tile_keys),
          map(TESSERA_V, plan.tile_keys),
          rules::narrowed(params.band),
          static_cast<int>(items_of(p, plan.tile_rows)),
          static_cast<int>(p.dim_v),
          region_of<int>(plan, bound, "next")};
}

void run(const Plan& plan, const core::Bindings& bound, void* stream) {
  const auto idle = [](const core::Step& step) { return step.launch.blocks == 0; };
  if (std::all_of(plan.steps.begin(), plan.steps.end(), idle)) return;
  check_rows(plan.problem, bound, rows_by_16);
  const Launcher launcher(plan, bound, TESSERA_Q, stream);
  for (const core::Step& step : plan.steps) {
    if (idle(step)) continue;
    if (step.name == "clear") {
      rules::GeneralParams tails = general_params(plan, bound);
      launcher.launch(step, &tails);
    } else {
      rules::Sm90ForwardParams params = params_of(plan, bound);
      launcher.zero(params.next, 1);
      launcher.launch(step, &params);
    }
  }
}

}  // namespace

constinit const core::Kernel sm90_forward = gpu_kernel("cuda.sm90", refuse, fill, run);

}  // namespace tessera::cuda
