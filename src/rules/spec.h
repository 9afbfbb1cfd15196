// What a GPU kernel is compiled for. A spec is a template argument of its kernel; nothing else may influence the code.
// Only independent choices are fields; what follows from them is computed. One `visit_fields` serves the key, the words
// and the source, and does not compile if it forgets a field.
#pragma once
#include "rules/base.h"

namespace tessera::rules {

enum class Float : int { bf16, f16 };  // of q, k and v

struct ForwardSpec {
  Float dtype;
  int dim;        // D = Dv
  int tile_rows;  // of a block
  int tile_keys;  // of a step
  int warps;      // of a block; each has tile_rows / warps rows, a multiple of 16
  int stages;     // tiles of K and V in shared memory
  int pairs;      // 1: a bias of q's dtype or a keep mask, or both, may be there

  bool operator==(const ForwardSpec&) const = default;
};

// f("name", field) for each field in order. The first line counts them: one more, and it no longer compiles.
template <class F>
TESSERA_RULE void visit_fields(ForwardSpec& spec, F&& f) {
  auto& [dtype, dim, tile_rows, tile_keys, warps, stages, pairs] = spec;
  f("dtype", dtype);
  f("dim", dim);
  f("tile_rows", tile_rows);
  f("tile_keys", tile_keys);
  f("warps", warps);
  f("stages", stages);
  f("pairs", pairs);
}

TESSERA_RULE int threads(const ForwardSpec& s) {
  return 32 * s.warps;
}
TESSERA_RULE int shared_bytes(
    const ForwardSpec& s) {  // q, the stages of k and v, what a row keeps and its reference, the job
  return s.dim * 2 * (s.tile_rows + 2 * s.stages * s.tile_keys) + 20 * s.tile_rows + 256;
}
TESSERA_RULE int blocks_at_once(const ForwardSpec& s) {  // on a multiprocessor; bounds the registers
  return s.dim > 128 && s.warps > 4 ? 1 : s.dim <= 64 && s.tile_keys <= 64 ? 3 : 2;
}

// Can such a kernel be compiled at all, and is it right? Warps own blocks of 16 rows; all threads copy 4 rows, or 8 or
// a multiple, at once; keys are masked 32 at a time. Biases wait in registers, which only 16 rows a warp leave free.
TESSERA_RULE bool legal(const ForwardSpec& s) {
  if ((s.dim != 64 && s.dim != 128 && s.dim != 256) || s.warps <= 0 || s.warps > 16 || s.stages < 2 || s.stages > 8)
    return false;
  if (s.tile_rows <= 0 || s.tile_rows > 512 || s.tile_keys <= 0 || s.tile_keys > 256) return false;
  const int rows_at_once = 32 * s.warps * 8 / s.dim;
  if (s.pairs != 0 && (s.pairs != 1 || s.tile_rows != 16 * s.warps)) return false;
  return s.tile_rows % (16 * s.warps) == 0 && s.tile_keys % 32 == 0 &&
         (32 * s.warps % s.dim == 0 || rows_at_once == 4) && s.tile_rows % rows_at_once == 0 &&
         s.tile_keys % rows_at_once == 0;
}

// Hopper's forward kernel: a warpgroup that copies, and `groups` that attend, each 64 query rows.
struct Sm90ForwardSpec {
  Float dtype;
  int dim, dim_v;  // of a row in registers, multiples of 16; an operand's may be smaller
  int groups;
  int tile_keys;  // of a step
  int stages;     // tiles of K, and as many of V, in shared memory
  int q_stages;   // and tiles of q: 2, and the next item's is there before this one's ends
  int turns;      // 1: groups take turns at the tensor cores
  int pairs;      // 1: whatever pairs have: softcap, slopes, bias, keep, excluded keys, documents, dropout
  int parts;      // 1: k and v may lie in pages, and an item's keys may be split among blocks

  bool operator==(const Sm90ForwardSpec&) const = default;
};
template <class F>
TESSERA_RULE void visit_fields(Sm90ForwardSpec& spec, F&& f) {
  auto& [dtype, dim, dim_v, groups, tile_keys, stages, q_stages, turns, pairs, parts] = spec;
  f("dtype", dtype);
  f("dim", dim);
  f("dim_v", dim_v);
  f("groups", groups);
  f("tile_keys", tile_keys);
  f("stages", stages);
  f("q_stages", q_stages);
  f("turns", turns);
  f("pairs", pairs);
  f("parts", parts);
}
TESSERA_RULE int threads(const Sm90ForwardSpec& s) {
  return 128 * (s.groups + 1);
}
TESSERA_RULE int tile_rows(const Sm90ForwardSpec& s) {
  return 64 * s.groups;
}
TESSERA_RULE int slabs_of(int dim) {  // of 64 columns, 128 bytes a row, as the copy engine writes them
  return (dim + 63) / 64;
}
// A tile of bias takes two bytes a pair, one of keep a byte. There is room for two tiles of bias, one of both, four of
// keep.
TESSERA_RULE int pair_bytes(const Sm90ForwardSpec& s) {
  return s.pairs ? 4 * tile_rows(s) * s.tile_keys : 0;
}
TESSERA_RULE int pair_bytes_of_tile(const Sm90ForwardSpec& s, bool bias, bool keep) {
  return ((bias ? 2 : 0) + (keep ? 1 : 0)) * tile_rows(s) * s.tile_keys;
}
inline constexpr int most_pair_slots = 4;
inline constexpr int page_slots = 4;  // tiles whose pages are known
TESSERA_RULE int page_bytes(const Sm90ForwardSpec& s) {
  return s.parts ? page_slots * 4 * s.tile_keys : 0;
}
TESSERA_RULE int shared_bytes(const Sm90ForwardSpec& s) {  // q, k, v; pairs; pages; jobs and barriers
  const int q = 128 * slabs_of(s.dim) * tile_rows(s), k = 128 * slabs_of(s.dim) * s.tile_keys;
  return s.q_stages * q + s.stages * (k + 128 * slabs_of(s.dim_v) * s.tile_keys) + pair_bytes(s) + page_bytes(s) + 1024;
}
TESSERA_RULE bool has_products(int columns) {  // of a warpgroup, in device/ptx/sm90.h; a row is a line more
  return columns == 64 || columns == 80 || columns == 96 || columns == 112 || columns == 128 || columns == 160 || columns == 192 ||
         columns == 256;
}
TESSERA_RULE bool legal(const Sm90ForwardSpec& s) {
  return s.dim >= 16 && s.dim <= 256 && s.dim % 16 == 0 && has_products(s.dim_v) && has_products(s.tile_keys) &&
         (s.groups == 2 || s.groups == 3) && s.stages >= 1 && s.stages <= 8 && (s.q_stages == 1 || s.q_stages == 2) &&
         (s.turns == 0 || (s.turns == 1 && s.groups == 2)) &&
         (s.pairs == 0 || (s.pairs == 1 && s.groups == 2 && (s.tile_keys == 64 || s.tile_keys == 128))) &&
         (s.parts == 0 || s.parts == 1);
}

// The portable backward kernel, and what goes before and after it.
enum class BackwardPart : int { attend, prepare, convert };

struct BackwardSpec {
  BackwardPart part;
  Float dtype;
  int dim;        // D = Dv
  int tile_keys;  // of a block
  int tile_rows;  // queries of a step
  int warps;      // of a block; each has tile_keys / warps keys, a multiple of 16

  bool operator==(const BackwardSpec&) const = default;
};
template <class F>
TESSERA_RULE void visit_fields(BackwardSpec& spec, F&& f) {
  auto& [part, dtype, dim, tile_keys, tile_rows, warps] = spec;
  f("part", part);
  f("dtype", dtype);
  f("dim", dim);
  f("tile_keys", tile_keys);
  f("tile_rows", tile_rows);
  f("warps", warps);
}
TESSERA_RULE int threads(const BackwardSpec& s) {
  return 32 * s.warps;
}
TESSERA_RULE int shared_bytes(const BackwardSpec& s) {  // k, v, two stages of q, dO and dS, what a row and a key have
  if (s.part != BackwardPart::attend) return 0;
  return 2 * (s.dim * (2 * s.tile_keys + 4 * s.tile_rows) + 2 * s.tile_keys * s.tile_rows) + 16 * s.tile_rows +
         16 * s.tile_keys + 256;
}
TESSERA_RULE int blocks_at_once(const BackwardSpec& s) {
  return s.part != BackwardPart::attend ? 3 : s.warps > 4 ? 1 : 2;
}
TESSERA_RULE bool legal(const BackwardSpec& s) {
  if (s.dim != 64 && s.dim != 128) return false;
  if (s.part != BackwardPart::attend) return s.tile_keys == 0 && s.tile_rows == 0 && s.warps == 4;
  const int rows_at_once = 32 * s.warps * 8 / s.dim;
  return (s.tile_rows == 64 || s.tile_rows == 128) && (s.warps == 4 || s.warps == 8) &&
         s.tile_keys % (16 * s.warps) == 0 && s.tile_keys > 0 && s.tile_keys <= 256 && s.tile_rows % rows_at_once == 0;
}

// The general kernels: dims, options and the number of warps are run-time values, so that a few of them answer all.
enum class Task : int { forward, combine, append, terms, keys, queries, bias, reduce, clear };
enum class Product : int { any, bf16, f16, f32, tf32 };  // any: the task multiplies nothing

struct GeneralSpec {
  Task task;
  Product product;
  int columns;  // of the result that a block sums; wider results are cut into slices
  int width;    // of a step: keys, or where a block owns keys, queries

  bool operator==(const GeneralSpec&) const = default;
};
template <class F>
TESSERA_RULE void visit_fields(GeneralSpec& spec, F&& f) {
  auto& [task, product, columns, width] = spec;
  f("task", task);
  f("product", product);
  f("columns", columns);
  f("width", width);
}

inline constexpr int most_warps = 4;              // of a block; each has 16 rows
inline constexpr int general_blocks_at_once = 2;  // on a multiprocessor; bounds the registers
// Shared memory of a block: a header, what is known of each query at hand, then panels from a multiple of 128 on.
inline constexpr int query_bytes = 64;
inline constexpr int general_header_bytes = 896;
inline constexpr int most_keys_at_hand = 64;
TESSERA_RULE int panels_begin(int queries) {
  return (general_header_bytes + query_bytes * queries + 127) / 128 * 128;
}
TESSERA_RULE int scratch_bytes(int columns) {  // 16 rows of a warp, each 8 numbers longer
  return 16 * (columns + 8) * 4;
}
TESSERA_RULE int number_bytes(Product p) {
  return p == Product::bf16 || p == Product::f16 ? 2 : 4;
}
TESSERA_RULE int least_arch(Product p) {  // bf16 and TF32 came with sm_80
  return p == Product::bf16 || p == Product::tf32 ? 80 : 75;
}
TESSERA_RULE int panel_columns(Product p) {
  return 128 / number_bytes(p);
}
TESSERA_RULE int panels_of(Product p, int dim) {
  return (dim + panel_columns(p) - 1) / panel_columns(p);
}

}  // namespace tessera::rules
