#include "cuda/params.h"

#include <algorithm>
#include <cmath>

namespace tessera::cuda {
namespace {

using core::Operand;
using core::Problem;
using rules::GeneralParams;
using rules::Stored;
using rules::View;

static_assert(rules::unsound_length == TESSERA_STATUS_LENGTH && rules::unsound_capacity == TESSERA_STATUS_CAPACITY &&
              rules::unsound_page == TESSERA_STATUS_PAGE && rules::unsound_position == TESSERA_STATUS_POSITION &&
              rules::unsound_target == TESSERA_STATUS_TARGET);
static_assert(static_cast<int>(Stored::e4m3) == TESSERA_E4M3 && static_cast<int>(Stored::f64) == TESSERA_F64);
static_assert(sizeof(GeneralParams) <= 4096, "a launch's parameters");

struct Filler {
  const core::Plan& plan;
  const core::Bindings& bound;
  const Problem& p = plan.problem;

  bool has(int name) const { return core::has(p, name); }
  View view(int name) const {
    if (!has(name)) return {};
    const Operand& o = core::operand(p, name);
    View v = {bound.data[name], {}, static_cast<Stored>(o.dtype), false};
    const int64_t bytes = core::dtype_bytes(o.dtype);
    bool whole = reinterpret_cast<uintptr_t>(v.data) % 16 == 0 && o.extent[3] * bytes % 16 == 0;
    for (int d = 0; d < 4; ++d) {
      v.step[d] = o.extent[d] > 1 ? o.stride[d] : 0;
      whole = whole && (d == 3 ? o.extent[3] == 1 || o.stride[3] == 1 : v.step[d] * bytes % 16 == 0);
    }
    v.whole_chunks = whole;
    return v;
  }
  GeneralParams params() const {
    GeneralParams g = {};
    if (p.pass != TESSERA_APPEND) g.q = view(TESSERA_Q);
    g.k = view(TESSERA_K);
    g.v = view(TESSERA_V);
    g.out = view(TESSERA_OUT);
    g.lse = view(TESSERA_LSE);
    g.max_score = view(TESSERA_MAX_SCORE);
    g.dout = view(TESSERA_DOUT);
    g.dlse = view(TESSERA_DLSE);
    g.dq = view(TESSERA_DQ);
    g.dk = view(TESSERA_DK);
    g.dv = view(TESSERA_DV);
    g.bias = view(TESSERA_BIAS);
    g.keep = view(TESSERA_KEEP);
    g.exclude_keys = view(TESSERA_EXCLUDE_KEYS);
    g.documents_q = view(TESSERA_DOCUMENTS_Q);
    g.documents_k = view(TESSERA_DOCUMENTS_K);
    g.slopes = view(TESSERA_SLOPES);
    g.sinks = view(TESSERA_SINKS);
    g.dbias = view(TESSERA_DBIAS);
    g.dslopes = view(TESSERA_DSLOPES);
    g.dsinks = view(TESSERA_DSINKS);
    g.k_new = view(TESSERA_K_NEW);
    g.v_new = view(TESSERA_V_NEW);
    g.k_scale = view(TESSERA_K_SCALE);
    g.v_scale = view(TESSERA_V_SCALE);
    if (has(TESSERA_DBIAS))
      for (int d = 0; d < 4; ++d) g.bias_extent[d] = static_cast<int>(core::operand(p, TESSERA_DBIAS).extent[d]);
    g.slopes_by_batch = core::operand(p, TESSERA_DSLOPES).extent[0] != 1;
    g.queries = query_lengths(p, bound);
    g.keys = key_lengths(p, bound);
    g.fresh = fresh_lengths(p, bound);
    g.cache = cache_params(p, bound);
    g.rotary = {view(TESSERA_COS), view(TESSERA_SIN), static_cast<int>(p.cache.rotary_dim / 2),
                static_cast<int>(core::operand(p, TESSERA_COS).extent[1]), p.cache.rotary_interleaved != 0};
    g.status = data_of<int>(p, bound, TESSERA_STATUS);
    const CornerParams corner = corner_params(p, bound);
    g.corner = corner.corner;
    g.corner_offsets = corner.offsets;
    g.band = corner.band;
    g.hulls_have_gaps = rules::hulls_have_gaps(g.band);
    g.plain_keys = !g.exclude_keys.present() && !p.cache.page_size && !p.cache.ring && !g.hulls_have_gaps &&
                   !g.k_scale.present() && !g.v_scale.present();
    g.drops = p.dropout != 0;
    g.dropout = rules::make_dropout(p.dropout, bound.seed, bound.offset, 0);
    g.keep_scale = static_cast<float>(1 / (1 - p.dropout));
    g.scale = static_cast<float>(scale_of(p));
    // A row's largest product is its largest score only if the scale is above 0 and nothing comes after it.
    const bool options =
        p.softcap != 0 || g.slopes.present() || g.bias.present() || g.keep.present() || g.documents_q.present();
    g.score_unit = g.scale > 0 && !options ? g.scale : 1;
    g.softcap = static_cast<float>(p.softcap);
    g.inverse_softcap = p.softcap != 0 ? static_cast<float>(1 / p.softcap) : 0;
    g.batch = static_cast<int>(p.batch);
    g.heads = static_cast<int>(p.heads_q);
    g.heads_kv = static_cast<int>(p.heads_kv);
    g.group = static_cast<int>(core::group(p));
    g.dim = static_cast<int>(p.dim);
    g.dim_v = static_cast<int>(p.dim_v);
    g.partials = region_of<float>(plan, bound, "partials");
    g.row_lse = region_of<float>(plan, bound, "row_lse");
    g.row_term = region_of<float>(plan, bound, "row_term");
    g.row_slope = region_of<float>(plan, bound, "row_slope");
    return g;
  }
};

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

}  // namespace

rules::GeneralParams general_params(const core::Plan& plan, const core::Bindings& bound) {
  return Filler{plan, bound}.params();
}

rules::CacheParams cache_params(const Problem& p, const core::Bindings& bound) {
  const Operand& table = core::operand(p, TESSERA_PAGE_TABLE);
  return {.lens = data_of<const int>(p, bound, TESSERA_CACHE_LENS),
          .rows = data_of<const int>(p, bound, TESSERA_CACHE_BATCH_IDX),
          .left_pad = data_of<const int>(p, bound, TESSERA_LEFT_PAD),
          .table = data_of<const int>(p, bound, TESSERA_PAGE_TABLE),
          .table_row = table.extent[0] > 1 ? table.stride[0] : 0,
          .table_step = table.extent[1] > 1 ? table.stride[1] : 0,
          .lens_step = core::operand(p, TESSERA_CACHE_LENS).extent[0] > 1 ? 1 : 0,
          .page = static_cast<int>(p.cache.page_size),
          .pages = static_cast<int>(p.cache.pages),
          .most_rows = static_cast<int>(core::cache_rows(p)),
          .slots = static_cast<int>(core::slots_of(p)),
          .is_cache = core::is_cache(p),
          .ring = p.cache.ring != 0,
          .v_in_k = p.cache.v_in_k != 0};
}
rules::DeviceLengths fresh_lengths(const Problem& p, const core::Bindings& bound) {
  return {data_of<const int>(p, bound, TESSERA_CU_SEQLENS_NEW), data_of<const int>(p, bound, TESSERA_SEQUSED_NEW),
          p.rows_new, static_cast<int>(p.len_new)};
}

bool has_pairs(const Problem& p) {
  return core::has(p, TESSERA_BIAS) || core::has(p, TESSERA_KEEP);
}
rules::Float float_of(const Problem& p) {
  return core::data_dtype(p) == TESSERA_BF16 ? rules::Float::bf16 : rules::Float::f16;
}
rules::ForwardParams forward_params(const core::Plan& plan, const core::Bindings& bound) {
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

rules::Steps steps_of(const Problem& p, int name) {
  const Operand& o = core::operand(p, name);
  const auto step = [&](int d) { return o.extent[d] > 1 ? o.stride[d] : 0; };
  return {step(0), step(1), step(2)};
}

rules::DeviceLengths query_lengths(const Problem& p, const core::Bindings& bound) {
  return {data_of<const int>(p, bound, TESSERA_CU_SEQLENS_Q), data_of<const int>(p, bound, TESSERA_SEQUSED_Q), p.rows_q,
          static_cast<int>(p.len_q)};
}
rules::DeviceLengths key_lengths(const Problem& p, const core::Bindings& bound) {
  return {data_of<const int>(p, bound, TESSERA_CU_SEQLENS_K), data_of<const int>(p, bound, TESSERA_SEQUSED_K), p.rows_k,
          static_cast<int>(p.len_k)};
}

CornerParams corner_params(const Problem& p, const core::Bindings& bound) {
  const bool at = p.mask.corner == TESSERA_CORNER_AT, per_sequence = at && core::has(p, TESSERA_CORNER_OFFSETS);
  return {per_sequence                            ? rules::Corner::per_sequence
          : p.mask.corner == TESSERA_BOTTOM_RIGHT ? rules::Corner::bottom_right
                                                  : rules::Corner::fixed,
          per_sequence ? data_of<const int>(p, bound, TESSERA_CORNER_OFFSETS) : nullptr,
          core::band_mask(p, 0, at ? p.mask.corner_at : 0)};
}

double scale_of(const Problem& p) {
  return p.has_scale ? p.scale : 1 / std::sqrt(static_cast<double>(p.dim));
}

}  // namespace tessera::cuda
