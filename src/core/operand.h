// The operands of a problem: one row each, with all that check, files and engines need to know about them.
#pragma once
#include <array>
#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::core {

using Problem = tessera_problem;
using Operand = tessera_operand;

// What one dimension's extent must be.
enum class Axis : unsigned char {
  one,
  batch,
  batch_plus_1,
  rows_q,
  rows_k,
  rows_new,
  heads_q,
  heads_kv,
  dim,
  dim_v,
  store_planes,  // of k and v: a batch, rows of a cache, pages
  store_rows,    // of k and v: rows, slots of a cache row or of a page
  table_rows,
  table_columns,
  positions,
  half_rotary
};
// What its dtype must be.
enum class Kind : unsigned char {
  data,
  like_q,
  stored,  // as q, or e4m3
  result,
  accumulation,
  angle,  // as q, or f32
  any_float,
  boolean,
  i32,
  as_partner
};
enum class Role : unsigned char { none, input, needed_input, output, needed_output, update };

struct OperandRow {
  tessera_name name;
  const char* text;
  std::array<Axis, 4> axes;
  bool broadcasts;  // an extent may be 1 instead
  Kind kind;
  std::array<Role, 3> roles;  // by tessera_pass
  tessera_name partner;       // a gradient's operand; itself otherwise
};

const OperandRow& operand_row(int name);

inline const Operand& operand(const Problem& p, int name) {
  return p.operand[name];
}
inline bool has(const Problem& p, int name) {
  return p.operand[name].dtype != TESSERA_ABSENT;
}

inline bool packed_q(const Problem& p) {
  return has(p, TESSERA_CU_SEQLENS_Q);
}
inline bool packed_k(const Problem& p) {
  return has(p, TESSERA_CU_SEQLENS_K);
}
inline bool packed_new(const Problem& p) {
  return has(p, TESSERA_CU_SEQLENS_NEW);
}
inline bool packed(const Problem& p, Axis axis) {
  return (axis == Axis::rows_q && packed_q(p)) || (axis == Axis::rows_k && packed_k(p)) ||
         (axis == Axis::rows_new && packed_new(p));
}
inline bool appends(const Problem& p) {
  return has(p, TESSERA_K_NEW);
}
// Slots that one sequence has in a cache, and rows of a cache (of a page table).
inline int64_t slots_of(const Problem& p) {
  return p.cache.slots ? p.cache.slots : p.len_k;
}
inline int64_t cache_rows(const Problem& p) {
  return p.cache.rows ? p.cache.rows : p.batch;
}
inline int64_t new_tokens(const Problem& p) {  // of all sequences, at most
  return packed_new(p) ? p.rows_new : p.batch * p.len_new;
}
// Are k and v a cache, rather than tensors of this call's keys alone?
bool is_cache(const Problem& p);

Role role(const Problem& p, int name);
inline bool is_output(Role r) {
  return r == Role::output || r == Role::needed_output;
}
inline bool is_written(Role r) {
  return is_output(r) || r == Role::update;
}

inline int64_t group(const Problem& p) {
  return p.heads_q / p.heads_kv;
}
inline int32_t data_dtype(const Problem& p) {
  return p.operand[p.pass == TESSERA_APPEND ? TESSERA_K_NEW : TESSERA_Q].dtype;
}
inline int32_t accumulation_dtype(const Problem& p) {
  return data_dtype(p) == TESSERA_F64 ? TESSERA_F64 : TESSERA_F32;
}

// The full extent of dimension `d` of an operand in this problem: (1, rows, H, D) if packed.
int64_t full_extent(const Problem& p, const OperandRow& row, int d);

// Elements from the first to the last, both included; 0 if empty.
int64_t span(const Operand& o);
int64_t elements(const Operand& o);
int64_t dtype_bytes(int32_t dtype);

// Element (a, b, c, d) of an operand; a dimension of extent 1 broadcasts, so its stride is not read.
inline int64_t offset_of(const Operand& o, int64_t a, int64_t b, int64_t c, int64_t d) {
  const auto step = [&](int i) { return o.extent[i] == 1 ? 0 : o.stride[i]; };
  return a * step(0) + b * step(1) + c * step(2) + d * step(3);
}

// Dense strides in the given layout; the whole operand for names that layouts do not touch.
void declare(Problem& p, int name, int32_t dtype, int32_t layout);
void declare_all(Problem& p, int32_t dtype, int32_t layout);
// Declares a broadcastable operand (bias, keep) with the given extents, dense.
void declare_extents(Problem& p, int name, int32_t dtype, const std::array<int64_t, 4>& extent);

}  // namespace tessera::core
