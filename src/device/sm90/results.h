// What an item's rows leave in global memory: results and lse, or a split's sums and what all splits' come to.
#pragma once
#include "device/sm90/job.h"

namespace tessera::device {

struct RowSums {  // the sum of a row's exp(score - largest)
  float largest, sum;
};
// Of the four lanes that have a row.
TESSERA_DEVICE float sum_of_lanes(float x) {
  const float both = x + from_lane(x, 1);
  return both + from_lane(both, 2);
}
TESSERA_DEVICE float largest_of_lanes(float x) {
  const float both = fmaxf(x, from_lane(x, 1));
  return fmaxf(both, from_lane(both, 2));
}

template <Sm90ForwardSpec S>
class Sm90Results {
 public:
  TESSERA_DEVICE Sm90Results(const Sm90ForwardParams& p, Sm90Shared<S>& shared) : p_(p), shared_(shared) {}

  TESSERA_DEVICE bool is_split() const { return S.parts && p_.splits > 1; }

  // A warpgroup's rows that see no key.
  TESSERA_DEVICE void store_nothing(const Sm90Job& job, int group) const {
    const int thread = thread_index() & 127, first = job.first_row + 64 * group;
    if (joins()) {
      if (thread < 64) store_two(sums_at(64 * group + thread), minus_infinity, 0);
      return;
    }
    if (is_split()) {
      for (int n = thread; n < 64 * (p_.dim_v + 2); n += 128) {
        const int row = first + n / (p_.dim_v + 2), column = n % (p_.dim_v + 2);
        if (row < job.q.used) partial(job, row)[column] = column == p_.dim_v ? minus_infinity : 0;
      }
      return;
    }
    for (int n = thread; n < 64 * p_.dim_v / 8; n += 128) {
      const int row = first + n / (p_.dim_v / 8), column = n % (p_.dim_v / 8) * 8;
      if (row >= job.q.stored) break;
      store_chunk(out_at(job, row) + column, Chunk{});
      if (p_.lse && column == 0)
        p_.lse[row_at(job, row, p_.lse_step)] = p_.sinks && row < job.q.used ? sink_of(job) : minus_infinity;
    }
  }

  // Stores a row's lse, or what a split keeps (unit: what that is multiplied by), and says what its sums are multiplied
  // by when they are stored; 0 of a row that is empty. Of the four lanes that have the row the first writes.
  TESSERA_DEVICE float store_sum(const Sm90Job& job, int row, const RowSums& sums, float unit, bool wanted) const {
    if (!is_split()) return store_whole_sum(job, row, sums, wanted && lane() % 4 == 0);
    const bool writes = wanted && lane() % 4 == 0;
    const bool used = row < job.q.used, empty = !used || sums.sum == 0;  // a NaN is not empty
    const float largest = empty ? minus_infinity : sums.largest, sum = used ? sums.sum * unit : 0;
    if (writes && joins()) store_two(sums_at(row - job.first_row), largest, sum);
    else if (writes && used) store_two(partial(job, row) + p_.dim_v, largest, sum);
    return empty ? 0 : unit;
  }
  // Columns from `first` on of rows `row` and `row` + 8, by lanes as products have them. What is done to a row's chunks
  // is done to all at once: each waits for what was done before.
  template <int n>
  TESSERA_DEVICE void store_columns(const Sm90Job& job, int row, int first, const float (&out)[n],
                                    const float (&factor)[2], const bool (&wanted)[2]) const {
    if (is_split()) return store_partial_columns(job, row, first, out, factor, wanted);
    constexpr int chunks = (n / 4 + 3) / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Chunk row_chunks[chunks] = {};
#pragma unroll
      for (int i = 2 * r; i < n; i += 4)
        row_chunks[i / 16].word[i / 4 % 4] =
            factor[r] == 0 ? 0 : Type::pack(out[i] * factor[r], out[i + 1] * factor[r]);
#pragma unroll
      for (Chunk& chunk : row_chunks) transpose_4(chunk.word);
      unsigned short* const to = out_at(job, row + 8 * r);
      const bool stored = wanted[r] && row + 8 * r < job.q.stored;
#pragma unroll
      for (int i = 0; i < chunks; ++i) {
        const int column = first + 8 * (4 * i + lane() % 4);
        if (stored && column < p_.dim_v) store_chunk(to + column, row_chunks[i]);
      }
    }
  }

  // The splits of an item are the blocks of a cluster. Each leaves its sums where its tiles of k and v were, which no
  // group of it may still read; when all have, each joins some rows' of all, and stays until others have read its own.
  TESSERA_DEVICE bool joins() const {
    return S.parts && p_.joins;
  }
  TESSERA_DEVICE void begin_sums() const {
    if (joins()) meet(7, 128 * S.groups);
  }
  TESSERA_DEVICE void join(const Sm90Job& job) const {
    meet_cluster();
    constexpr int lanes = S.dim_v / 8, tile_rows = rules::tile_rows(S);  // lanes of a row, each twice four columns
    const int each = (tile_rows + p_.splits - 1) / p_.splits, begin = job.split * each;
    const int end = min(begin + each, min(tile_rows, job.q.stored - job.first_row));
    for (int n = thread_index() - 128; begin + n / lanes < end; n += 128 * S.groups)
      join_row(job, begin + n / lanes, n % lanes * 4);
    meet_cluster();
  }

 private:
  using Type = Number<S.dtype>;
  static TESSERA_DEVICE int lane() {
    return thread_index() & 31;
  }

  TESSERA_DEVICE Index row_at(const Sm90Job& job, int row, const rules::Steps& step) const {
    return job.q.plane * step.batch + (Index{job.q.first} + row) * step.row + job.item.head * step.head;
  }
  TESSERA_DEVICE unsigned short* out_at(const Sm90Job& job, int row) const {
    return static_cast<unsigned short*>(p_.out) + row_at(job, row, p_.out_step);
  }
  TESSERA_DEVICE float sink_of(const Sm90Job& job) const {
    return p_.sinks[job.item.head * p_.sink_step.head];
  }
  // Where shared memory has a split's sums of a row of the tile; the row's largest score and its sum of weights. (Eight
  // numbers more a row keep banks apart.)
  TESSERA_DEVICE Address columns_at(int row) const {
    constexpr int size = (S.dim_v + 8) * 4;
    static_assert(!S.parts || size * rules::tile_rows(S) <= sizeof shared_.k + sizeof shared_.v);
    return shared_address(shared_.k[0]) + row * size;
  }
  TESSERA_DEVICE Address sums_at(int row) const {
    return columns_at(row) + 4 * S.dim_v;
  }
  // Where the workspace has them.
  TESSERA_DEVICE float* partial(const Sm90Job& job, int row) const {
    const Index rows = p_.queries.cu ? p_.queries.rows : p_.queries.longest;
    const Index n = (Index{job.q.plane} * p_.heads + job.item.head) * rows + job.q.first + row;
    return p_.partials + (n * p_.splits + job.split) * rules::partial_size(p_.dim_v);
  }
  // Rows past the sequence's used ones are zeros and -inf, as empty rows are; a sink joins the sum of the others.
  TESSERA_DEVICE float store_whole_sum(const Sm90Job& job, int row, const RowSums& sums, bool writes) const {
    const bool used = row < job.q.used, empty = !used || sums.sum == 0;
    float sum = used ? sums.sum : 0, largest = empty ? minus_infinity : sums.largest, share = 1;
    if (p_.sinks && used) {
      const float sink = sink_of(job), whole = fmaxf(largest, sink);
      share = weight(largest, whole);
      sum = sum * share + weight(sink, whole);
      largest = whole;
    }
    if (p_.lse && writes && row < job.q.stored)
      p_.lse[row_at(job, row, p_.lse_step)] = largest + logf(sum);  // -inf of an empty row, whose sum is 0
    if constexpr (S.pairs) share *= p_.pairs.keep_scale;
    return empty ? 0 : __fdividef(share, sum);  // for results of 16 bits
  }
  static TESSERA_DEVICE float weight(float score, float largest) {
    return score == minus_infinity ? 0 : exp2_fast((score - largest) * log2_e);
  }
  template <int n>
  TESSERA_DEVICE void store_partial_columns(const Sm90Job& job, int row, int first, const float (&out)[n],
                                            const float (&factor)[2], const bool (&wanted)[2]) const {
    const int column = first + lane() % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!wanted[r] || row + 8 * r >= job.q.used) continue;
      const Address columns = columns_at(row + 8 * r - job.first_row) + 4 * column;
      float* const to = partial(job, row + 8 * r) + column;
#pragma unroll
      for (int i = 2 * r; i < n; i += 4) {
        const int at = 2 * i - 4 * r;
        const float x = out[i] * factor[r], y = out[i + 1] * factor[r];
        if (joins()) store_two(columns + 4 * at, x, y);
        else if (column + at < p_.dim_v) store_two(to + at, x, y);
      }
    }
  }
  // Of a row of the tile four columns from `column` on, and four half a row further. Splits' sums are all read before
  // any is used.
  TESSERA_DEVICE void join_row(const Sm90Job& job, int row, int column) const {
    constexpr int most = rules::most_joined;
    float of_split[most][2][4], sums_of[most][4];
#pragma unroll
    for (int i = 0; i < most; ++i) {
      sums_of[i][0] = minus_infinity, sums_of[i][1] = 0;
      if (i >= p_.splits || job.first_row + row >= job.q.used) continue;
      load_from_block(sums_of[i], in_block(sums_at(row), i));
      for (int half = 0; half < 2; ++half)
        load_from_block(of_split[i][half], in_block(columns_at(row) + 4 * (column + half * S.dim_v / 2), i));
    }
    RowSums sums = {minus_infinity, 0};
    float all[2][4] = {};
#pragma unroll
    for (int i = 0; i < most; ++i) sums.largest = fmaxf(sums.largest, sums_of[i][0]);
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (sums_of[i][1] == 0) continue;  // a split in which the row sees no key
      const float share = weight(sums_of[i][0], sums.largest);
      sums.sum = fmaf(sums_of[i][1], share, sums.sum);
#pragma unroll
      for (int c = 0; c < 8; ++c) all[c / 4][c % 4] = fmaf(of_split[i][c / 4][c % 4], share, all[c / 4][c % 4]);
    }
    const float factor = store_whole_sum(job, job.first_row + row, sums, column == 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = column + half * S.dim_v / 2;
      const auto two = [&](int c) {
        return factor == 0 ? 0 : Type::pack(all[half][c] * factor, all[half][c + 1] * factor);
      };
      if (first < p_.dim_v) store_two(out_at(job, job.first_row + row) + first, two(0), two(2));
    }
  }

  const Sm90ForwardParams& p_;
  Sm90Shared<S>& shared_;
};

}  // namespace tessera::device
