// The steps of a plan: which items there are, who takes them, and the small steps around them.
#include "cpu/run.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/number.h"
#include "cpu/threads.h"
#include "rules/softmax.h"

namespace tessera::cpu {
namespace {

using core::bytes_of;
using core::read;
using core::write;

constexpr Index tokens_at_once = 16;  // of an append

// Work of one kind: `before[b]` items belong to sequences before b.
struct Items {
  Index* before;
};

struct Run {
  const core::Plan& plan;
  const Problem& p;
  const Bindings& bound;
  Task task;
  std::byte* workspace;
  Items rows, keys, chunks, tokens;
  Index scratch_bytes;

  std::byte* region(const char* name) const { return workspace + core::region_offset(plan, name); }
};

// f(item, scratch)
template <class F>
void parallel(const Run& run, Index items, F&& f) {
  std::byte* const scratch = run.region("tiles");
  parallel_for(run.plan.threads, items, [&](Index item, int thread) { f(item, scratch + thread * run.scratch_bytes); });
}

void schedule(const Run& run) {
  const Problem& p = run.p;
  const Items &rows = run.rows, &keys = run.keys, &chunks = run.chunks, &tokens = run.tokens;
  for (const Items* items : {&rows, &keys, &chunks, &tokens}) items->before[0] = 0;
  for (Index b = 0; b < p.batch; ++b) {
    const Sequence s = core::sequence(p, run.bound, b);
    const Index row_tiles = rules::ceil_div(s.q.used * core::group(p), run.task.tile_rows);
    rows.before[b + 1] = rows.before[b] + row_tiles * p.heads_kv;
    keys.before[b + 1] = keys.before[b] + rules::ceil_div(s.k.used, run.task.tile_keys) * p.heads_kv;
    const Index chunks_seen = run.task.states ? run.task.chunks(s).size() : 0;  // asked for only where they are split
    chunks.before[b + 1] = chunks.before[b] + row_tiles * p.heads_kv * chunks_seen;
    tokens.before[b + 1] = tokens.before[b] + rules::ceil_div(s.fresh.used, tokens_at_once);
  }
}

// Item `item` of a sequence's own `count`.
struct Place {
  Index batch, item, count;
};
Place place_of(const Run& run, const Items& items, Index item) {
  const Index* const found = std::upper_bound(items.before, items.before + run.p.batch + 1, item) - 1;
  return {found - items.before, item - *found, found[1] - *found};
}
Range tile(Index n, Index size, Index end) {
  return rules::overlap({n * size, (n + 1) * size}, {0, end});
}

// The tiles of one KV head stand together, so that its keys stay in cache; the last tile comes first, since under a
// causal mask it sees the most keys.
RowItem row_item(const Run& run, Index batch, Index item, Index count) {
  const Sequence s = core::sequence(run.p, run.bound, batch);
  const Index tiles = count / run.p.heads_kv, group = core::group(run.p);
  const Range rows = tile(tiles - 1 - item % tiles, run.task.tile_rows, s.q.used * group);
  const Range seeing = {rows.begin / group, rules::ceil_div(rows.end, group)};
  const rules::BandMask band = core::band_mask(run.p, s);
  const rules::Visit visit = rules::visit(band, seeing);
  return {s, item / tiles, rows, band, visit, core::seen_keys(band, visit, seeing)};
}
void over_rows(const Run& run, void (*step)(const Task&, const RowItem&, std::byte*)) {
  parallel(run, run.rows.before[run.p.batch], [&](Index item, std::byte* scratch) {
    const Place at = place_of(run, run.rows, item);
    step(run.task, row_item(run, at.batch, at.item, at.count), scratch);
  });
}
void over_chunks(const Run& run, void (*step)(const Task&, const ChunkItem&, std::byte*)) {
  parallel(run, run.chunks.before[run.p.batch], [&](Index item, std::byte* scratch) {
    const Place at = place_of(run, run.chunks, item);
    const Range chunks = run.task.chunks(core::sequence(run.p, run.bound, at.batch));
    const Index n = chunks.size();
    step(run.task, {row_item(run, at.batch, at.item / n, at.count / n), chunks.begin + at.item % n}, scratch);
  });
}
void over_new_tokens(const Run& run, void (*step)(const Task&, const NewItem&, std::byte*)) {
  parallel(run, run.tokens.before[run.p.batch], [&](Index item, std::byte* scratch) {
    const Place at = place_of(run, run.tokens, item);
    const Sequence s = core::sequence(run.p, run.bound, at.batch);
    step(run.task, {s, tile(at.item, tokens_at_once, s.fresh.used)}, scratch);
  });
}
void over_keys(const Run& run, void (*step)(const Task&, const KeyItem&, std::byte*)) {
  parallel(run, run.keys.before[run.p.batch], [&](Index item, std::byte* scratch) {
    const Place at = place_of(run, run.keys, item);
    const Sequence s = core::sequence(run.p, run.bound, at.batch);
    const Index tiles = at.count / run.p.heads_kv;
    step(run.task, {s, at.item / tiles, tile(tiles - 1 - at.item % tiles, run.task.tile_keys, s.k.used)}, scratch);
  });
}

void over_bias(const Run& run, void (*step)(const Task&, const BiasItem&, std::byte*)) {
  const Problem& p = run.p;
  const Operand& o = core::operand(p, TESSERA_DBIAS);
  if (core::elements(o) == 0) return;
  const Index full[] = {p.batch, p.heads_q, p.len_q, p.len_k}, tile[] = {1, 1, run.task.tile_rows, run.task.tile_keys};
  Index counts[4];
  for (int d = 0; d < 4; ++d) counts[d] = o.extent[d] == 1 ? 1 : rules::ceil_div(o.extent[d], tile[d]);
  parallel(run, counts[0] * counts[1] * counts[2] * counts[3], [&](Index item, std::byte* scratch) {
    Range ranges[4];
    for (int d = 3; d >= 0; --d) {
      const Index n = item % counts[d];
      item /= counts[d];
      ranges[d] = o.extent[d] == 1 ? Range{0, full[d]} : rules::overlap({n * tile[d], (n + 1) * tile[d]}, {0, full[d]});
    }
    step(run.task, {ranges[0], ranges[1], ranges[2], ranges[3]}, scratch);
  });
}

// Rows that no sequence uses: zeros, and -inf in lse and max_score.
void clear_rows(const Run& run, int name, const core::Rows& rows) {
  const Operand& o = core::operand(run.p, name);
  const double value = name == TESSERA_LSE || name == TESSERA_MAX_SCORE ? -std::numeric_limits<double>::infinity() : 0;
  char* const data = static_cast<char*>(run.bound.data[name]);
  for (Index row = rows.first + rows.used; row < rows.first + rows.stored; ++row)
    for (Index h = 0; h < o.extent[2]; ++h)
      for (Index d = 0; d < o.extent[3]; ++d)
        write(data + core::offset_of(o, rows.plane, row, h, d) * bytes_of(o.dtype), o.dtype, value);
}
void clear_unused(const Run& run) {
  for (const int name : {TESSERA_OUT, TESSERA_LSE, TESSERA_MAX_SCORE, TESSERA_DQ, TESSERA_DK, TESSERA_DV}) {
    if (!core::has(run.p, name) || !core::is_output(core::role(run.p, name))) continue;
    const bool of_keys = name == TESSERA_DK || name == TESSERA_DV;
    const auto rows_of = [&](const Sequence& s) { return of_keys ? s.k : s.q; };
    parallel_for(run.plan.threads, run.p.batch,
                 [&](Index b, int) { clear_rows(run, name, rows_of(core::sequence(run.p, run.bound, b))); });
    clear_rows(run, name, of_keys ? core::tail_k(run.p, run.bound) : core::tail_q(run.p, run.bound));
  }
}

// What a cache stores is rounded once: rotated or divided in single precision, a number near the middle of two e4m3
// numbers would now and then become the wrong one, which attention sees.
bool computes_in_f64(const Problem& p) {
  return p.cache.rotary_dim > 0 || core::has(p, TESSERA_K_SCALE) || core::has(p, TESSERA_V_SCALE);
}

// f(sequence, i) summed in float64 over the used rows of `batches`.
template <class F>
double sum_rows(const Run& run, Range batches, F&& f) {
  double total = 0;
  for (Index b = batches.begin; b < batches.end; ++b) {
    const Sequence s = core::sequence(run.p, run.bound, b);
    for (Index i = 0; i < s.q.used; ++i) total += f(s, i);
  }
  return total;
}

void reduce_head(const Run& run, Index h) {
  const Task& t = run.task;
  const auto number = [&](int name, Index b, Index row, Index head) {
    const Operand& o = t.operand(name);
    return read<double>(t.data<char>(name) + core::offset_of(o, b, row, head, 0) * bytes_of(o.dtype), o.dtype);
  };
  const auto put = [&](int name, Index b, double total) {
    const Operand& o = t.operand(name);
    write(static_cast<char*>(run.bound.data[name]) + core::offset_of(o, b, 0, h, 0) * bytes_of(o.dtype), o.dtype,
          total);
  };
  if (t.has(TESSERA_DSLOPES)) {
    const Index planes = t.operand(TESSERA_DSLOPES).extent[0];
    for (Index b = 0; b < planes; ++b)
      put(TESSERA_DSLOPES, b,
          sum_rows(run, planes == 1 ? Range{0, run.p.batch} : Range{b, b + 1},
                   [&](const Sequence& s, Index i) { return t.slope_rows[t.row_slot(s, h, i)]; }));
  }
  if (t.has(TESSERA_DSINKS))
    put(TESSERA_DSINKS, 0, sum_rows(run, {0, run.p.batch}, [&](const Sequence& s, Index i) {
          const double lse = number(TESSERA_LSE, s.q.plane, s.q.first + i, h), sink = number(TESSERA_SINKS, 0, 0, h);
          if (lse == -std::numeric_limits<double>::infinity()) return 0.0;
          const double dlse = t.has(TESSERA_DLSE) ? number(TESSERA_DLSE, s.q.plane, s.q.first + i, h) : 0;
          return (dlse - t.delta_f64[t.row_slot(s, h, i)]) *
                 rules::weight(sink, lse, [](double x) { return std::exp(x); });
        }));
}

}  // namespace

bool splits(const core::Plan& plan) {
  const auto is_states = [](const core::Region& r) { return r.name == "states"; };
  return std::any_of(plan.regions.begin(), plan.regions.end(), is_states);
}
bool bias_in_f64(const Problem& p) {
  constexpr Index few = 4096;  // with more, the largest error of many is no longer luck
  return core::has(p, TESSERA_DBIAS) && core::elements(core::operand(p, TESSERA_DBIAS)) < few;
}
bool sums_in_f64(const Problem& p) {
  return bias_in_f64(p) || core::has(p, TESSERA_DSLOPES) || core::has(p, TESSERA_DSINKS);
}

void run(const core::Plan& plan, const Bindings& bound, const Bodies& bodies) {
  const Problem& p = plan.problem;
  Run run = {.plan = plan,
             .p = p,
             .bound = bound,
             .task = {p, bound, plan.tile_rows, plan.tile_keys},
             .workspace = static_cast<std::byte*>(bound.workspace),
             .rows = {},
             .keys = {},
             .chunks = {},
             .tokens = {},
             .scratch_bytes = 0};
  Index* next = reinterpret_cast<Index*>(run.region("schedule"));
  for (Items* items : {&run.rows, &run.keys, &run.chunks, &run.tokens})
    items->before = std::exchange(next, next + p.batch + 1);
  for (const core::Region& r : plan.regions)
    if (r.name == "tiles") run.scratch_bytes = r.bytes / plan.threads;
  if (splits(plan)) run.task.states = run.region("states");
  core::check_targets(p, bound, reinterpret_cast<int64_t*>(run.region("targets")));
  schedule(run);
  const bool f64 = core::accumulation_dtype(p) == TESSERA_F64;
  const Body& body = f64 ? bodies.f64 : bodies.f32;
  if (core::appends(p)) over_new_tokens(run, (computes_in_f64(p) ? bodies.f64 : body).append);
  if (p.pass == TESSERA_APPEND) return;
  clear_unused(run);
  if (p.pass == TESSERA_FORWARD) {
    if (!run.task.states) return over_rows(run, body.attend);
    over_chunks(run, body.attend_chunk);
    return over_rows(run, body.combine);
  }

  run.task.delta_f32 = reinterpret_cast<float*>(run.region("delta_f32"));
  run.task.delta_f64 = reinterpret_cast<double*>(run.region("delta_f64"));
  run.task.slope_rows = reinterpret_cast<double*>(run.region("slope_rows"));
  over_rows(run, body.deltas);
  if (!f64 && sums_in_f64(p)) over_rows(run, bodies.f64.deltas);
  if (core::has(p, TESSERA_DK) || core::has(p, TESSERA_DV)) over_keys(run, body.gradients_of_keys);
  if (core::has(p, TESSERA_DQ)) over_rows(run, body.gradients_of_rows);
  if (core::has(p, TESSERA_DSLOPES)) over_rows(run, bodies.f64.gradients_of_slopes);
  if (core::has(p, TESSERA_DBIAS)) over_bias(run, (bias_in_f64(p) ? bodies.f64 : body).gradients_of_bias);
  if (!core::has(p, TESSERA_DSLOPES) && !core::has(p, TESSERA_DSINKS)) return;
  parallel_for(plan.threads, p.heads_q, [&](Index h, int) { reduce_head(run, h); });
}

}  // namespace tessera::cpu
