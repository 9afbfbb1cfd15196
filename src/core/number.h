// One number in the caller's memory, of any float dtype.
#pragma once
#include <cmath>
#include <cstring>

#include "rules/dtype.h"
#include "tessera/tessera.h"

namespace tessera::core {

inline rules::Index bytes_of(int32_t dtype) {
  return rules::dtype_rows[dtype].bytes;
}

template <class T>
T read(const char* at, int32_t dtype) {
  switch (dtype) {
    case TESSERA_F64: {
      double x;
      std::memcpy(&x, at, sizeof x);
      if constexpr (sizeof(T) == 4) {  // a finite number stays finite: -1e300 is a bias, not a mask
        constexpr double most = __FLT_MAX__;
        if (std::isfinite(x)) x = x > most ? most : x < -most ? -most : x;
      }
      return static_cast<T>(x);
    }
    case TESSERA_F32: {
      float x;
      std::memcpy(&x, at, sizeof x);
      return static_cast<T>(x);
    }
    case TESSERA_E4M3:
      return static_cast<T>(rules::e4m3_to_float(static_cast<rules::Quarter>(*at)));
    default: {
      rules::Half x;
      std::memcpy(&x, at, sizeof x);
      return static_cast<T>(dtype == TESSERA_BF16 ? rules::bf16_to_float(x) : rules::f16_to_float(x));
    }
  }
}
template <class T>
void write(char* at, int32_t dtype, T x) {
  if (dtype == TESSERA_F64) {
    const double y = static_cast<double>(x);
    std::memcpy(at, &y, sizeof y);
  } else if (dtype == TESSERA_F32) {
    const float y = static_cast<float>(x);
    std::memcpy(at, &y, sizeof y);
  } else {
    const float y = rules::to_float_by_odd(x);  // so that the step to fewer bits is the only rounding
    if (dtype == TESSERA_E4M3) {
      *at = static_cast<char>(rules::float_to_e4m3(y));
      return;
    }
    const rules::Half h = dtype == TESSERA_BF16 ? rules::float_to_bf16(y) : rules::float_to_f16(y);
    std::memcpy(at, &h, sizeof h);
  }
}

}  // namespace tessera::core
