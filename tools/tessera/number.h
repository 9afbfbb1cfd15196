// Elements of every dtype: 16-bit floats to float and back, rounding to nearest, ties to even.
#pragma once

#include <tessera/tessera.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tessera::tools {

template <class T>
T read_as(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void write_as(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

inline float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = (bits >> 10) & 31,
                 fraction = bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0)
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f));
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

// Cuts to a float and marks with its last bit that something was cut: what is then rounded to fewer bits is rounded as
// if only once.
inline float round_to_odd(double value) {
  const auto near = static_cast<float>(value);
  if (std::isnan(value) || static_cast<double>(near) == value) return near;
  const uint32_t up = std::fabs(static_cast<double>(near)) > std::fabs(value) ? 1 : 0;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(near) - up) | 1);
}

inline uint16_t bf16_from(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t f16_from(float value) {
  if (std::isnan(value)) return 0x7e00;
  const uint32_t sign = std::bit_cast<uint32_t>(value) >> 16 & 0x8000,
                 bits = std::bit_cast<uint32_t>(value) & 0x7fffffff;
  if (bits >= std::bit_cast<uint32_t>(65536.0f)) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < std::bit_cast<uint32_t>(0x1p-14f)) {  // the sum's last bit is 2^-24, the smallest step of f16
    const uint32_t sum = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0.5f);
    return static_cast<uint16_t>(sign | (sum - std::bit_cast<uint32_t>(0.5f)));
  }
  return static_cast<uint16_t>(sign | ((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13));
}

// 4 bits of exponent, 3 of fraction, no infinity; past 448 it saturates.
inline uint8_t e4m3_from(double value) {
  const auto sign = static_cast<uint8_t>(std::signbit(value) ? 0x80 : 0);
  if (std::isnan(value)) return static_cast<uint8_t>(sign | 0x7f);
  const double size = std::fmin(std::fabs(value), 448);
  const int exponent = size < 0x1p-6 ? -6 : std::ilogb(size);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));  // 8 to 16, or fewer
  return static_cast<uint8_t>(sign | ((exponent + 6) * 8 + steps));  // the leading one adds the exponent's last step
}

inline void store(std::byte* to, int32_t dtype, double value) {
  switch (dtype) {
    case TESSERA_F64:
      return write_as(to, value);
    case TESSERA_F32:
      return write_as(to, static_cast<float>(value));
    case TESSERA_BF16:
      return write_as(to, bf16_from(round_to_odd(value)));
    case TESSERA_F16:
      return write_as(to, f16_from(round_to_odd(value)));
    case TESSERA_E4M3:
      return write_as(to, e4m3_from(value));
    case TESSERA_I32:
      return write_as(to, static_cast<int32_t>(value));
    default:
      return write_as(to, static_cast<uint8_t>(value != 0));
  }
}

}  // namespace tessera::tools
