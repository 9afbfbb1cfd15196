#include "core/cascade.h"

#include <algorithm>
#include <array>

#include "core/check.h"
#include "core/error.h"
#include "rules/dtype.h"

namespace tessera::core {
namespace {

int64_t query_rows(const Problem& p) {  // all sequences' rows, one after the other
  return packed_q(p) ? p.rows_q : p.batch * p.len_q;
}

void check_level(const Problem& p, size_t n, const Problem& last, bool is_last) {
  const auto same = [&](const char* what, auto mine, auto its) {
    require(mine == its, "level {}: {} is {} and the last level's is {}; all levels attend the same rows of q.", n,
            what, mine, its);
  };
  require(p.pass == TESSERA_FORWARD, "level {}: its pass is not forward; a cascade attends.", n);
  same("q's dtype", std::string(rules::dtype_rows[data_dtype(p)].text),
       std::string(rules::dtype_rows[data_dtype(last)].text));
  same("heads_q", p.heads_q, last.heads_q);
  same("dim", p.dim, last.dim);
  same("dim_v", p.dim_v, last.dim_v);
  same("batch * len_q, or rows_q,", query_rows(p), query_rows(last));
  same("has_scale", p.has_scale, last.has_scale);
  same("scale", p.scale, last.scale);
  same("softcap", p.softcap, last.softcap);
  require(p.dropout == 0, "level {}: dropout is {}; it counts keys inside one problem. Leave it out.", n, p.dropout);
  require(!has(p, TESSERA_MAX_SCORE), "level {}: max_score is given; a merge has none. Leave it out.", n);
  require(p.cache.rotary_dim == 0,
          "level {}: rotary_dim is {}; q would be rotated for this level alone. Rotate q before.", n,
          p.cache.rotary_dim);
  if (is_last) return;
  require(!appends(p), "level {}: k_new is given; only the last level appends.", n);
  require(p.batch == last.batch || !needs_corner(p),
          "level {}: its {} sequences hold the rows of {} requests, whose positions causal, window, chunk, prefix and "
          "slopes cannot tell apart. Leave them out, or attend these keys per request (batch {}, shared pages).",
          n, p.batch, last.batch, last.batch);
}

// The level with a partial result of its own: dense, row after row, in the accumulation type.
Problem partial(Problem p) {
  const int32_t accumulation = accumulation_dtype(p);
  const Operand& q = operand(p, TESSERA_Q);
  declare_extents(p, TESSERA_OUT, accumulation, {q.extent[0], q.extent[1], p.heads_q, p.dim_v});
  declare_extents(p, TESSERA_LSE, accumulation, {q.extent[0], q.extent[1], p.heads_q, 1});
  return p;
}

// Everything of the merge but pointers.
tessera_merge merge_of(const Plan& plan) {
  const Problem& p = plan.problem;
  tessera_merge m = {};
  m.size = sizeof m;
  m.pass = TESSERA_FORWARD;
  m.threads = plan.threads;
  m.parts = static_cast<int64_t>(plan.levels.size());
  m.out = operand(p, TESSERA_OUT);
  m.lse = operand(p, TESSERA_LSE);
  m.batch = m.out.extent[0];
  m.len = m.out.extent[1];
  m.heads = p.heads_q;
  m.dim = p.dim_v;
  // Rows follow each other in every level's result, so the last level's shape serves for all.
  m.part_out = operand(plan.levels.back().problem, TESSERA_OUT);
  m.part_lse = operand(plan.levels.back().problem, TESSERA_LSE);
  return m;
}

std::string level_name(const char* what, size_t n) {
  return fmt::format("{}{}", what, n);
}

}  // namespace

Plan choose_cascade(std::span<const Kernel* const> kernels, std::span<const Problem> levels, const Device& device,
                    const Hints& hints) {
  require(!levels.empty() && levels.size() <= most_levels, "a cascade has {} levels; it must have from 1 to {}.",
          levels.size(), most_levels);
  const Problem& last = levels.back();
  for (const Problem& p : levels) check(p);
  size_t with_sinks = 0;
  for (size_t n = 0; n < levels.size(); ++n) {
    check_level(levels[n], n, last, n + 1 == levels.size());
    with_sinks += has(levels[n], TESSERA_SINKS);
  }
  require(with_sinks <= 1, "{} levels have sinks; a sink belongs to exactly one part.", with_sinks);

  Plan plan;
  Hints unlimited = hints;  // the limit is the whole's
  unlimited.has_workspace_limit = 0;
  int64_t level_bytes = 0;
  for (size_t n = 0; n < levels.size(); ++n) {
    Plan level = choose(kernels, partial(levels[n]), device, unlimited);
    for (const Step& step : level.steps) plan.steps.push_back({level_name("", n) + " " + step.name, step.text});
    level_bytes = std::max(level_bytes, level.workspace_bytes);
    plan.threads = std::max(plan.threads, level.threads);
    plan.levels.push_back(std::move(level));
  }
  const Plan& shape = plan.levels.back();
  if (!shape.kernel->merge)
    throw Error(
        TESSERA_UNSUPPORTED,
        fmt::format("no kernel answers the cascade on device {}: {} cannot merge levels; attend them one by one.",
                    device.name, shape.kernel->name));
  plan.problem = last;
  plan.device = device;
  plan.kernel = shape.kernel;
  plan.tile_rows = shape.tile_rows;
  plan.tile_keys = shape.tile_keys;
  plan.reasons = shape.reasons;
  plan.steps.push_back({"merge", fmt::format("{} partial results, in order", levels.size())});
  add_region(plan, "level", level_bytes);  // one after the other
  for (size_t n = 0; n < levels.size(); ++n)
    for (const auto& [what, name] : {std::pair{"out", TESSERA_OUT}, std::pair{"lse", TESSERA_LSE}}) {
      const Operand& o = operand(plan.levels[n].problem, name);
      add_region(plan, level_name(what, n).c_str(), elements(o) * dtype_bytes(o.dtype));
    }
  add_region(plan, "merge", plan.kernel->merge_bytes(merge_of(plan)));
  if (hints.has_workspace_limit && plan.workspace_bytes > hints.workspace_limit)
    throw Error(TESSERA_UNSUPPORTED,
                fmt::format("the cascade needs {} bytes of workspace with {}, the limit is {}; fewer threads need less",
                            plan.workspace_bytes, threads_text(plan.threads), hints.workspace_limit));
  for (const Plan& level : plan.levels) {
    plan.cost.bytes_read += level.cost.bytes_read;
    plan.cost.bytes_written += level.cost.bytes_written;
    plan.cost.score_bytes += level.cost.score_bytes;
    plan.cost.flops += level.cost.flops;
    plan.cost.seconds += level.cost.seconds;
  }
  return plan;
}

void run_cascade(const Plan& plan, std::span<const Bindings> bound, void* stream) {
  const size_t count = plan.levels.size();
  require(count > 0, "the plan is no cascade's; run it with tessera_run.");
  require(bound.size() == count, "{} bindings are given; the cascade has {} levels.", bound.size(), count);
  const Bindings& last = bound.back();
  check_workspace(plan, last);
  std::byte* const workspace = static_cast<std::byte*>(last.workspace);
  const auto region = [&](const char* name) { return workspace + region_offset(plan, name); };

  std::array<Bindings, most_levels> levels;
  std::array<const void*, most_levels> outs = {}, lses = {};
  for (size_t n = 0; n < count; ++n) {
    levels[n] = bound[n];
    outs[n] = levels[n].data[TESSERA_OUT] = region(level_name("out", n).c_str());
    lses[n] = levels[n].data[TESSERA_LSE] = region(level_name("lse", n).c_str());
    levels[n].workspace = region("level");
    levels[n].workspace_bytes = plan.levels[n].workspace_bytes;
    check_bindings(plan.levels[n], levels[n]);  // all, before anything is written
  }
  check_pointers(plan.problem, last);
  for (size_t n = 0; n < count; ++n) plan.levels[n].kernel->run(plan.levels[n], levels[n], stream);

  tessera_merge m = merge_of(plan);
  m.part_out_data = outs.data();
  m.part_lse_data = lses.data();
  m.out_data = last.data[TESSERA_OUT];
  m.lse_data = last.data[TESSERA_LSE];
  plan.kernel->merge(m, region("merge"));
}

}  // namespace tessera::core
