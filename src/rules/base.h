// The one file that knows which compiler reads the rules: g++, clang, nvcc or NVRTC.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define TESSERA_RULE __host__ __device__ __forceinline__ constexpr
#else
// Always inlined, so that each caller's instruction set compiles its own copy and none is shared at link time.
#define TESSERA_RULE inline __attribute__((always_inline)) constexpr
#endif

namespace tessera::rules {

using Index = long long;  // positions and offsets: 64-bit from the first multiply
using Word = unsigned int;

// NVRTC has no builtin for it.
template <class T>
inline constexpr T infinity = static_cast<T>(__builtin_bit_cast(float, 0x7F800000u));

template <class T>
TESSERA_RULE T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
TESSERA_RULE T max(T a, T b) {
  return a < b ? b : a;
}
// Division that rounds toward minus infinity; b > 0.
template <class Int>
TESSERA_RULE Int floor_div(Int a, Int b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}
TESSERA_RULE Index floor_div(Index a, Index b) {
  return floor_div<Index>(a, b);
}
TESSERA_RULE Index ceil_div(Index a, Index b) {
  return -floor_div(-a, b);
}
TESSERA_RULE Index round_up(Index a, Index b) {
  return ceil_div(a, b) * b;
}

}  // namespace tessera::rules
