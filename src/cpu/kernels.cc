// The CPU kernels' rows: what they refuse, what a plan for them holds.
#include <algorithm>
#include <array>

#include "core/error.h"
#include "cpu/cpu.h"
#include "cpu/run.h"
#include "cpu/task.h"
#include "rules/dtype.h"

namespace tessera::cpu {
namespace {

using core::Device;
using core::Hints;
using core::Kernel;
using core::Plan;

std::string refuse_device(const Device& device, int isa) {
  if (device.kind != TESSERA_CPU) return fmt::format("device {} is a GPU, the kernel runs on a processor", device.name);
  if (device.isa < isa)
    return fmt::format("needs {}, device {} has {}", core::isa_text(isa), device.name, core::isa_text(device.isa));
  return "";
}

template <int isa>
std::string refuse(const Problem& p, const Device& device) {
  std::string why = refuse_device(device, isa);
  if (!why.empty() || isa != TESSERA_ISA_AVX512BF16) return why;
  if (core::data_dtype(p) != TESSERA_BF16)
    return fmt::format("its products are bf16, q is {}", rules::dtype_rows[core::data_dtype(p)].text);
  if (p.pass == TESSERA_BACKWARD) return "its products are bf16, backward keeps P and dS in float32";
  if (p.pass == TESSERA_APPEND) return "an append has no products";
  for (const int name : {TESSERA_K, TESSERA_V})
    if (core::operand(p, name).dtype == TESSERA_E4M3)
      return fmt::format("its products are bf16, {} is e4m3 times a scale", core::operand_row(name).text);
  return "";
}

struct TileRow {
  Index most_dims;  // of D + Dv
  int rows, keys;
  const char* why;
};
// Keys are packed once a tile of rows, so rows are many; 64 keys of K and V stay in the first and second cache.
constexpr TileRow forward_tiles[] = {
    {512, 256, 64,
     "packing keys costs a fifth of 64 rows' products, a twentieth of 256; out and q still fit the second cache"},
    {1 << 30, 32, 64, "large dims: fewer rows, the same bytes"}};
constexpr TileRow backward_tiles[] = {
    {512, 64, 64, "three packed tiles of rows and four of keys within the second cache"},
    {1 << 30, 32, 32, "large dims: half of each"}};

const TileRow& tile_for(const Problem& p) {
  const auto& table = p.pass == TESSERA_BACKWARD ? backward_tiles : forward_tiles;
  return p.dim + p.dim_v <= table[0].most_dims ? table[0] : table[1];
}

std::string append_text(const Problem& p) {
  std::string text = p.cache.v_in_k ? "new keys" : "new keys and values";
  if (p.cache.rotary_dim) text += fmt::format(", {} numbers rotated", p.cache.rotary_dim);
  text += p.cache.page_size ? fmt::format(", to pages of {}", p.cache.page_size) : ", to their slots";
  return text + (p.cache.ring ? " of a ring" : "");
}

Index scratch_bytes(const Problem& p, Index rows, Index keys) {
  Carver count(nullptr);
  const bool f64 = core::accumulation_dtype(p) == TESSERA_F64 || sums_in_f64(p);
  if (core::appends(p)) AppendBuffers<double>(count, p);
  const Index most = count.used();
  count = Carver(nullptr);
  if (p.pass == TESSERA_APPEND) return most;
  if (p.pass == TESSERA_FORWARD) {
    if (f64) ForwardBuffers<double>(count, p, rows, keys);
    else ForwardBuffers<float>(count, p, rows, keys);
  } else {
    if (f64) BackwardBuffers<double>(count, p, rows, keys);
    else BackwardBuffers<float>(count, p, rows, keys);
  }
  return std::max(most, count.used());
}

// Most items that any step can hand out.
double most_items(const Problem& p, Index tile_rows, Index tile_keys) {
  const auto tiles = [](Index n, Index tile) { return static_cast<double>(rules::ceil_div(n, tile)); };
  if (p.pass == TESSERA_APPEND) return static_cast<double>(core::new_tokens(p));
  const double planes = static_cast<double>(p.batch * p.heads_kv);
  const double rows = tiles(p.len_q * core::group(p), tile_rows), keys = tiles(p.len_k, tile_keys);
  if (p.pass == TESSERA_FORWARD) return planes * rows * tiles(p.len_k, chunk_of_keys);
  const double of_bias =
      core::has(p, TESSERA_DBIAS) ? static_cast<double>(p.batch * p.heads_q) * tiles(p.len_q, tile_rows) * keys : 0;
  return std::max(planes * std::max(rows, keys), of_bias);
}

// Threads that have an item each; unless the caller said how many, also some 50 us of work each, since waking them
// costs.
int useful_threads(const Plan& plan, bool said) {
  constexpr double flops_a_thread = 2e6, bytes_a_thread = 5e5;
  const double items = most_items(plan.problem, plan.tile_rows, plan.tile_keys);
  const core::Cost cost = core::cost(plan.problem, plan.device);
  const double work =
      std::max(cost.flops / flops_a_thread, static_cast<double>(cost.bytes_read + cost.bytes_written) / bytes_a_thread);
  const double useful = said ? items : std::min(items, work);
  return static_cast<int>(std::clamp(useful, 1.0, static_cast<double>(plan.threads)));
}

// The table's rows, halved while threads would go without tiles; a row's bits do not depend on it.
int rows_for(const Problem& p, const TileRow& tile, int threads) {
  const Index all = p.len_q * core::group(p), planes = p.batch * p.heads_kv;
  Index rows = tile.rows;
  while (rows > 32 && planes * rules::ceil_div(all, rows) < 4 * threads) rows /= 2;
  return static_cast<int>(std::clamp<Index>(all, 1, rows));
}

// Chunks go to several threads where one thread would have a sequence's keys alone, as in decoding, or where there are
// too few tiles of rows for all; unless their states outweigh what is read, since memory must stay linear.
bool should_split(const Plan& plan, Index state_bytes, const Hints& hints) {
  const Problem& p = plan.problem;
  if (plan.threads == 1 || p.len_k <= chunk_of_keys) return false;
  if (hints.has_workspace_limit && plan.workspace_bytes + state_bytes > hints.workspace_limit) return false;
  if (state_bytes > core::cost(p, plan.device).bytes_read) return false;
  const Index tiles = rules::ceil_div(p.len_q * core::group(p), plan.tile_rows);
  return tiles == 1 || p.batch * p.heads_kv * tiles < 4 * plan.threads;
}

void fill(Plan& plan, const Hints& hints) {
  const Problem& p = plan.problem;
  const TileRow& tile = tile_for(p);
  const bool forward = p.pass == TESSERA_FORWARD;
  plan.tile_rows = hints.tile_rows ? hints.tile_rows : rows_for(p, tile, plan.threads);
  plan.tile_keys = hints.tile_keys ? hints.tile_keys : tile.keys;
  plan.threads = useful_threads(plan, hints.threads > 0);
  const std::string tiles =
      fmt::format("tile {} rows x {} keys, {}", plan.tile_rows, plan.tile_keys, core::threads_text(plan.threads));

  const Index bytes = scratch_bytes(p, plan.tile_rows, plan.tile_keys);
  const Index rows = p.heads_q * (core::packed_q(p) ? p.rows_q : p.batch * p.len_q);
  const bool f64 = core::accumulation_dtype(p) == TESSERA_F64;
  core::add_region(plan, "schedule", 4 * (p.batch + 1) * static_cast<Index>(sizeof(Index)));
  core::add_region(plan, "tiles", plan.threads * bytes);  // at most 2^10 x 2^46
  if (const Index targets = core::most_targets(p)) core::add_region(plan, "targets", targets * 8);
  plan.steps.push_back({"schedule", "items of each sequence; unused rows cleared"});
  if (core::appends(p)) plan.steps.push_back({"append", append_text(p)});
  if (p.pass == TESSERA_APPEND) return;
  if (forward) {
    const Task task = {p, Bindings{}, plan.tile_rows, plan.tile_keys};
    const Index states = rows * task.most_chunks() * state_size(p) * (f64 ? 8 : 4);
    const bool split = should_split(plan, states, hints);
    if (split) core::add_region(plan, "states", states);
    const std::string share = core::group(p) > 1 ? fmt::format(", {} query heads share a tile", core::group(p)) : "";
    plan.steps.push_back(
        {"attend", tiles + share + (split ? fmt::format(", by chunks of {} keys", task.chunk_keys()) : "")});
    if (split) plan.steps.push_back({"combine", "the chunks of each row, in order"});
    return;
  }
  if (!f64) core::add_region(plan, "delta_f32", rows * 4);
  if (f64 || sums_in_f64(p)) core::add_region(plan, "delta_f64", rows * 8);
  plan.steps.push_back({"delta", "dO . out of each row"});
  if (core::has(p, TESSERA_DK) || core::has(p, TESSERA_DV))
    plan.steps.push_back({"keys", tiles + ", dK and dV by tiles of keys"});
  if (core::has(p, TESSERA_DQ)) plan.steps.push_back({"rows", tiles + ", dQ by tiles of rows"});
  if (core::has(p, TESSERA_DSLOPES)) {
    core::add_region(plan, "slope_rows", rows * 8);
    plan.steps.push_back({"slopes", tiles + ", each row's share of dSlopes in float64"});
  }
  if (core::has(p, TESSERA_DBIAS))
    plan.steps.push_back({"bias", tiles + ", dBias by its own tiles" + (f64 || bias_in_f64(p) ? " in float64" : "")});
  if (core::has(p, TESSERA_DSLOPES) || core::has(p, TESSERA_DSINKS))
    plan.steps.push_back({"reduce", "dSlopes and dSinks over rows in float64"});
}

template <int isa>
const Body& body_of(bool f64) {
  if constexpr (isa == TESSERA_ISA_AVX512BF16) return avx512bf16::body();
  else if constexpr (isa == TESSERA_ISA_AVX512) return avx512::body(f64);
  else if constexpr (isa == TESSERA_ISA_AVX2) return avx2::body(f64);
  else return baseline::body(f64);
}
template <int isa>
void run_with(const Plan& plan, const Bindings& bound, void*) {
  // float64 sums besides float32 ones come from the plain kernels of the same instruction set.
  run(plan, bound, {body_of<isa>(false), body_of<isa>(true)});
}

// Registers of 512 bits lower some processors' clock for all that runs after them: beside torch a tiny forward and
// backward took 10 us more of 90 than with 256 (bench/host_time.py), though the kernels themselves took the same.
constexpr double least_flops_512 = 5e5;

template <int isa>
constexpr Kernel row(const char* name) {
  return {name,          "cpu",       true, isa >= TESSERA_ISA_AVX512 ? least_flops_512 : 0, refuse<isa>, fill,
          run_with<isa>, merge_bytes, merge};
}
constexpr Kernel baseline_kernel = row<TESSERA_ISA_BASELINE>("cpu.baseline");
#if defined(__x86_64__)
constexpr Kernel avx512bf16_kernel = row<TESSERA_ISA_AVX512BF16>("cpu.avx512bf16");
constexpr Kernel avx512_kernel = row<TESSERA_ISA_AVX512>("cpu.avx512");
constexpr Kernel avx2_kernel = row<TESSERA_ISA_AVX2>("cpu.avx2");
constexpr std::array<const Kernel*, 4> all = {&avx512bf16_kernel, &avx512_kernel, &avx2_kernel, &baseline_kernel};
#else
constexpr std::array<const Kernel*, 1> all = {&baseline_kernel};
#endif

}  // namespace

std::span<const Kernel* const> kernels() {
  return all;
}

}  // namespace tessera::cpu
