// Hopper's forward kernel: what it refuses, its tiles, its launch.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <random>
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

constexpr int rows_by_16[] = {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_OUT, TESSERA_BIAS, TESSERA_KEEP};
constexpr int64_t most_items = (int64_t{1} << 31) - (1 << 16);  // each block counts one past the last

// Does a pair of a query and a key have more than its product?
bool has_any_pairs(const Problem& p) {
  return has_pairs(p) || p.softcap != 0 || p.dropout != 0 || core::has(p, TESSERA_SLOPES) ||
         core::has(p, TESSERA_EXCLUDE_KEYS) || core::has(p, TESSERA_DOCUMENTS_Q);
}

// Are scores more than products times the scale?
bool adds_to_scores(const Problem& p) {
  return core::has(p, TESSERA_BIAS) || core::has(p, TESSERA_SLOPES);
}
bool makes_scores(const Problem& p) {
  return p.softcap != 0 || adds_to_scores(p);
}

// What ships for this dtype and the smallest dims that hold the problem's; it pads rows with zeros. Empty: nothing.
std::span<const Sm90Choice> choices_for(const Problem& p, bool parts) {
  const std::span<const Sm90Choice> all = shipped_sm90_forward();
  const bool pairs = has_any_pairs(p);
  if (p.dim % 8 != 0 || p.dim_v % 8 != 0) return {};
  const auto begin = std::find_if(all.begin(), all.end(), [&](const Sm90Choice& c) {
    return c.spec.dtype == float_of(p) && c.spec.pairs == pairs && c.spec.parts == parts && c.spec.dim >= p.dim &&
           c.spec.dim_v >= p.dim_v;
  });
  const auto end = std::find_if(begin, all.end(), [&](const Sm90Choice& c) {
    return c.spec.dim != begin->spec.dim || c.spec.dim_v != begin->spec.dim_v;
  });
  return {begin, end};
}

int64_t items_of(const Problem& p, int tile_rows) {
  if (core::packed_q(p) && p.rows_q == 0) return 0;  // whatever the bounds say
  return p.heads_q * p.batch * rules::ceil_div(p.len_q, tile_rows);
}

// Few rows leave a GPU idle: then an item's keys go to several blocks. Up to eight of them are a cluster, which joins
// their sums itself; those of more a second step joins.
struct Splits {
  int count;
  bool joined;  // by the cluster
};
// A cluster lies in one of the groups that multiprocessors are made in, of 10 to 18 of them (an h200 holds 66 clusters
// of two, 30 of four, 15 of eight). If more are launched the rest wait for a whole round.
int64_t clusters_at_once(const Device& device, int count) {
  if (device.sms < 32) return 0;  // a part of a chip, whose groups nobody knows
  if (count == 2) return device.sms / 2;
  return count <= 4 ? device.sms * 9 / 10 / count : device.sms / 9;
}
Splits splits_of(const Problem& p, const Device& device, const Sm90ForwardSpec& spec, const core::Hints& hints) {
  const int64_t items = items_of(p, rules::tile_rows(spec));
  if (!spec.parts || items == 0 || rules::shared_bytes(spec) > device.shared_per_block) return {1, false};
  // A split's largest score must not overflow by the scale alone.
  if (std::abs(scale_of(p)) > 0x1p64) return {1, false};
  const int64_t steps = rules::ceil_div(p.len_k, spec.tile_keys);
  Splits best = {1, false};
  int64_t least = steps;  // that a block takes, and what joining takes, in steps
  const auto consider = [&](int64_t count, bool joined, int64_t price) {
    const int64_t bytes = joined ? 0 : rules::round_up(partial_bytes(p, count), 64);  // regions are whole lines
    if (count < 2 || count > steps || (hints.has_workspace_limit && bytes > hints.workspace_limit)) return;
    if (const int64_t takes = rules::ceil_div(steps, count) + price; takes < least)
      best = {static_cast<int>(count), joined}, least = takes;
  };
  // (h200, D 128, 1k: one head 13.4 us in 8 splits, two 14.5 us in 4, whole ones 16.8 us; some 4 us are the launch's.)
  for (int count = 2; count <= rules::most_joined; ++count)
    if (items <= clusters_at_once(device, count)) consider(count, true, 4);
  // (h200, D 128, one head of 1k: 26 TFLOP/s in 8 splits and a second step, which save 7 steps, 27 whole.)
  consider(std::min(device.sms / items, steps), false, 12);
  return best;
}
bool is_paged(const Problem& p) {
  return p.cache.page_size > 0;
}
bool is_wished(const Sm90ForwardSpec& spec, const core::Hints& hints) {
  return (!hints.tile_rows || hints.tile_rows == rules::tile_rows(spec)) &&
         (!hints.tile_keys || hints.tile_keys == spec.tile_keys);
}
bool wants_parts(const Problem& p, const Device& device, const core::Hints& hints) {
  if (is_paged(p)) return true;
  const std::span<const Sm90Choice> parts = choices_for(p, true);
  return !parts.empty() && is_wished(parts.front().spec, hints) &&
         splits_of(p, device, parts.front().spec, hints).count > 1;
}

// By the keys that a row sees; under a hint another that ships, if there is one.
const Sm90ForwardSpec& spec_for(const Problem& p, const Device& device, const core::Hints& hints) {
  const std::span<const Sm90Choice> choices = choices_for(p, wants_parts(p, device, hints));
  const auto fits = [&](const Sm90Choice& c) {
    return rules::shared_bytes(c.spec) <= device.shared_per_block &&
           items_of(p, rules::tile_rows(c.spec)) <= most_items;
  };
  // Long tiles must not leave multiprocessors idle. (Kept pairs come last: counting them takes 10 us.)
  const auto suits = [&](const Sm90Choice& c) {
    return c.least_keys == 0 || (fits(c) && items_of(p, rules::tile_rows(c.spec)) >= 2 * device.sms &&
                                 core::kept_pairs(p) >= c.least_keys * static_cast<double>(p.len_q));
  };
  const Sm90Choice& best = *std::find_if(choices.begin(), choices.end(), suits);
  if (is_wished(best.spec, hints)) return best.spec;
  const auto other = std::find_if(choices.begin(), choices.end(),
                                  [&](const Sm90Choice& c) { return is_wished(c.spec, hints) && fits(c); });
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

bool has_no_window(const rules::BandMask& band) {
  return !band.chunked && band.left >= rules::far_away && band.right >= rules::far_away;
}
bool is_plain_causal(const rules::BandMask& band) {
  return band.causal && has_no_window(band) && band.prefix <= 0 && band.first <= 0;
}
// Do all items take as long?
bool is_even(const Problem& p) {
  const rules::BandMask band = core::band_mask(p, 0, 0);
  constexpr int lists[] = {TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_K, TESSERA_SEQUSED_Q, TESSERA_SEQUSED_K};
  const auto given = [&](int name) { return core::has(p, name); };
  return !band.causal && has_no_window(band) && !core::is_cache(p) &&
         std::none_of(std::begin(lists), std::end(lists), given);
}

// Bands that begin late, or that end before the sequence's last key. (All rows together see the others whole.)
bool may_leave_keys_unseen(const Problem& p) {
  const rules::BandMask band = core::band_mask(p, 0, 0);
  const bool begins_late = band.left < rules::far_away || band.chunked;
  const bool ends = band.causal || band.right < rules::far_away;
  return begins_late || (ends && p.mask.corner != TESSERA_BOTTOM_RIGHT);
}

// Of caches.
constexpr int64_t least_queries = 64;
std::string refuse_keys(const Problem& p) {
  if (p.cache.rotary_dim) return "it rotates no queries";
  if (!core::is_cache(p)) return "";
  if (p.cache.ring) return "the cache is a ring; it reads slots in order";
  if (core::has(p, TESSERA_DOCUMENTS_K)) return "it reads documents of tensors, not of a cache";
  if (p.cache.v_in_k) return "v lies in k; it reads both apart";
  if (p.len_q < least_queries)
    return fmt::format("{} queries read a cache; a warpgroup has {} rows", p.len_q, least_queries);
  if (is_paged(p) && p.cache.pages == 0) return "the cache has no pages; there is nothing to make a map of";
  if (is_paged(p) && core::has(p, TESSERA_LEFT_PAD)) return "keys in pages begin with padding; it copies whole boxes";
  if (is_paged(p) && may_leave_keys_unseen(p))
    return "some keys may be seen by no row; it follows the ids of all pages";
  if (is_paged(p) && has_any_pairs(p)) return "keys lie in pages and pairs have scores of their own; it has not both";
  return "";
}

// Of what pairs have.
std::string refuse_pairs(const Problem& p) {
  // Beyond, float32 loses the last terms of the polynomial that stands for tanh, eight factors of it.
  const double to_cap = p.softcap != 0 ? std::abs(scale_of(p) / p.softcap) : 0;
  if (to_cap != 0 && !(to_cap >= 3e-5 && to_cap <= 1e3))
    return fmt::format("scale / softcap is {}; it takes 3e-5 to 1000", scale_of(p) / p.softcap);
  // Corners are narrowed, which bands do not show and distances would.
  const bool far = p.mask.corner == TESSERA_CORNER_AT &&
                   (core::has(p, TESSERA_CORNER_OFFSETS) || rules::narrow_offset(p.mask.corner_at) != p.mask.corner_at);
  if (core::has(p, TESSERA_SLOPES) && far)
    return "slopes are for distances from a corner that lists give or that is beyond 2^29; it takes nearer ones";
  for (const int name : {TESSERA_BIAS, TESSERA_KEEP})
    if (std::string why = refuse_grid(p, name); !why.empty()) return why;
  return "";
}

std::string refuse(const Problem& p, const Device& device) {
  if (device.kind == TESSERA_GPU && device.sm_arch != 90)
    return fmt::format("device {} is sm_{}; the kernel's instructions are those of sm_90a alone", device.name,
                       device.sm_arch);
  if (std::string why = refuse_forward(p, device); !why.empty()) return why;
  if (std::string why = refuse_keys(p); !why.empty()) return why;
  if (choices_for(p, is_paged(p)).empty())
    return is_paged(p) && !choices_for(p, false).empty()
               ? fmt::format("dims are {} and {}, keys lie in pages; of these it takes up to 192 and 128", p.dim,
                             p.dim_v)
               : fmt::format("dims are {} and {}; it takes multiples of 8 up to 256", p.dim, p.dim_v);
  // Its weights are fused multiply-adds.
  if (const int32_t out = core::operand(p, TESSERA_OUT).dtype; out != core::data_dtype(p))
    return fmt::format("out is {}, which would show how its weights are rounded; it writes q's dtype",
                       rules::dtype_rows[out].text);
  if (std::string why = makes_scores(p) ? "" : refuse_scale(p); !why.empty()) return why;
  if (std::string why = refuse_long(p); !why.empty()) return why;
  const Sm90ForwardSpec& spec = choices_for(p, is_paged(p)).back().spec;  // that suits whatever the keys
  if (const int64_t items = items_of(p, rules::tile_rows(spec)); items > most_items)
    return fmt::format("it would take {} items; it counts to {}", items, most_items);
  if (std::string why = refuse_shared(rules::shared_bytes(spec), device); !why.empty()) return why;
  if (std::string why = refuse_rows(p, rows_by_16); !why.empty()) return why;
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V})
    if (std::string why = refuse_map(p, name); !why.empty()) return why;
  return refuse_pairs(p);
}

struct Cut {
  const Sm90ForwardSpec& spec;  // of the table, which stays
  Splits splits;
};

void fill(Plan& plan, const core::Hints& hints) {
  const Problem& p = plan.problem;
  const Sm90ForwardSpec& spec = spec_for(p, plan.device, hints);
  const Loaded& kernel = Loaded::of(spec);
  plan.threads = 1;
  plan.tile_rows = rules::tile_rows(spec);
  plan.tile_keys = spec.tile_keys;
  const auto [splits, joined] = splits_of(p, plan.device, spec, hints);
  const int64_t items = items_of(p, plan.tile_rows) * splits;
  const bool has_room = !hints.has_workspace_limit || hints.workspace_limit >= 64;
  const bool counts = items > plan.device.sms && !is_even(p) && has_room;
  if (counts) core::add_region(plan, "turns", sizeof(rules::Turns));
  if (splits > 1 && !joined) core::add_region(plan, "partials", partial_bytes(p, splits));
  add_append_step(plan);
  core::Step step = {.name = "attend",
                     .text = {},
                     .launch = {.code = &kernel,
                                .blocks = std::min<int64_t>(items, plan.device.sms),
                                .threads = kernel.code().threads,
                                .shared_bytes = kernel.code().shared_bytes,
                                .cluster = joined ? splits : 1,
                                .cut = std::make_shared<Cut>(Cut{spec, {splits, joined}})}};
  step.text = fmt::format("tile {} rows x {} keys, {} stages; {} blocks of {} threads take {} items {}, {} KiB shared",
                          plan.tile_rows, spec.tile_keys, spec.stages, step.launch.blocks, step.launch.threads, items,
                          counts ? "as each is free" : "in turns", rules::ceil_div(step.launch.shared_bytes, 1024));
  if (splits > 1) step.text += fmt::format("; keys in {} splits{}", splits, joined ? ", joined by clusters" : "");
  plan.steps.push_back(std::move(step));
  if (splits > 1 && !joined) add_combine_step(plan, splits);
  if (core::packed_q(p) && p.rows_q > 0) add_clear_step(plan);
}

// Even, not 0, and by 62 random bits no other launch's, whichever process made it.
uint64_t launch_number() {
  static const uint64_t seed = uint64_t{std::random_device()()} << 32 | std::random_device()();
  static std::atomic<uint64_t> count = 0;
  uint64_t x = seed + 0x9E3779B97F4A7C15 * ++count;  // SplitMix64 (Steele, Lea, Flood 2014)
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return ((x ^ x >> 31) | 2) & ~uint64_t{1};
}

rules::Sm90PairParams pair_params(const Plan& plan, const Sm90ForwardSpec& spec, const core::Bindings& bound) {
  const Problem& p = plan.problem;
  const double scale = scale_of(p);
  const rules::GridMap bias = grid_map(need_driver(), p, bound, TESSERA_BIAS, plan.tile_keys);
  const rules::GridMap keep = grid_map(need_driver(), p, bound, TESSERA_KEEP, plan.tile_keys);
  const int bytes = rules::pair_bytes_of_tile(spec, bias.bytes > 0, keep.bytes > 0);
  const double to_cap = p.softcap != 0 ? scale / p.softcap : 0, b = to_cap * to_cap;
  const auto term = [&](double coefficient) { return static_cast<float>(scale * coefficient); };
  return {.bias = bias,
          .keep = keep,
          .slots = bytes > 0 ? std::min(rules::pair_bytes(spec) / bytes, rules::most_pair_slots) : 0,
          .softcap = static_cast<float>(p.softcap),
          .scale_to_cap = static_cast<float>(to_cap),
          // A polynomial for tanh up to 0.6: relative error 2^-22.6.
          .cap_terms = {term(1), term(-0.3333262 * b), term(0.1331352 * b * b), term(-0.05223109 * b * b * b),
                        term(0.01564045 * b * b * b * b)},
          .scale = p.softcap == 0 && adds_to_scores(p) ? static_cast<float>(scale) : 1,
          .slopes = data_of<const float>(p, bound, TESSERA_SLOPES),
          .excluded = data_of<const unsigned char>(p, bound, TESSERA_EXCLUDE_KEYS),
          .documents_q = data_of<const int>(p, bound, TESSERA_DOCUMENTS_Q),
          .documents_k = data_of<const int>(p, bound, TESSERA_DOCUMENTS_K),
          .slope_step = steps_of(p, TESSERA_SLOPES),
          .excluded_step = steps_of(p, TESSERA_EXCLUDE_KEYS),
          .document_q_step = steps_of(p, TESSERA_DOCUMENTS_Q),
          .document_k_step = steps_of(p, TESSERA_DOCUMENTS_K),
          .dropout = rules::make_dropout(p.dropout, bound.seed, bound.offset, 0),
          .keep_scale = static_cast<float>(1 / (1 - p.dropout)),
          .drops = p.dropout != 0};
}
rules::Sm90ForwardParams params_of(const Plan& plan, const Cut& cut, const core::Bindings& bound) {
  const Problem& p = plan.problem;
  const auto map = [&](int name, int rows) { return tensor_map(need_driver(), p, bound, name, rows); };
  const int rows = is_paged(p) ? static_cast<int>(std::gcd(p.cache.page_size, plan.tile_keys)) : plan.tile_keys;
  rules::Sm90ForwardParams params = {forward_params(plan, bound),
                                     map(TESSERA_Q, 64),
                                     map(TESSERA_K, rows),
                                     map(TESSERA_V, rows),
                                     {},
                                     is_plain_causal(core::band_mask(p, 0, 0)),
                                     static_cast<int>(items_of(p, plan.tile_rows)),
                                     static_cast<int>(p.dim),
                                     static_cast<int>(p.dim_v),
                                     region_of<rules::Turns>(plan, bound, "turns"),
                                     launch_number(),
                                     data_of<const float>(p, bound, TESSERA_SINKS),
                                     steps_of(p, TESSERA_SINKS),
                                     {},
                                     cache_params(p, bound),
                                     fresh_lengths(p, bound),
                                     rows,
                                     cut.splits.count,
                                     cut.splits.joined,
                                     region_of<float>(plan, bound, "partials")};
  params.items *= params.splits;
  params.narrow_band = rules::narrowed(params.band);
  if (has_any_pairs(p)) {
    params.pairs = pair_params(plan, cut.spec, bound);
    const double scale = makes_scores(p) ? 1 : scale_of(p);
    params.scale = static_cast<float>(scale);
    params.scale_log2 = static_cast<float>(scale * M_LOG2E);
  }
  return params;
}

void run(const Plan& plan, const core::Bindings& bound, void* stream) {
  const auto idle = [](const core::Step& step) { return step.launch.blocks == 0; };
  if (std::all_of(plan.steps.begin(), plan.steps.end(), idle)) return;
  check_rows(plan.problem, bound, rows_by_16);
  // Without a query new tokens still go into the cache.
  const bool has_q = core::elements(core::operand(plan.problem, TESSERA_Q)) > 0;
  const Launcher launcher(plan, bound, has_q ? TESSERA_Q : TESSERA_K, stream);
  for (const core::Step& step : plan.steps) {
    if (idle(step)) continue;
    if (step.name != "attend") {
      rules::GeneralParams params = general_params(plan, bound);
      launch_general(launcher, step, params);
    } else {
      rules::Sm90ForwardParams params = params_of(plan, *static_cast<const Cut*>(step.launch.cut.get()), bound);
      launcher.launch(step, &params);
    }
  }
}

}  // namespace

constinit const core::Kernel sm90_forward = gpu_kernel("cuda.sm90", refuse, fill, run);

}  // namespace tessera::cuda
