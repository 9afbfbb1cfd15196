// Included by the short files isa_*.cc, once each, after they have named their instruction set:
//   TESSERA_ISA           the namespace
//   TESSERA_TARGET        what the compiler may use, or nothing for its default
//   TESSERA_VECTOR_BYTES  one register
//   TESSERA_REGISTERS     how many of them
// Functions below the pragma are compiled for the target; everything included before it is not, so that no inline
// function of the standard library can leak into the program in a form that an older processor cannot run.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/element_mask.h"
#include "core/number.h"
#include "cpu/task.h"
#include "rules/dtype.h"
#include "rules/mask.h"
#include "rules/philox.h"
#include "rules/rotary.h"
#include "rules/softmax.h"

#define TESSERA_TEXT_(x) #x
#define TESSERA_TEXT(x) TESSERA_TEXT_(x)
#ifdef TESSERA_TARGET
#if defined(__clang__)
#define TESSERA_PRAGMA_(t) _Pragma(TESSERA_TEXT(clang attribute push(__attribute__((target(t))), apply_to = function)))
TESSERA_PRAGMA_(TESSERA_TARGET)
#else
#define TESSERA_PRAGMA_(t) _Pragma(TESSERA_TEXT(GCC target(t)))
_Pragma("GCC push_options") TESSERA_PRAGMA_(TESSERA_TARGET)
#endif
#endif

#include "cpu/append.h"
#include "cpu/backward.h"
#include "cpu/forward.h"

namespace tessera::cpu::TESSERA_ISA {

#ifdef TESSERA_BF16_DOT
const Body& body() {
  static constexpr Body table = {
      append<float>, attend<Pairs>, attend_chunk<Pairs>, combine<float>, nullptr, nullptr, nullptr, nullptr, nullptr};
  return table;
}
#else
const Body& body(bool f64) {
  static constexpr Body f32_table = {
      append<float>,           attend<Plain<float> >,    attend_chunk<Plain<float> >, combine<float>,
      row_deltas<float>,       gradients_of_keys<float>, gradients_of_rows<float>,    gradients_of_slopes<float>,
      gradients_of_bias<float>};
  static constexpr Body f64_table = {
      append<double>,           attend<Plain<double> >,    attend_chunk<Plain<double> >, combine<double>,
      row_deltas<double>,       gradients_of_keys<double>, gradients_of_rows<double>,    gradients_of_slopes<double>,
      gradients_of_bias<double>};
  return f64 ? f64_table : f32_table;
}
#endif

}  // namespace tessera::cpu::TESSERA_ISA

#ifdef TESSERA_TARGET
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
