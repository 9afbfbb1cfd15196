// Tiles of any width in shared memory: panels of 128 bytes a row, one after the other, the last filled up with zeros.
// Row r's chunk c of 16 bytes lies at place c ^ (r % 8) of its panel row, so that eight rows of one column of chunks
// lie in eight different groups of banks, as ldmatrix reads them.
#pragma once
#include "device/general/numbers.h"
#include "device/sequence.h"
#include "rules/spec.h"

namespace tessera::device {

using rules::Product;

constexpr int panel_bytes = 128;  // of a row

struct Panels {
  Address first;
  int rows;
  TESSERA_DEVICE Address panel(int p) const { return first + static_cast<Address>(p * rows * panel_bytes); }
  TESSERA_DEVICE Panels from_row(int row) const {  // a multiple of 8
    return {first + static_cast<Address>(row * panel_bytes), rows};
  }
};
TESSERA_DEVICE Address place(int row, int chunk) {  // in a panel
  return static_cast<Address>(row * panel_bytes + ((chunk ^ (row & 7)) << 4));
}

// What the tensor cores, or for true float32 the ordinary ones, multiply.
template <Product P>
struct Format {
  static constexpr int bytes = rules::number_bytes(P);
  static constexpr int per_chunk = 16 / bytes, per_panel = rules::panel_columns(P);
  static constexpr bool halves = bytes == 2;
  static constexpr Stored stored = P == Product::bf16 ? Stored::bf16 : P == Product::f16 ? Stored::f16 : Stored::f32;
};

// A number inside panels.
template <Product P>
TESSERA_DEVICE Address place_of(const Panels& tile, int row, int column) {
  using F = Format<P>;
  const int within = column % F::per_panel;
  return tile.panel(column / F::per_panel) + place(row, within / F::per_chunk) +
         static_cast<Address>(within % F::per_chunk * F::bytes);
}
template <Product P>
TESSERA_DEVICE float get(Address at) {
  if constexpr (P == Product::bf16) return rules::bf16_to_float(load_half(at));
  else if constexpr (P == Product::f16) return rules::f16_to_float(load_half(at));
  else return rules::float_of_bits(load_word(at));
}
template <Product P>
TESSERA_DEVICE void put(Address at, float x) {
  if constexpr (P == Product::bf16) store_half(at, rules::float_to_bf16(x));
  else if constexpr (P == Product::f16) store_half(at, rules::float_to_f16(x));
  else store_word(at, rules::bits_of_float(x));
}
template <Product P>
TESSERA_DEVICE float rounded(float x) {
  if constexpr (P == Product::bf16) return rules::bf16_to_float(rules::float_to_bf16(x));
  else if constexpr (P == Product::f16) return rules::f16_to_float(rules::float_to_f16(x));
  else return x;
}
template <Product P>
TESSERA_DEVICE Word pack(float low, float high) {
  return Number < P == Product::bf16 ? rules::Float::bf16 : rules::Float::f16 > ::pack(low, high);
}

// One chunk of numbers of any format and stride, number by number; those past `columns` become zeros.
template <Product P>
TESSERA_DEVICE void gather(Address to, const View& from, Index at, int column, int columns, bool there) {
#pragma unroll 1
  for (int n = 0; n < Format<P>::per_chunk; ++n)
    put<P>(to + static_cast<Address>(n * Format<P>::bytes),
           there && column + n < columns ? read(from, at + (column + n) * from.step[3]) : 0.0f);
}

struct Columns {  // of an operand: panels [begin, end) of `count` numbers
  int begin, end, count;
};
// Fills panels of a tile by all threads of the block, in the background where rows come in whole chunks. `locate(row)`
// says where in `from` the row begins, or less than 0: then it becomes zeros and is not read.
template <Product P, class Locate>
TESSERA_DEVICE void load_panels(const Panels& tile, const View& from, Columns columns, Locate&& locate) {
  using F = Format<P>;
  const int thread = thread_index(), chunk = thread & 7;
  const bool copies = from.whole_chunks && from.dtype == F::stored;
#pragma unroll 1
  for (int row = thread >> 3; row < tile.rows; row += static_cast<int>(blockDim.x) >> 3) {
    const Index at = locate(row);
#pragma unroll 1
    for (int p = columns.begin; p < columns.end; ++p) {
      const int column = p * F::per_panel + chunk * F::per_chunk;
      const bool there = at >= 0 && column < columns.count;
      const Address to = tile.panel(p - columns.begin) + place(row, chunk);
      if (copies) copy_16(to, static_cast<const char*>(from.data) + (there ? (at + column) * F::bytes : 0), there);
      else gather<P>(to, from, at, column, columns.count, there);
    }
  }
}

// The same of rows that lie `step` bytes apart, in whole chunks of the product's own numbers; only those of two ranges
// are there.
template <Product P>
TESSERA_DEVICE void copy_panels(const Panels& tile, const char* from, Index step, Columns columns, Keys near,
                                Keys head) {
  using F = Format<P>;
  const int thread = thread_index(), chunk = thread & 7, rows_at_once = static_cast<int>(blockDim.x) >> 3;
  from += (thread >> 3) * step + chunk * 16;
#pragma unroll 2
  for (int row = thread >> 3; row < tile.rows; row += rows_at_once, from += rows_at_once * step) {
    const bool row_there = near.has(row) || head.has(row);
    const Address to = tile.first + place(row, chunk);
#pragma unroll 2
    for (int p = columns.begin; p < columns.end; ++p)
      copy_16(to + static_cast<Address>((p - columns.begin) * tile.rows * panel_bytes), from + p * panel_bytes,
              row_there && p * F::per_panel + chunk * F::per_chunk < columns.count);
  }
}

// Two numbers next to each other, those past `columns` left out.
TESSERA_DEVICE void write_pair(const View& view, Index at, int column, int columns, float low, float high) {
  if (column + 1 < columns && view.whole_chunks && view.dtype == Stored::bf16) {
    *reinterpret_cast<Word*>(static_cast<rules::Half*>(view.data) + at + column) = pack<Product::bf16>(low, high);
  } else if (column + 1 < columns && view.whole_chunks && view.dtype == Stored::f16) {
    *reinterpret_cast<Word*>(static_cast<rules::Half*>(view.data) + at + column) = pack<Product::f16>(low, high);
  } else {
    if (column < columns) write(view, at + column * view.step[3], low);
    if (column + 1 < columns) write(view, at + (column + 1) * view.step[3], high);
  }
}

}  // namespace tessera::device
