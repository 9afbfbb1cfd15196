// The general kernels: their few refusals, the steps of a plan, parameters and launches.
#include <algorithm>

#include "core/error.h"
#include "cuda/general_shape.h"
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
using rules::Cut;
using rules::GeneralParams;
using rules::GeneralSpec;
using rules::Product;
using rules::Task;

std::string refuse(const Problem& p, const Device& device) {
  if (device.kind != TESSERA_GPU)
    return fmt::format("device {} is a processor, the kernels run on NVIDIA GPUs", device.name);
  if (device.sm_arch < oldest_arch)
    return fmt::format("device {} is sm_{}; the kernels' instructions begin with sm_75", device.name, device.sm_arch);
  const int32_t dtype = core::data_dtype(p);
  if (dtype == TESSERA_F64) return "float64 is computed on processors only";
  const bool append = p.pass == TESSERA_APPEND;
  if (!append && device.sm_arch < rules::least_arch(product_of(p, device)))
    return fmt::format("q is bf16 and device {} is sm_{}; its tensor cores take f16", device.name, device.sm_arch);
  if (std::max({p.len_q, p.len_k, p.len_new}) > longest_sequence)
    return fmt::format("a sequence is longer than {}", longest_sequence);
  if (std::max({p.batch, p.heads_q, p.dim, p.dim_v}) > longest_sequence)
    return fmt::format("a size is over {}", longest_sequence);
  if (p.len_q < 16 * rules::most_warps && p.len_q * core::group(p) > longest_sequence)
    return fmt::format("{} query heads share a KV head; with {} queries that is over {}", core::group(p), p.len_q,
                       longest_sequence);
  for (const Job& job : jobs_of(p, device)) {
    int64_t least = 0;
    if (!shape_of(p, device, job, &least))
      return fmt::format("a block needs {} bytes of shared memory for dims {} and {}, device {} has {}", least, p.dim,
                         p.dim_v, device.name, device.shared_per_block);
  }
  return "";
}

// -------------------------------------------------------------------------------------------------------- the plan

struct Own {  // of a step
  GeneralSpec spec;
  Cut cut;
};

int64_t rows_of_q(const Problem& p) {
  return core::packed_q(p) ? p.rows_q : p.batch * p.len_q;
}

void add_step(Plan& plan, const GeneralSpec& spec, const Cut& cut, int64_t blocks, int threads, int shared,
              std::string text) {
  core::Step step = {.name = spec.task == Task::forward ? "attend" : text_of(spec.task),
                     .text = std::move(text),
                     .launch = {.code = &Loaded::of(spec),
                                .blocks = std::min(blocks, most_blocks),
                                .threads = threads,
                                .shared_bytes = shared,
                                .cut = std::make_shared<Own>(Own{spec, cut})}};
  plan.steps.push_back(std::move(step));
}
// A step whose warps or threads take turns over `count` small things.
void add_small_step(Plan& plan, Task task, int64_t count, int64_t a_block, const Cut& cut, std::string text) {
  const int64_t blocks = std::min<int64_t>(rules::ceil_div(count, a_block), int64_t{plan.device.sms} * 16);
  add_step(plan, {task, Product::any, 0, 0}, cut, blocks, 32 * rules::most_warps, 0, std::move(text));
}

std::string words_of(const Shape& s) {
  std::string text = fmt::format("tile {} rows x {} {}, {} products; {} blocks of {} threads, {} KiB shared", s.rows(),
                                 s.spec.width, s.spec.task == Task::keys ? "queries" : "keys", text_of(s.spec.product),
                                 s.cut.items, 32 * s.warps, rules::ceil_div(s.shared_bytes, 1024));
  if (s.cut.pack > 1) text += fmt::format("; {} query heads share a tile", s.cut.pack);
  if (s.cut.slices > 1) text += fmt::format("; {} slices of {} columns", s.cut.slices, s.spec.columns);
  if (s.cut.splits > 1) text += fmt::format("; keys in {} splits", s.cut.splits);
  if (s.cut.sums_slopes) text += "; each row's share of dSlopes";
  if (s.cut.at_once < s.cut.panels) text += "; wide rows by parts";
  return text;
}

// Few rows leave a GPU idle: then a sequence's keys go to several blocks, and a second step joins them.
int splits_of(const Plan& plan, const Shape& s, const core::Hints& hints) {
  const Problem& p = plan.problem;
  constexpr int64_t least_keys = 256;  // of a split
  if (p.batch_invariant || s.cut.items == 0 || s.cut.items >= plan.device.sms) return 1;
  int64_t splits = std::min<int64_t>(2 * plan.device.sms / s.cut.items, rules::ceil_div(p.len_k, least_keys));
  if (hints.has_workspace_limit) {
    const int64_t each = partial_bytes(p, 1);
    const int64_t room = (hints.workspace_limit - plan.workspace_bytes) / 64 * 64;  // regions are whole lines
    splits = std::min(splits, room / std::max<int64_t>(1, each));
  }
  return static_cast<int>(std::clamp<int64_t>(splits, 1, 128));
}

void fill_forward(Plan& plan, const core::Hints& hints) {
  const Problem& p = plan.problem;
  Shape s = *shape_of(p, plan.device, jobs_of(p, plan.device).front());
  s.cut.splits = splits_of(plan, s, hints);
  s.cut.items *= s.cut.splits;
  plan.tile_rows = s.rows();
  plan.tile_keys = s.spec.width;
  if (s.cut.splits > 1) core::add_region(plan, "partials", partial_bytes(p, s.cut.splits));
  add_step(plan, s.spec, s.cut, s.cut.items, 32 * s.warps, s.shared_bytes, words_of(s));
  if (s.cut.splits > 1) add_combine_step(plan, s.cut.splits);
}

void fill_backward(Plan& plan) {
  const Problem& p = plan.problem;
  const int64_t pairs = rows_of_q(p) * p.heads_q;
  core::add_region(plan, "row_lse", pairs * 4);
  core::add_region(plan, "row_term", pairs * 4);
  if (core::has(p, TESSERA_DSLOPES)) core::add_region(plan, "row_slope", pairs * 4);
  add_small_step(plan, Task::terms, p.batch * p.len_q * p.heads_q, rules::most_warps, {},
                 "dLSE - dO . out of each row");
  for (const Job& job : jobs_of(p, plan.device)) {
    const Shape s = *shape_of(p, plan.device, job);
    plan.tile_rows = s.rows();
    plan.tile_keys = s.spec.width;
    add_step(plan, s.spec, s.cut, s.cut.items, 32 * s.warps, s.shared_bytes, words_of(s));
  }
  if (core::has(p, TESSERA_DSLOPES) || core::has(p, TESSERA_DSINKS))
    add_small_step(plan, Task::reduce, p.heads_q, 1, {}, "dSlopes and dSinks over rows in float64");
}

void fill(Plan& plan, const core::Hints& hints) {
  const Problem& p = plan.problem;
  plan.threads = 1;
  add_append_step(plan);
  if (p.pass == TESSERA_FORWARD) fill_forward(plan, hints);
  if (p.pass == TESSERA_BACKWARD) fill_backward(plan);
  add_clear_step(plan);
}

// --------------------------------------------------------------------------------------------------------- the run

void run(const Plan& plan, const core::Bindings& bound, void* stream) {
  const auto idle = [](const core::Step& step) { return step.launch.blocks == 0; };
  if (std::all_of(plan.steps.begin(), plan.steps.end(), idle)) return;
  // An operand that says which GPU: of those that cannot be empty where there is work, the first.
  int name = plan.problem.pass == TESSERA_APPEND ? TESSERA_K : TESSERA_Q;
  for (const int other : {TESSERA_K, TESSERA_DBIAS, TESSERA_DSLOPES, TESSERA_DSINKS, TESSERA_OUT})
    if (!bound.data[name] || core::elements(core::operand(plan.problem, name)) == 0) name = other;
  const Launcher launcher(plan, bound, name, stream);
  GeneralParams params = general_params(plan, bound);
  for (const core::Step& step : plan.steps) launch_general(launcher, step, params);
}

}  // namespace

void add_append_step(Plan& plan) {
  const Problem& p = plan.problem;
  if (!core::appends(p)) return;
  add_small_step(
      plan, Task::append, p.batch * p.len_new, rules::most_warps, {},
      p.cache.page_size ? fmt::format("new tokens to pages of {}", p.cache.page_size) : "new tokens to their slots");
}

int64_t partial_bytes(const Problem& p, int64_t splits) {
  return rows_of_q(p) * p.heads_q * splits * rules::partial_size(p.dim_v) * 4;
}
void add_combine_step(Plan& plan, int splits) {
  const Problem& p = plan.problem;
  add_small_step(plan, Task::combine, p.batch * p.len_q * p.heads_q, rules::most_warps, {.splits = splits},
                 "the splits of each row, in order");
}

void add_clear_step(Plan& plan) {
  const Problem& p = plan.problem;
  if (!core::packed_q(p) && !core::packed_k(p)) return;
  const int64_t rows = std::max(p.rows_q * p.heads_q, p.rows_k * p.heads_kv);
  add_small_step(plan, Task::clear, rows * std::max(p.dim, p.dim_v), 32 * rules::most_warps, {},
                 "rows past the last sequence");
}

void launch_general(const Launcher& launcher, const core::Step& step, GeneralParams& params) {
  static_cast<Cut&>(params) = static_cast<const Own*>(step.launch.cut.get())->cut;
  launcher.launch(step, &params);
}

constinit const core::Kernel general = gpu_kernel("cuda.general", refuse, fill, run);

}  // namespace tessera::cuda
