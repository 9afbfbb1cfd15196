// Some twenty operations on one register of numbers, written once with the compilers' vector extension; only the bf16
// dot product needs an intrinsic. Compiled per instruction set (cpu/target.h).
#pragma once

#define TESSERA_ALWAYS inline __attribute__((always_inline))

namespace tessera::cpu::TESSERA_ISA {

template <class T, int bytes = TESSERA_VECTOR_BYTES>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class T>
using Vec = typename VectorOf<T>::type;
template <class T>
inline constexpr int lanes = TESSERA_VECTOR_BYTES / static_cast<int>(sizeof(T));

using core::bytes_of;
using core::read;
using core::write;
using rules::Half;
using rules::Index;
using rules::Word;
using IntLanes = Vec<int32_t>;
using WordLanes = Vec<uint32_t>;

// Before code of the default target goes on. Wide registers whose upper parts are in use slow its narrow instructions:
// a tiny attention took 1.35 us instead of 1.07.
TESSERA_ALWAYS void clean_registers() {
#if TESSERA_VECTOR_BYTES > 16
  _mm256_zeroupper();
#endif
}

template <class T>
TESSERA_ALWAYS Vec<T> load(const T* from) {
  Vec<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class T>
TESSERA_ALWAYS void store(T* to, Vec<T> v) {
  std::memcpy(to, &v, sizeof v);
}
template <class T>
TESSERA_ALWAYS Vec<T> splat(T x) {
  return x - Vec<T>{};
}
// a b + c, rounded once where the target can. Said, not left to the compiler's contraction: two places that make the
// same sum must make the same bits.
TESSERA_ALWAYS Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
#if TESSERA_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif TESSERA_VECTOR_BYTES == 32
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < lanes<float>; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
TESSERA_ALWAYS Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
#if TESSERA_VECTOR_BYTES == 64
  return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif TESSERA_VECTOR_BYTES == 32
  return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__FP_FAST_FMA)
  for (int i = 0; i < lanes<double>; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
template <class V>
TESSERA_ALWAYS V larger(V a, V b) {  // NaN if either is
  return ((a > b) | (a != a)) ? a : b;
}
// Lane i gets lane i ^ distance.
template <int distance, class V, int... lane>
TESSERA_ALWAYS V exchanged(V v, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(v, v, (lane ^ distance)...);
}
template <class T, int distance = lanes<T> / 2>
TESSERA_ALWAYS T sum(Vec<T> v) {  // pairwise, in one fixed order
  if constexpr (distance == 0) return v[0];
  else return sum<T, distance / 2>(v + exchanged<distance>(v, std::make_integer_sequence<int, lanes<T>>{}));
}
template <class T, int distance = lanes<T> / 2>
TESSERA_ALWAYS T largest(Vec<T> v) {
  if constexpr (distance == 0) return v[0];
  else return largest<T, distance / 2>(larger(v, exchanged<distance>(v, std::make_integer_sequence<int, lanes<T>>{})));
}
template <class T>
TESSERA_ALWAYS Vec<T> ramp() {  // 0, 1, 2, ...
  Vec<T> v{};
  for (int i = 0; i < lanes<T>; ++i) v[i] = static_cast<T>(i);
  return v;
}

// ------------------------------------------------------------------------------------------------- 16-bit numbers

using HalfLanes = typename VectorOf<Half, TESSERA_VECTOR_BYTES / 2>::type;
TESSERA_ALWAYS WordLanes load_words(const Half* from) {
  HalfLanes h;
  std::memcpy(&h, from, sizeof h);
  return __builtin_convertvector(h, WordLanes);
}
TESSERA_ALWAYS Vec<float> load_bf16(const Half* from) {
  return (Vec<float>)(load_words(from) << 16);
}
TESSERA_ALWAYS Vec<float> load_f16(const Half* from) {  // as rules::f16_to_float
  const WordLanes bits = load_words(from), sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7FFFu) << 13;
  const WordLanes finite = (WordLanes)((Vec<float>)magnitude * 0x1p112f);
  return (Vec<float>)(sign | (magnitude >= 0x0F800000u ? magnitude + 0x70000000u : finite));
}
TESSERA_ALWAYS void store_bf16(Half* to, Vec<float> x) {  // as rules::float_to_bf16
  const WordLanes bits = (WordLanes)x;
  const WordLanes rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const HalfLanes h =
      __builtin_convertvector((bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits >> 16) | 0x40u : rounded, HalfLanes);
  std::memcpy(to, &h, sizeof h);
}

// ---------------------------------------------------------------------------------------------------- functions

// e^x within 1.2 ulp; -inf gives 0, results below 2^-126 give 0, NaN stays. Cody and Waite's reduction, and the
// degree-6 polynomial of Cephes (S. Moshier), on |r| <= ln2 / 2.
TESSERA_ALWAYS Vec<float> exp(Vec<float> x) {
  const Vec<float> magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number in the low bits
  const Vec<float> t = x * 1.44269504088896341f + magic;
  const Vec<float> n = t - magic;
  const Vec<float> r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec<float> p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Vec<float> power = (Vec<float>)(((WordLanes)t << 23) + 0x3F800000u);
  const Vec<float> y = p * power;
  return x < -87.3f ? Vec<float>{} : x > 88.3f ? splat(__builtin_huge_valf()) : y;
}
TESSERA_ALWAYS Vec<double> exp(Vec<double> x) {
  for (int i = 0; i < lanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

// Within 2 ulp: an odd polynomial (Cephes) near 0, else 1 - 2 / (e^2|x| + 1).
TESSERA_ALWAYS Vec<float> tanh(Vec<float> x) {
  const Vec<float> z = x * x;
  Vec<float> p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Vec<float> near = p * z * x + x;
  const Vec<float> size = x < 0.0f ? -x : x;
  const Vec<float> far = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  return size < 0.625f ? near : x < 0.0f ? -far : far;
}
TESSERA_ALWAYS Vec<double> tanh(Vec<double> x) {
  for (int i = 0; i < lanes<double>; ++i) x[i] = std::tanh(x[i]);
  return x;
}

}  // namespace tessera::cpu::TESSERA_ISA
