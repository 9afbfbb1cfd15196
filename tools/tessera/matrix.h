// The two loops of materialised attention that take the time, compiled for each instruction set.
#pragma once

#include <cstdint>

namespace tessera::tools {

constexpr int64_t tile_rows = 6;  // times two vectors: 12 accumulators

// C = A B. A and C are row-major. B is in panels of `panel` columns, each depth x panel and dense.
struct Product {
  const float* a;
  int64_t lda;
  const float* b;
  float* c;
  int64_t ldc;
  int64_t rows;     // whole tiles
  int64_t columns;  // whole panels
  int64_t depth;
};

struct RowSum {
  float max;  // -inf: nothing is kept
  float sum;
};

struct MatrixTarget {
  int64_t panel;  // columns: two vectors
  void (*multiply)(const Product&);
  // One row of scores to exp(scale score - max), in place; columns in whole panels. `keep` may be NULL.
  RowSum (*softmax)(float* row, const uint8_t* keep, int64_t columns, float scale);
};

const MatrixTarget& matrix_target();  // the best that this machine has

}  // namespace tessera::tools
