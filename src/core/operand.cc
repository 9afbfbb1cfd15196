#include "core/operand.h"

#include <algorithm>

#include "core/error.h"
#include "rules/dtype.h"

namespace tessera::core {
namespace {

using A = Axis;
using R = Role;

constexpr std::array<A, 4> q_shape = {A::batch, A::rows_q, A::heads_q, A::dim};
constexpr std::array<A, 4> k_shape = {A::store_planes, A::store_rows, A::heads_kv, A::dim};
constexpr std::array<A, 4> v_shape = {A::store_planes, A::store_rows, A::heads_kv, A::dim_v};
constexpr std::array<A, 4> scale_shape = {A::store_planes, A::store_rows, A::heads_kv, A::one};
constexpr std::array<A, 4> k_new_shape = {A::batch, A::rows_new, A::heads_kv, A::dim};
constexpr std::array<A, 4> v_new_shape = {A::batch, A::rows_new, A::heads_kv, A::dim_v};
constexpr std::array<A, 4> out_shape = {A::batch, A::rows_q, A::heads_q, A::dim_v};
constexpr std::array<A, 4> row_shape = {A::batch, A::rows_q, A::heads_q, A::one};
constexpr std::array<A, 4> grid_shape = {A::batch, A::heads_q, A::rows_q, A::rows_k};
constexpr std::array<A, 4> tokens_q = {A::batch, A::rows_q, A::one, A::one};
constexpr std::array<A, 4> tokens_k = {A::batch, A::rows_k, A::one, A::one};
constexpr std::array<A, 4> head_shape = {A::batch, A::one, A::heads_q, A::one};
constexpr std::array<A, 4> sink_shape = {A::one, A::one, A::heads_q, A::one};
constexpr std::array<A, 4> ends_shape = {A::batch_plus_1, A::one, A::one, A::one};
constexpr std::array<A, 4> batch_shape = {A::batch, A::one, A::one, A::one};
constexpr std::array<A, 4> table_shape = {A::table_rows, A::table_columns, A::one, A::one};
constexpr std::array<A, 4> angle_shape = {A::one, A::positions, A::one, A::half_rotary};
constexpr std::array<A, 4> word_shape = {A::one, A::one, A::one, A::one};

using Roles = std::array<R, 3>;  // forward, backward, append
constexpr Roles attended = {R::needed_input, R::needed_input, R::none};
constexpr Roles kept_keys = {R::needed_input, R::needed_input, R::needed_input};  // update where new ones come
constexpr Roles option = {R::input, R::input, R::none};
constexpr Roles cached = {R::input, R::none, R::input};
constexpr Roles new_keys = {R::input, R::none, R::needed_input};
constexpr Roles result = {R::needed_output, R::needed_input, R::none};
constexpr Roles wished_result = {R::output, R::needed_input, R::none};
constexpr Roles forward_result = {R::output, R::none, R::none};
constexpr Roles incoming = {R::none, R::needed_input, R::none};
constexpr Roles wished_incoming = {R::none, R::input, R::none};
constexpr Roles gradient = {R::none, R::output, R::none};
constexpr Roles word = {R::update, R::update, R::update};

// In a grid (bias, keep) and exclude_keys positions count inside a sequence: extents are len_q, len_k even if packed.
constexpr OperandRow rows[] = {
    {TESSERA_Q, "q", q_shape, false, Kind::data, attended, TESSERA_Q},
    {TESSERA_K, "k", k_shape, false, Kind::stored, kept_keys, TESSERA_K},
    {TESSERA_V, "v", v_shape, false, Kind::stored, kept_keys, TESSERA_V},
    {TESSERA_BIAS, "bias", grid_shape, true, Kind::any_float, option, TESSERA_BIAS},
    {TESSERA_KEEP, "keep", grid_shape, true, Kind::boolean, option, TESSERA_KEEP},
    {TESSERA_EXCLUDE_KEYS, "exclude_keys", tokens_k, false, Kind::boolean, option, TESSERA_EXCLUDE_KEYS},
    {TESSERA_DOCUMENTS_Q, "documents_q", tokens_q, false, Kind::i32, option, TESSERA_DOCUMENTS_Q},
    {TESSERA_DOCUMENTS_K, "documents_k", tokens_k, false, Kind::i32, option, TESSERA_DOCUMENTS_K},
    {TESSERA_SLOPES, "slopes", head_shape, true, Kind::accumulation, option, TESSERA_SLOPES},
    {TESSERA_SINKS, "sinks", sink_shape, false, Kind::accumulation, option, TESSERA_SINKS},
    {TESSERA_CU_SEQLENS_Q, "cu_seqlens_q", ends_shape, false, Kind::i32, option, TESSERA_CU_SEQLENS_Q},
    {TESSERA_CU_SEQLENS_K, "cu_seqlens_k", ends_shape, false, Kind::i32, option, TESSERA_CU_SEQLENS_K},
    {TESSERA_SEQUSED_Q, "seqused_q", batch_shape, false, Kind::i32, option, TESSERA_SEQUSED_Q},
    {TESSERA_SEQUSED_K, "seqused_k", batch_shape, false, Kind::i32, option, TESSERA_SEQUSED_K},
    {TESSERA_CORNER_OFFSETS, "corner_offsets", batch_shape, false, Kind::i32, option, TESSERA_CORNER_OFFSETS},
    {TESSERA_K_NEW, "k_new", k_new_shape, false, Kind::like_q, new_keys, TESSERA_K_NEW},
    {TESSERA_V_NEW, "v_new", v_new_shape, false, Kind::like_q, cached, TESSERA_V_NEW},
    {TESSERA_CU_SEQLENS_NEW, "cu_seqlens_new", ends_shape, false, Kind::i32, cached, TESSERA_CU_SEQLENS_NEW},
    {TESSERA_SEQUSED_NEW, "seqused_new", batch_shape, false, Kind::i32, cached, TESSERA_SEQUSED_NEW},
    {TESSERA_CACHE_LENS, "cache_lens", batch_shape, true, Kind::i32, cached, TESSERA_CACHE_LENS},
    {TESSERA_CACHE_BATCH_IDX, "cache_batch_idx", batch_shape, false, Kind::i32, cached, TESSERA_CACHE_BATCH_IDX},
    {TESSERA_LEFT_PAD, "left_pad", batch_shape, false, Kind::i32, cached, TESSERA_LEFT_PAD},
    {TESSERA_PAGE_TABLE, "page_table", table_shape, false, Kind::i32, cached, TESSERA_PAGE_TABLE},
    {TESSERA_COS, "cos", angle_shape, false, Kind::angle, cached, TESSERA_COS},
    {TESSERA_SIN, "sin", angle_shape, false, Kind::angle, cached, TESSERA_SIN},
    {TESSERA_K_SCALE, "k_scale", scale_shape, true, Kind::accumulation, cached, TESSERA_K_SCALE},
    {TESSERA_V_SCALE, "v_scale", scale_shape, true, Kind::accumulation, cached, TESSERA_V_SCALE},
    {TESSERA_STATUS, "status", word_shape, false, Kind::i32, word, TESSERA_STATUS},
    {TESSERA_OUT, "out", out_shape, false, Kind::result, result, TESSERA_OUT},
    {TESSERA_LSE, "lse", row_shape, false, Kind::accumulation, wished_result, TESSERA_LSE},
    {TESSERA_MAX_SCORE, "max_score", row_shape, false, Kind::accumulation, forward_result, TESSERA_MAX_SCORE},
    {TESSERA_DOUT, "dout", out_shape, false, Kind::as_partner, incoming, TESSERA_OUT},
    {TESSERA_DLSE, "dlse", row_shape, false, Kind::accumulation, wished_incoming, TESSERA_LSE},
    {TESSERA_DQ, "dq", q_shape, false, Kind::as_partner, gradient, TESSERA_Q},
    {TESSERA_DK, "dk", k_shape, false, Kind::as_partner, gradient, TESSERA_K},
    {TESSERA_DV, "dv", v_shape, false, Kind::as_partner, gradient, TESSERA_V},
    {TESSERA_DBIAS, "dbias", grid_shape, true, Kind::as_partner, gradient, TESSERA_BIAS},
    {TESSERA_DSLOPES, "dslopes", head_shape, true, Kind::as_partner, gradient, TESSERA_SLOPES},
    {TESSERA_DSINKS, "dsinks", sink_shape, false, Kind::as_partner, gradient, TESSERA_SINKS},
};

constexpr bool rows_stand_at_their_names() {
  int at = 0;
  for (const OperandRow& row : rows)
    if (row.name != at++) return false;
  return at == TESSERA_NAMES;
}
static_assert(rows_stand_at_their_names());

bool counts_inside_a_sequence(const OperandRow& row) {
  return row.axes == grid_shape || row.partner == TESSERA_EXCLUDE_KEYS;
}

// Sizes may be anything; a product that does not fit becomes the largest number, which check refuses as a stride.
int64_t times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}
int64_t at_most_half(int64_t n) {
  return n < INT64_MAX / 2 ? n : INT64_MAX / 2;
}  // two add up

void dense(Operand& o, std::array<int, 4> order) {  // order: slowest dimension first
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    const auto d = static_cast<size_t>(order[static_cast<size_t>(i)]);
    o.stride[d] = stride;
    stride = times(stride, o.extent[d] > 0 ? o.extent[d] : 1);
  }
}

}  // namespace

const OperandRow& operand_row(int name) {
  return rows[name];
}

bool is_cache(const Problem& p) {
  const tessera_cache& c = p.cache;
  if (c.page_size || c.rows || c.slots || c.ring) return true;
  constexpr int signs[] = {TESSERA_K_NEW, TESSERA_CACHE_LENS, TESSERA_CACHE_BATCH_IDX, TESSERA_LEFT_PAD,
                           TESSERA_PAGE_TABLE};
  return std::any_of(std::begin(signs), std::end(signs), [&](int name) { return has(p, name); });
}

Role role(const Problem& p, int name) {
  const Role r = operand_row(name).roles[static_cast<size_t>(p.pass)];
  const bool grows = appends(p) && (name == TESSERA_K || (name == TESSERA_V && !p.cache.v_in_k));
  return grows && r == Role::needed_input ? Role::update : r;
}

int64_t full_extent(const Problem& p, const OperandRow& row, int d) {
  const Axis axis = row.axes[static_cast<size_t>(d)];
  const tessera_cache& cache = p.cache;
  const bool by_row = !counts_inside_a_sequence(row);
  switch (axis) {
    case A::one:
      return 1;
    case A::batch: {
      const bool folded = by_row && (packed(p, row.axes[1]));
      return folded ? 1 : p.batch;
    }
    case A::batch_plus_1:
      return p.batch + 1;
    case A::rows_q:
      return by_row && packed_q(p) ? p.rows_q : p.len_q;
    case A::rows_k:
      return by_row && packed_k(p) ? p.rows_k : p.len_k;
    case A::rows_new:
      return packed_new(p) ? p.rows_new : p.len_new;
    case A::store_planes:
      if (!is_cache(p)) return packed_k(p) ? 1 : p.batch;
      return cache.page_size ? cache.pages : cache_rows(p);
    case A::store_rows:
      if (!is_cache(p)) return packed_k(p) ? p.rows_k : p.len_k;
      return cache.page_size ? cache.page_size : slots_of(p);
    case A::table_rows:
      return cache_rows(p);
    case A::table_columns:
      return cache.page_size ? rules::ceil_div(slots_of(p), cache.page_size) : 0;
    case A::positions:
      return cache.rotary_positions ? cache.rotary_positions : rules::max(p.len_q, p.len_k);
    case A::half_rotary:
      return cache.rotary_dim / 2;
    case A::heads_q:
      return p.heads_q;
    case A::heads_kv:
      return p.heads_kv;
    case A::dim:
      return p.dim;
    case A::dim_v:
      return p.dim_v;
  }
  return 0;
}

int64_t elements(const Operand& o) {
  return times(times(o.extent[0], o.extent[1]), times(o.extent[2], o.extent[3]));
}

int64_t span(const Operand& o) {
  int64_t last = 0;
  for (int d = 0; d < 4; ++d) {
    if (o.extent[d] == 0) return 0;
    if (o.extent[d] > 1) last += (o.extent[d] - 1) * o.stride[d];
  }
  return last + 1;
}

int64_t dtype_bytes(int32_t dtype) {
  return rules::dtype_rows[dtype].bytes;
}

void declare(Problem& p, int name, int32_t dtype, int32_t layout) {
  const OperandRow& row = operand_row(name);
  Operand& o = p.operand[name];
  o.dtype = dtype;
  for (int d = 0; d < 4; ++d) o.extent[d] = full_extent(p, row, d);
  const bool is_tokens = row.axes[1] == A::rows_q || row.axes[1] == A::rows_k || row.axes[1] == A::rows_new ||
                         row.axes[1] == A::store_rows;
  const bool bhsd = is_tokens && (layout == TESSERA_BHSD || row.axes == row_shape);  // lse is (B, H, S) in every layout
  dense(o, bhsd ? std::array{0, 2, 1, 3} : std::array{0, 1, 2, 3});
  if (name == TESSERA_V && p.cache.v_in_k && has(p, TESSERA_K)) std::copy_n(p.operand[TESSERA_K].stride, 4, o.stride);
  const bool joint_q = layout == TESSERA_QKV && name == TESSERA_Q;
  const bool joint_kv = (layout == TESSERA_QKV || layout == TESSERA_KV) && (name == TESSERA_K || name == TESSERA_V);
  if (joint_q || joint_kv) {
    const int64_t kv = at_most_half(times(p.heads_kv, p.dim + p.dim_v));
    o.stride[1] = layout == TESSERA_QKV ? at_most_half(times(p.heads_q, p.dim)) + kv : kv;
    o.stride[0] = times(o.stride[1], o.extent[1] > 0 ? o.extent[1] : 1);
  }
}

void declare_extents(Problem& p, int name, int32_t dtype, const std::array<int64_t, 4>& extent) {
  Operand& o = p.operand[name];
  o.dtype = dtype;
  for (size_t d = 0; d < 4; ++d) o.extent[d] = extent[d];
  dense(o, {0, 1, 2, 3});
}

void declare_all(Problem& p, int32_t dtype, int32_t layout) {
  if (p.pass == TESSERA_APPEND) {
    for (const int name : {TESSERA_K, TESSERA_V, TESSERA_K_NEW}) declare(p, name, dtype, layout);
    if (!p.cache.v_in_k) declare(p, TESSERA_V_NEW, dtype, layout);
    return;
  }
  const int32_t accumulation = dtype == TESSERA_F64 ? TESSERA_F64 : TESSERA_F32;
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_OUT}) declare(p, name, dtype, layout);
  declare(p, TESSERA_LSE, accumulation, layout);
  if (p.pass == TESSERA_BACKWARD)
    for (const int name : {TESSERA_DOUT, TESSERA_DQ, TESSERA_DK, TESSERA_DV}) declare(p, name, dtype, layout);
}

}  // namespace tessera::core
