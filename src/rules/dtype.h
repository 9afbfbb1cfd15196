// Number formats: what a 16-bit pattern means, and how float32 rounds to it (to nearest, ties to even).
#pragma once
#include "rules/base.h"

namespace tessera::rules {

struct DtypeRow {
  const char* text;
  int bytes;
};
inline constexpr DtypeRow dtype_rows[] = {{"absent", 0}, {"f64", 8}, {"f32", 4},  {"bf16", 2},
                                          {"f16", 2},    {"i32", 4}, {"bool", 1}, {"e4m3", 1}};
inline constexpr int dtype_count = 8;

using Half = unsigned short;    // 16 bits of bf16 or f16
using Quarter = unsigned char;  // 8 bits of e4m3

TESSERA_RULE float float_of_bits(Word bits) {
  return __builtin_bit_cast(float, bits);
}
TESSERA_RULE Word bits_of_float(float x) {
  return __builtin_bit_cast(Word, x);
}

TESSERA_RULE float bf16_to_float(Half x) {
  return float_of_bits(static_cast<Word>(x) << 16);
}
TESSERA_RULE Half float_to_bf16(float x) {
  const Word bits = bits_of_float(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<Half>((bits >> 16) | 0x40u);  // stays a NaN
  return static_cast<Half>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

TESSERA_RULE float f16_to_float(Half x) {
  const Word sign = static_cast<Word>(x & 0x8000u) << 16;
  const Word magnitude = static_cast<Word>(x & 0x7FFFu) << 13;
  if (magnitude >= 0x0F800000u) return float_of_bits(sign | (magnitude + 0x70000000u));  // inf, NaN: exponent 255
  // Seen as a float32 the pattern is 2^112 too small; the product also turns f16 subnormals into normal numbers.
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude) * 0x1p112f));
}
TESSERA_RULE Half float_to_f16(float x) {
  const Word bits = bits_of_float(x);
  const Word sign = (bits >> 16) & 0x8000u;
  const Word magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<Half>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<Half>(sign | 0x7C00u);  // 65520 and more round to inf
  if (magnitude < 0x38800000u) {  // subnormal in f16: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits
    return static_cast<Half>(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3F000000u));
  }
  const Word rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<Half>(sign | ((rounded - 0x38000000u) >> 13));
}

// e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022): no infinity, one NaN pattern a sign, largest 448.
TESSERA_RULE float e4m3_to_float(Quarter x) {
  const Word sign = static_cast<Word>(x & 0x80u) << 24;
  const Word magnitude = x & 0x7Fu;
  if (magnitude == 0x7Fu) return float_of_bits(sign | 0x7FC00000u);
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 20) * 0x1p120f));  // as f16_to_float
}
TESSERA_RULE Quarter float_to_e4m3(float x) {  // past 448 it saturates
  const Word bits = bits_of_float(x);
  const Word sign = (bits >> 24) & 0x80u;
  const Word magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<Quarter>(sign | 0x7Fu);
  if (magnitude >= 0x43E00000u) return static_cast<Quarter>(sign | 0x7Eu);
  if (magnitude < 0x3C800000u) {  // subnormal: adding 2^14 leaves the rounded multiple of 2^-9 in the low bits
    return static_cast<Quarter>(sign | (bits_of_float(float_of_bits(magnitude) + 0x1p14f) - 0x46800000u));
  }
  const Word rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
  return static_cast<Quarter>(sign | ((rounded - 0x3C000000u) >> 20));
}

// A float that rounds to any fewer bits as `x` itself would: cut, with the last bit telling that something was cut
// (rounding to odd, Boldo and Melquiond, IEEE TC 2008).
TESSERA_RULE float to_float_by_odd(float x) {
  return x;
}
TESSERA_RULE float to_float_by_odd(double x) {
  const float near = static_cast<float>(x);
  if (x != x || static_cast<double>(near) == x) return near;
  const Word bits = bits_of_float(near);
  const double size = x < 0 ? -x : x;
  const bool above = static_cast<double>(float_of_bits(bits & 0x7FFFFFFFu)) > size;
  return float_of_bits((bits - (above ? 1u : 0u)) | 1u);
}

}  // namespace tessera::rules
