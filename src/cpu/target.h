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

// A step that leaves the registers clean, however it ends.
template <auto step>
struct Entry;
template <class Item, void (*step)(const Task&, const Item&, std::byte*)>
struct Entry<step> {
  static void run(const Task& t, const Item& item, std::byte* scratch) {
    step(t, item, scratch);
    clean_registers();
  }
};
template <auto step>
inline constexpr auto entry = Entry<step>::run;

#ifdef TESSERA_BF16_DOT
const Body& body() {
  static constexpr Body table = {entry<append<float>>,
                                 entry<attend<Pairs>>,
                                 entry<attend_chunk<Pairs>>,
                                 entry<combine<float>>,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};
  return table;
}
#else
template <class T>
inline constexpr Body table = {entry<append<T>>,
                               entry<attend<Plain<T>>>,
                               entry<attend_chunk<Plain<T>>>,
                               entry<combine<T>>,
                               entry<row_deltas<T>>,
                               entry<gradients_of_keys<T>>,
                               entry<gradients_of_rows<T>>,
                               entry<gradients_of_slopes<T>>,
                               entry<gradients_of_bias<T>>};
const Body& body(bool f64) {
  return f64 ? table<double> : table<float>;
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
