// Vectors of floats as the compiler knows them, and one body compiled for each instruction set.
#pragma once

#include <cstdint>

namespace tessera::tools {

template <int N>
struct Simd {
  static constexpr int lanes = N;
  typedef float Floats __attribute__((vector_size(4 * N)));
  typedef int32_t Ints __attribute__((vector_size(4 * N)));
  typedef uint8_t Bytes __attribute__((vector_size(N)));
};

#if defined(__x86_64__)
#define TESSERA_TOOLS_AVX2 [[gnu::target("avx2,fma")]]
#define TESSERA_TOOLS_AVX512 [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]]
inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
inline bool has_avx512() {
  return __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else  // vectors wider than the machine's are split by the compiler
#define TESSERA_TOOLS_AVX2
#define TESSERA_TOOLS_AVX512
inline bool has_avx2() {
  return false;
}
inline bool has_avx512() {
  return false;
}
#endif

}  // namespace tessera::tools
