// The two products of attention, by one warp. Its 16 rows lie in the lanes as the tensor cores leave them: lane l holds
// of rows l / 4 and l / 4 + 8, in every 8 columns, column 2 (l % 4) and the next: block[n][0..1] and block[n][2..3].
#pragma once
#include "device/general/panels.h"

namespace tessera::device {

TESSERA_DEVICE int lane_index() {
  return thread_index() & 31;
}
TESSERA_DEVICE int warp_index() {
  return thread_index() >> 5;
}

template <int columns>
using Block = float[columns / 8][4];

template <int columns>
TESSERA_DEVICE void clear(Block<columns>& block) {
#pragma unroll
  for (int n = 0; n < columns / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) block[n][i] = 0;
}

// block += a b^T over `panels` panels of both: a has the warp's 16 rows, b `width` rows.
template <Product P, int width>
TESSERA_DEVICE void multiply_transposed(Block<width>& block, const Panels& a, const Panels& b, int panels) {
  const int lane = lane_index();
#pragma unroll 1
  for (int p = 0; p < panels; ++p) {
    const Address left = a.panel(p), right = b.panel(p);
    if constexpr (Format<P>::halves) {
      constexpr auto number = P == Product::bf16 ? rules::Float::bf16 : rules::Float::f16;
      const Address rows = left + place(lane & 15, lane >> 4);
      const Address columns = right + place((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Word x[4];
        load_matrices(x, rows ^ static_cast<Address>(k * 32));
#pragma unroll
        for (int n = 0; n < width / 16; ++n) {
          Word y[4];
          load_matrices(y, (columns ^ static_cast<Address>(k * 32)) + static_cast<Address>(n * 16 * panel_bytes));
          Number<number>::multiply_add(block[2 * n], x, y[0], y[1]);
          Number<number>::multiply_add(block[2 * n + 1], x, y[2], y[3]);
        }
      }
    } else if constexpr (P == Product::tf32) {
      const int row = lane >> 2, word = (lane & 3) * 4;
      const auto number = [&](Address panel, int r, int chunk) {
        return to_tf32(rules::float_of_bits(load_word(panel + place(r, chunk) + static_cast<Address>(word))));
      };
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const Word x[4] = {number(left, row, 2 * k), number(left, row + 8, 2 * k), number(left, row, 2 * k + 1),
                           number(left, row + 8, 2 * k + 1)};
#pragma unroll
        for (int n = 0; n < width / 8; ++n)
          multiply_add_tf32(block[n], x, number(right, n * 8 + row, 2 * k), number(right, n * 8 + row, 2 * k + 1));
      }
    } else {
      const int row = lane >> 2, column = (lane & 3) * 2;
#pragma unroll 1
      for (int k = 0; k < 8; ++k) {
        const Chunk x[2] = {load_chunk(left + place(row, k)), load_chunk(left + place(row + 8, k))};
#pragma unroll
        for (int n = 0; n < width / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const Chunk y = load_chunk(right + place(n * 8 + column + i, k));
#pragma unroll
            for (int w = 0; w < 4; ++w)
#pragma unroll
              for (int half = 0; half < 2; ++half)
                block[n][half * 2 + i] = fmaf(rules::float_of_bits(x[half].word[w]), rules::float_of_bits(y.word[w]),
                                              block[n][half * 2 + i]);
          }
      }
    }
  }
}

// The column of a sum of products (of `multiply` below) that lane l holds in sum[m][i]. The next i is the next column.
template <Product P>
TESSERA_DEVICE int sum_column(int m, int i) {
  const int quarter = lane_index() & 3;
  if constexpr (P == Product::f32) return m / 2 * 16 + quarter * 4 + m % 2 * 2 + (i & 1);
  else return m * 8 + quarter * 2 + (i & 1);
}

// sum += weights b: weights are a block of `width` columns, b has `width` rows of `columns` numbers in panels. 16-bit
// products round the weights.
template <Product P, int width, int columns>
TESSERA_DEVICE void multiply(Block<columns>& sum, const Block<width>& weights, const Panels& b) {
  using F = Format<P>;
  const int lane = lane_index();
  if constexpr (F::halves) {
    constexpr auto number = P == Product::bf16 ? rules::Float::bf16 : rules::Float::f16;
    const Address rows = b.first + place(lane & 15, lane >> 4);
#pragma unroll
    for (int n = 0; n < width / 16; ++n) {
      const auto& low = weights[2 * n];
      const auto& high = weights[2 * n + 1];
      const Word x[4] = {pack<P>(low[0], low[1]), pack<P>(low[2], low[3]), pack<P>(high[0], high[1]),
                         pack<P>(high[2], high[3])};
#pragma unroll
      for (int m = 0; m < columns / 16; ++m) {
        Word y[4];
        load_transposed(y, (rows ^ static_cast<Address>(m % 4 * 32)) +
                               static_cast<Address>((m / 4 * b.rows + n * 16) * panel_bytes));
        Number<number>::multiply_add(sum[2 * m], x, y[0], y[1]);
        Number<number>::multiply_add(sum[2 * m + 1], x, y[2], y[3]);
      }
    }
  } else if constexpr (P == Product::tf32) {
    // The order of keys inside eight is free: the tensor core's columns l % 4 and l % 4 + 4 are keys 2 (l % 4) and the
    // next, which this lane holds.
    const int key = (lane & 3) * 2, column = lane >> 2;
#pragma unroll
    for (int n = 0; n < width / 8; ++n) {
      const Word x[4] = {to_tf32(weights[n][0]), to_tf32(weights[n][2]), to_tf32(weights[n][1]),
                         to_tf32(weights[n][3])};
#pragma unroll
      for (int m = 0; m < columns / 8; ++m) {
        const auto number = [&](int row) {
          const Address at = b.panel(m / 4) + place(row, m % 4 * 2 + (column >> 2));
          return to_tf32(rules::float_of_bits(load_word(at + static_cast<Address>((column & 3) * 4))));
        };
        multiply_add_tf32(sum[m], x, number(n * 8 + key), number(n * 8 + key + 1));
      }
    }
  } else {
    const int quarter = lane & 3;
#pragma unroll
    for (int n = 0; n < width / 8; ++n)
#pragma unroll 1
      for (int owner = 0; owner < 4; ++owner)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = n * 8 + owner * 2 + i;
          const float x[2] = {of_lane(weights[n][i], (lane & ~3) | owner),
                              of_lane(weights[n][2 + i], (lane & ~3) | owner)};
#pragma unroll
          for (int m = 0; m < columns / 16; ++m) {
            const Chunk y = load_chunk(b.panel(m / 2) + place(key, m % 2 * 4 + quarter));
#pragma unroll
            for (int w = 0; w < 4; ++w)
#pragma unroll
              for (int half = 0; half < 2; ++half)
                sum[2 * m + w / 2][half * 2 + w % 2] =
                    fmaf(x[half], rules::float_of_bits(y.word[w]), sum[2 * m + w / 2][half * 2 + w % 2]);
          }
        }
  }
}

// A warp's block in shared memory, row by row, so that a rolled loop may go over its numbers: lanes are columns there.
// Rows are 8 numbers longer than they need be: then lanes of four rows write to all banks.
struct Scratch {
  Address first;
  int columns;
  TESSERA_DEVICE Address at(int row, int column) const {
    return first + static_cast<Address>((row * (columns + 8) + column) * 4);
  }
  TESSERA_DEVICE float get(int row, int column) const { return rules::float_of_bits(load_word(at(row, column))); }
  TESSERA_DEVICE void put(int row, int column, float x) const { store_word(at(row, column), rules::bits_of_float(x)); }
};
template <int width>
TESSERA_DEVICE void spread(const Block<width>& block, const Scratch& to) {
  const int row = lane_index() >> 2, column = (lane_index() & 3) * 2;
#pragma unroll
  for (int m = 0; m < width / 8; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) to.put(row + i / 2 * 8, m * 8 + column + (i & 1), block[m][i]);
  __syncwarp();
}
template <int width>
TESSERA_DEVICE void collect(Block<width>& block, const Scratch& from) {
  const int row = lane_index() >> 2, column = (lane_index() & 3) * 2;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < width / 8; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) block[m][i] = from.get(row + i / 2 * 8, m * 8 + column + (i & 1));
}

// Columns of a view from `first` on, by a warp, 64 at a time: sums times a factor for each of this lane's two rows.
// `at(row)` says where row 0 to 15 of the warp begins, or less than 0 where it is not written.
template <Product P, int columns, class At>
TESSERA_DEVICE void store_sums(const Block<columns>& sum, const float (&factor)[2], const View& to, int first,
                               int count, const Scratch& scratch, At&& at) {
  const int lane = lane_index();
#pragma unroll
  for (int part = 0; part < columns / 64; ++part) {
    __syncwarp();
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scratch.put((lane >> 2) + i / 2 * 8, sum_column<P>(m, i), sum[part * 8 + m][i] * factor[i / 2]);
    __syncwarp();
    const int column = first + part * 64 + 2 * lane;
#pragma unroll 1
    for (int row = 0; row < 16; ++row)
      if (const Index begin = at(row); begin >= 0)
        write_pair(to, begin, column, count, scratch.get(row, 2 * lane), scratch.get(row, 2 * lane + 1));
  }
}

}  // namespace tessera::device
