#include "peak.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "simd.h"

namespace tessera::tools {
namespace {

constexpr int chains = 12;  // latency 4 on 2 ports wants 8; 12 and the two factors fit in 16 registers

template <class S>
[[gnu::always_inline]] inline float multiply_add(int64_t rounds) {
  using V = typename S::Floats;
  const V factor = V{} + 0.999f, term = V{} + 0.001f;
  V x[chains];
  for (int n = 0; n < chains; ++n) x[n] = V{} + static_cast<float>(n);
  for (int64_t round = 0; round < rounds; ++round)
    for (int n = 0; n < chains; ++n) x[n] = x[n] * factor + term;
  V sum{};
  for (int n = 0; n < chains; ++n) sum += x[n];
  return sum[0];
}

float baseline(int64_t rounds) {
  return multiply_add<Simd<4>>(rounds);
}
TESSERA_TOOLS_AVX2 float avx2(int64_t rounds) {
  return multiply_add<Simd<8>>(rounds);
}
TESSERA_TOOLS_AVX512 float avx512(int64_t rounds) {
  return multiply_add<Simd<16>>(rounds);
}

}  // namespace

double fma_peak(int threads) {
  const auto loop = has_avx512() ? avx512 : has_avx2() ? avx2 : baseline;
  const int lanes = has_avx512() ? 16 : has_avx2() ? 8 : 4;
  constexpr int64_t rounds = 20'000'000;
  double best = 0;
  float sink = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
#pragma omp parallel for num_threads(threads) reduction(+ : sink) schedule(static, 1)
    for (int n = 0; n < threads; ++n) sink += loop(rounds + (sink > 1e30f));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::max(best, 2.0 * chains * lanes * static_cast<double>(rounds) * threads / seconds);
  }
  return sink == 0 ? 0 : best;  // what is used cannot be optimised away
}

}  // namespace tessera::tools
