#include "matrix.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "simd.h"

namespace tessera::tools {
namespace {

constexpr int64_t block_depth = 256;  // rows of a panel that stay in the first cache

// Vectors pass by reference: by value their ABI would depend on the caller's instruction set.
template <class V>
[[gnu::always_inline]] inline void load(V& to, const float* from) {
  std::memcpy(&to, from, sizeof to);
}

template <class V>
[[gnu::always_inline]] inline void save(float* to, const V& from) {
  std::memcpy(to, &from, sizeof from);
}

template <class S>
[[gnu::always_inline]] inline void multiply_with(const Product& p) {
  using V = typename S::Floats;
  constexpr int64_t width = 2 * S::lanes;
  for (int64_t column = 0; column < p.columns; column += width)
    for (int64_t begin = 0; begin < p.depth; begin += block_depth) {
      const int64_t end = std::min(p.depth, begin + block_depth);
      for (int64_t row = 0; row < p.rows; row += tile_rows) {
        const float* a = p.a + row * p.lda;
        const float* b = p.b + column * p.depth + begin * width;
        float* c = p.c + row * p.ldc + column;
        V sum[tile_rows][2] = {};
        for (int64_t k = begin; k < end; ++k, b += width) {
          V left, right;
          load(left, b);
          load(right, b + S::lanes);
#pragma GCC unroll 6
          for (int64_t r = 0; r < tile_rows; ++r) {
            sum[r][0] += a[r * p.lda + k] * left;
            sum[r][1] += a[r * p.lda + k] * right;
          }
        }
#pragma GCC unroll 6
        for (int64_t r = 0; r < tile_rows; ++r)
#pragma GCC unroll 2
          for (int64_t half = 0; half < 2; ++half) {
            float* to = c + r * p.ldc + half * S::lanes;
            V before{};
            if (begin > 0) load(before, to);
            save<V>(to, sum[r][half] + before);
          }
      }
    }
}

// x to exp(x) for x <= 0, error about 1 ulp; below -87 it is 0. NaN stays NaN.
template <class S>
[[gnu::always_inline]] inline void exponential(typename S::Floats& x) {
  using V = typename S::Floats;
  using I = typename S::Ints;
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const I gone = x < -87.0f;
  x = gone ? V{} : x;
  const V shifted = x * 1.44269504f + magic, n = shifted - magic;
  const V f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = V{} + 1.9875691500e-4f;
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * f + c;
  p = p * f * f + f + 1.0f;                                                  // Cephes' expf
  const I power = ((I)shifted - std::bit_cast<int32_t>(magic) + 127) << 23;  // casts of vectors keep the bits
  x = gone ? V{} : p * (V)power;
}

// Scores of one row to exp(scale score - max), in place. `keep` may be NULL.
template <class S>
[[gnu::always_inline]] inline RowSum softmax_with(float* row, const uint8_t* keep, int64_t columns, float scale) {
  using V = typename S::Floats;
  constexpr float none = -std::numeric_limits<float>::infinity();
  V highest = V{} + none;
  for (int64_t j = 0; j < columns; j += S::lanes) {
    V x;
    load(x, row + j);
    x *= scale;
    if (keep) {
      typename S::Bytes kept;
      std::memcpy(&kept, keep + j, sizeof kept);
      x = __builtin_convertvector(kept, typename S::Ints) != 0 ? x : V{} + none;
    }
    highest = x > highest ? x : highest;
    save(row + j, x);
  }
  RowSum result{none, 0};
  for (int n = 0; n < S::lanes; ++n) result.max = std::max(result.max, highest[n]);
  const float base = result.max == none ? 0 : result.max;
  V sum{};
  for (int64_t j = 0; j < columns; j += S::lanes) {
    V e;
    load(e, row + j);
    e -= base;
    exponential<S>(e);
    sum += e;
    save(row + j, e);
  }
  for (int n = 0; n < S::lanes; ++n) result.sum += sum[n];
  return result;
}

void multiply_baseline(const Product& p) {
  multiply_with<Simd<4>>(p);
}
TESSERA_TOOLS_AVX2 void multiply_avx2(const Product& p) {
  multiply_with<Simd<8>>(p);
}
TESSERA_TOOLS_AVX512 void multiply_avx512(const Product& p) {
  multiply_with<Simd<16>>(p);
}

RowSum softmax_baseline(float* row, const uint8_t* keep, int64_t columns, float scale) {
  return softmax_with<Simd<4>>(row, keep, columns, scale);
}
TESSERA_TOOLS_AVX2 RowSum softmax_avx2(float* row, const uint8_t* keep, int64_t columns, float scale) {
  return softmax_with<Simd<8>>(row, keep, columns, scale);
}
TESSERA_TOOLS_AVX512 RowSum softmax_avx512(float* row, const uint8_t* keep, int64_t columns, float scale) {
  return softmax_with<Simd<16>>(row, keep, columns, scale);
}

}  // namespace

const MatrixTarget& matrix_target() {
  static const MatrixTarget best = has_avx512() ? MatrixTarget{32, multiply_avx512, softmax_avx512}
                                   : has_avx2() ? MatrixTarget{16, multiply_avx2, softmax_avx2}
                                                : MatrixTarget{8, multiply_baseline, softmax_baseline};
  return best;
}

}  // namespace tessera::tools
