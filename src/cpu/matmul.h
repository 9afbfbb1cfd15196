// C[m][n] += sum_k A(m, k) B[k][n]: the one product behind forward and backward. A is read by two steps, so that a
// transposed A costs nothing; B and C have rows of whole registers. Every element is one chain of multiply-adds in the
// order of k, whatever the block around it: a row's bits do not depend on its neighbours.
#pragma once
#include "cpu/vector.h"

namespace tessera::cpu::TESSERA_ISA {

// How one step of the sum is made. Plain: a number at a time.
template <class T>
struct Plain {
  using Number = T;                // of C
  using Element = T;               // of A and B
  static constexpr int width = 1;  // numbers of k in an element
  static TESSERA_ALWAYS Vec<T> step(Vec<T> sum, Vec<T> a, Vec<T> b) { return fma(a, b, sum); }
};
#ifdef TESSERA_BF16_DOT
// Two bf16 numbers at a time (vdpbf16ps): k even in the low half.
struct Pairs {
  using Number = float;
  using Element = uint32_t;
  static constexpr int width = 2;
  static TESSERA_ALWAYS Vec<float> step(Vec<float> sum, WordLanes a, WordLanes b) {
    return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

template <class E>
struct Factor {  // A(m, k) = at[m * row + k * column]
  const E* at;
  Index row, column;
};

template <class P, int rows, int registers>
TESSERA_ALWAYS void block(Factor<typename P::Element> a, const typename P::Element* b, Index b_row,
                          typename P::Number* c, Index c_row, Index depth) {
  using T = typename P::Number;
  Vec<T> sums[rows][registers];
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < registers; ++n) sums[m][n] = load(c + m * c_row + n * lanes<T>);
  for (Index k = 0; k < depth; ++k) {
    Vec<typename P::Element> right[registers];
    for (int n = 0; n < registers; ++n) right[n] = load(b + k * b_row + n * lanes<T>);
    for (int m = 0; m < rows; ++m) {
      const auto left = splat(a.at[m * a.row + k * a.column]);
      for (int n = 0; n < registers; ++n) sums[m][n] = P::step(sums[m][n], left, right[n]);
    }
  }
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < registers; ++n) store(c + m * c_row + n * lanes<T>, sums[m][n]);
}

template <class P, int registers>
void panel(Index m, Index depth, Factor<typename P::Element> a, const typename P::Element* b, Index b_row,
           typename P::Number* c, Index c_row) {
  Index row = 0;
  const auto from = [&](Index r) { return Factor<typename P::Element>{a.at + r * a.row, a.row, a.column}; };
  for (; row + 6 <= m; row += 6) block<P, 6, registers>(from(row), b, b_row, c + row * c_row, c_row, depth);
  for (; row + 2 <= m; row += 2) block<P, 2, registers>(from(row), b, b_row, c + row * c_row, c_row, depth);
  if (row < m) block<P, 1, registers>(from(row), b, b_row, c + row * c_row, c_row, depth);
}

// `columns` is a multiple of a register; `depth` counts elements (pairs for Pairs).
template <class P>
void multiply(Index m, Index columns, Index depth, Factor<typename P::Element> a, const typename P::Element* b,
              Index b_row, typename P::Number* c, Index c_row) {
  constexpr int width = lanes<typename P::Number>;
  constexpr int wide = TESSERA_REGISTERS == 32 ? 4 : 2;  // 6 x 4 of 32 registers, 6 x 2 of 16
  Index n = 0;
  for (; n + wide * width <= columns; n += wide * width) panel<P, wide>(m, depth, a, b + n, b_row, c + n, c_row);
  for (; n < columns; n += width) panel<P, 1>(m, depth, a, b + n, b_row, c + n, c_row);
}

// The same where B holds numbers that are not finite and some (m, k) are excluded: 0 * NaN must not be taken.
// kept(m, k) = kept.at[m * kept.row + k * kept.column] != 0.
template <class T>
void multiply_kept(Index m, Index columns, Index depth, Factor<T> a, Factor<uint8_t> kept, const T* b, Index b_row,
                   T* c, Index c_row) {
  for (Index i = 0; i < m; ++i)
    for (Index k = 0; k < depth; ++k) {
      if (!kept.at[i * kept.row + k * kept.column]) continue;
      const Vec<T> left = splat(a.at[i * a.row + k * a.column]);
      for (Index n = 0; n < columns; n += lanes<T>)
        store(c + i * c_row + n, fma(left, load(b + k * b_row + n), load(c + i * c_row + n)));
    }
}

template <class T>
void clear(T* at, Index count) {
  std::memset(at, 0, static_cast<size_t>(count) * sizeof(T));
}

}  // namespace tessera::cpu::TESSERA_ISA
