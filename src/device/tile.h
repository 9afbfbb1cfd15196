// Tiles of 16-bit numbers in shared memory. Row r's chunk c of 16 bytes lies at place c ^ (r % 8), so that eight rows
// of one column of chunks lie in eight different groups of banks, as ldmatrix reads them.
#pragma once
#include "device/ptx/portable.h"

namespace tessera::device {

template <int rows_, int columns_>
struct alignas(256) Tile {
  static constexpr int rows = rows_, columns = columns_;
  static constexpr int row_bytes = columns * 2, row_chunks = columns / 8;
  static_assert(row_chunks % 8 == 0);
  char bytes[rows * row_bytes];
};

// Where chunk `chunk` of row `row` lies in a tile.
template <int columns>
TESSERA_DEVICE Address place(int row, int chunk) {
  return static_cast<Address>(row * columns * 2 + ((chunk ^ (row & 7)) << 4));
}

// The row that this lane names to ldmatrix for a block of 16 rows and 16 columns, as an address in the tile at `tile`.
// The next 16 columns are `^ 32`, the one after `^ 64` ...; 16 rows further are `+ 16 * row_bytes`.
//   rows first: matrices 0 and 1 are rows 0-7 and 8-15 of columns 0-7 (a's operand order; transposed, b's)
//   columns first: matrices 0 and 1 are columns 0-7 and 8-15 of rows 0-7 (b's operand order)
template <int columns>
TESSERA_DEVICE Address rows_first(Address tile, int lane) {
  return tile + place<columns>(lane & 15, lane >> 4);
}
template <int columns>
TESSERA_DEVICE Address columns_first(Address tile, int lane) {
  return tile + place<columns>((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}

// Copies rows [0, rows) of global memory, `step` elements apart, into a tile by all threads of the block in the
// background. `there(row)`: rows that are not become zeros and are not read.
template <int rows, int columns, int threads, class There>
TESSERA_DEVICE void copy_tile(Address tile, const unsigned short* from, Index step, int thread, There&& there) {
  constexpr int chunks = columns / 8, rows_at_once = threads / chunks;
  static_assert(threads % chunks == 0 && rows % rows_at_once == 0 && (rows_at_once == 4 || rows_at_once % 8 == 0));
  const int row = thread / chunks, chunk = thread % chunks;
  const unsigned short* source = from + row * step + chunk * 8;
  const Address target = tile + place<columns>(row, chunk);
#pragma unroll
  for (int i = 0; i < rows / rows_at_once; ++i) {
    const int further = i * rows_at_once;
    copy_16((target ^ static_cast<Address>((further & 7) << 4)) + static_cast<Address>(further * columns * 2), source,
            there(row + further));
    source += rows_at_once * step;
  }
}

}  // namespace tessera::device
