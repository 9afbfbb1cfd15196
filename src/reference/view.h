// Any element of any operand as a float64, and back. Number formats are said by their definition, not by bit tricks.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/operand.h"

namespace tessera::reference {

inline constexpr double infinity = std::numeric_limits<double>::infinity();

struct Format {
  int exponent_bits, fraction_bits;
  bool has_infinity = true;  // else the largest exponent holds numbers, and only the largest pattern is a NaN
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int sign() const { return 1 << (exponent_bits + fraction_bits); }
};
inline Format format(int32_t dtype) {
  switch (dtype) {
    case TESSERA_F64:
      return {11, 52};
    case TESSERA_F32:
      return {8, 23};
    case TESSERA_BF16:
      return {8, 7};
    case TESSERA_E4M3:
      return {4, 3, false};
    default:
      return {5, 10};
  }
}

// The exponent of the last place of numbers as large as x; below the normal numbers it stays.
inline int last_place(const Format& f, double x) {
  const int exponent = x == 0 ? 1 - f.bias() : std::max(std::ilogb(x), 1 - f.bias());
  return exponent - f.fraction_bits;
}
inline double ulp(int32_t dtype, double x) {
  return std::ldexp(1, last_place(format(dtype), x));
}

// Formats of 16 bits and less.
inline double decode(const Format& f, int bits) {
  const int magnitude = bits & (f.sign() - 1), fraction = magnitude & ((1 << f.fraction_bits) - 1);
  const int exponent = magnitude >> f.fraction_bits;
  const double sign = bits & f.sign() ? -1 : 1;
  if (!f.has_infinity && magnitude == f.sign() - 1) return std::numeric_limits<double>::quiet_NaN();
  if (f.has_infinity && exponent == (1 << f.exponent_bits) - 1)
    return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * infinity;
  const int whole = exponent ? fraction + (1 << f.fraction_bits) : fraction;
  return sign * std::ldexp(whole, std::max(exponent, 1) - f.bias() - f.fraction_bits);
}

// To nearest, ties to even, from float64 in one step: a step through float32 would round some ties twice. What is too
// large becomes infinity, or the largest number where there is none.
inline int encode(const Format& f, double x) {
  const int inf = ((1 << f.exponent_bits) - 1) << f.fraction_bits, largest = f.has_infinity ? inf : f.sign() - 2;
  const int sign = std::signbit(x) ? f.sign() : 0;
  if (std::isnan(x)) return sign | (f.has_infinity ? inf | 1 << (f.fraction_bits - 1) : f.sign() - 1);
  if (std::isinf(x)) return sign | largest;
  const int place = last_place(f, x);
  const int steps = f.bias() + place + f.fraction_bits - 1;  // the biased exponent less one: 0 for subnormals
  if (steps > (1 << f.exponent_bits)) return sign | largest;
  const int whole = static_cast<int>(std::nearbyint(std::ldexp(std::abs(x), -place)));
  // The leading one of `whole` adds the exponent's last step; rounding up to the next power of two carries by itself.
  return sign | std::min(largest, (steps << f.fraction_bits) + whole);
}

template <class T>
T load_as(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline double load(int32_t dtype, const void* from) {
  switch (dtype) {
    case TESSERA_F64:
      return load_as<double>(from);
    case TESSERA_F32:
      return load_as<float>(from);
    case TESSERA_I32:
      return load_as<int32_t>(from);
    case TESSERA_BOOL:
      return load_as<uint8_t>(from) != 0;
    case TESSERA_E4M3:
      return decode(format(dtype), load_as<uint8_t>(from));
    default:
      return decode(format(dtype), load_as<uint16_t>(from));
  }
}

inline void store(int32_t dtype, void* to, double x) {
  if (dtype == TESSERA_F64) {
    std::memcpy(to, &x, sizeof x);
  } else if (dtype == TESSERA_F32) {
    const auto value = static_cast<float>(x);
    std::memcpy(to, &value, sizeof value);
  } else if (dtype == TESSERA_E4M3) {
    const auto bits = static_cast<uint8_t>(encode(format(dtype), x));
    std::memcpy(to, &bits, sizeof bits);
  } else {
    const auto bits = static_cast<uint16_t>(encode(format(dtype), x));
    std::memcpy(to, &bits, sizeof bits);
  }
}

// To a float dtype and back.
inline double rounded(int32_t dtype, double x) {
  if (dtype == TESSERA_F64) return x;
  if (dtype == TESSERA_F32) return static_cast<float>(x);
  return decode(format(dtype), encode(format(dtype), x));
}

struct View {
  core::Operand o = {};
  const void* data = nullptr;

  bool present() const { return o.dtype != TESSERA_ABSENT; }
  double at(int64_t a, int64_t b, int64_t c, int64_t d) const {
    const int64_t offset = core::offset_of(o, a, b, c, d) * core::dtype_bytes(o.dtype);
    return load(o.dtype, static_cast<const std::byte*>(data) + offset);
  }
};

struct Target {
  core::Operand o = {};
  void* data = nullptr;

  bool present() const { return o.dtype != TESSERA_ABSENT; }
  void put(int64_t a, int64_t b, int64_t c, int64_t d, double x) const {
    const int64_t offset = core::offset_of(o, a, b, c, d) * core::dtype_bytes(o.dtype);
    store(o.dtype, static_cast<std::byte*>(data) + offset, x);
  }
};

// The same extents, one element after the other.
inline core::Operand dense_like(core::Operand o, int32_t dtype) {
  o.dtype = dtype;
  int64_t stride = 1;
  for (int d = 3; d >= 0; --d) {
    o.stride[d] = stride;
    stride *= o.extent[d];
  }
  return o;
}

}  // namespace tessera::reference
