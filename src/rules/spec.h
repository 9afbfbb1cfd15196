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

  bool operator==(const ForwardSpec&) const = default;
};

// f("name", field) for each field in order. The first line counts them: one more, and it no longer compiles.
template <class F>
TESSERA_RULE void visit_fields(ForwardSpec& spec, F&& f) {
  auto& [dtype, dim, tile_rows, tile_keys, warps, stages] = spec;
  f("dtype", dtype);
  f("dim", dim);
  f("tile_rows", tile_rows);
  f("tile_keys", tile_keys);
  f("warps", warps);
  f("stages", stages);
}

TESSERA_RULE int threads(const ForwardSpec& s) {
  return 32 * s.warps;
}
TESSERA_RULE int shared_bytes(
    const ForwardSpec& s) {  // q, the stages of k and v, what a row keeps and its reference, the job
  return s.dim * 2 * (s.tile_rows + 2 * s.stages * s.tile_keys) + 20 * s.tile_rows + 256;
}
TESSERA_RULE int blocks_at_once(const ForwardSpec& s) {  // on a multiprocessor; bounds the registers
  return s.dim <= 64 && s.tile_keys <= 64 ? 3 : 2;
}

// Can such a kernel be compiled at all, and is it right? Warps own blocks of 16 rows; all threads copy 8 rows or a
// multiple at once; keys are masked 32 at a time.
TESSERA_RULE bool legal(const ForwardSpec& s) {
  if ((s.dim != 64 && s.dim != 128) || s.warps <= 0 || s.warps > 16 || s.stages < 2 || s.stages > 8) return false;
  if (s.tile_rows <= 0 || s.tile_rows > 512 || s.tile_keys <= 0 || s.tile_keys > 256) return false;
  const int rows_at_once = 32 * s.warps * 8 / s.dim;
  return s.tile_rows % (16 * s.warps) == 0 && s.tile_keys % 32 == 0 && 32 * s.warps % s.dim == 0 &&
         s.tile_rows % rows_at_once == 0 && s.tile_keys % rows_at_once == 0;
}

}  // namespace tessera::rules
