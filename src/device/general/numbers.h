// Numbers of any format in global memory.
#pragma once
#include "device/ptx/portable.h"
#include "rules/dtype.h"
#include "rules/params.h"

namespace tessera::device {

using rules::Stored;
using rules::View;

TESSERA_DEVICE float read(const View& view, Index at) {
  switch (view.dtype) {
    case Stored::f32:
      return static_cast<const float*>(view.data)[at];
    case Stored::bf16:
      return rules::bf16_to_float(static_cast<const rules::Half*>(view.data)[at]);
    case Stored::f16:
      return rules::f16_to_float(static_cast<const rules::Half*>(view.data)[at]);
    case Stored::e4m3:
      return rules::e4m3_to_float(static_cast<const rules::Quarter*>(view.data)[at]);
    default:
      return 0;
  }
}
// Of an operand that may be float64 beside float32 ones.
TESSERA_DEVICE float read_any(const View& view, Index at) {
  switch (view.dtype) {
    case Stored::f64: {  // a finite number stays finite: -1e300 is a bias, not a mask
      const double x = static_cast<const double*>(view.data)[at];
      const bool finite = x - x == 0;
      constexpr double most = 0x1.fffffep127;
      return static_cast<float>(!finite ? x : x > most ? most : x < -most ? -most : x);
    }
    default:
      return read(view, at);
  }
}
TESSERA_DEVICE void write(const View& view, Index at, float x) {
  switch (view.dtype) {
    case Stored::f32:
      static_cast<float*>(view.data)[at] = x;
      break;
    case Stored::bf16:
      static_cast<rules::Half*>(view.data)[at] = rules::float_to_bf16(x);
      break;
    case Stored::f16:
      static_cast<rules::Half*>(view.data)[at] = rules::float_to_f16(x);
      break;
    case Stored::e4m3:
      static_cast<rules::Quarter*>(view.data)[at] = rules::float_to_e4m3(x);
      break;
    default:
      break;
  }
}
TESSERA_DEVICE void write_any(const View& view, Index at, float x) {
  if (view.dtype == Stored::f64) static_cast<double*>(view.data)[at] = x;
  else write(view, at, x);
}
TESSERA_DEVICE bool read_bool(const View& view, Index at) {
  return static_cast<const unsigned char*>(view.data)[at] != 0;
}
TESSERA_DEVICE int read_int(const View& view, Index at) {
  return static_cast<const int*>(view.data)[at];
}

}  // namespace tessera::device
