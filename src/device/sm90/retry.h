// Scores that left the range which `Weights` serves: a tile's are found once more, or whole rows attended, straight
// from global memory. Slow, and what spares the loop that serves all others a test.
#pragma once
#include "device/sm90/results.h"

namespace tessera::device {

// Sixteen rows of a warp. Sixteen keys at a time, and all of them for each part of out.
template <Sm90ForwardSpec S>
class Sm90Retry {
 public:
  // row: this lane's first, inside the sequence; its second is the eighth after it.
  TESSERA_DEVICE Sm90Retry(const Sm90ForwardParams& p, const Sm90Job& job, int row) : p_(p), job_(job), row_(row) {}

  // The rows' sums, and of out columns from `first` on, not yet divided.
  static constexpr int columns = 32;
  TESSERA_DEVICE void attend(int first, RowSums (&rows)[2], float (&out)[columns / 2]) const {
    rows[0] = rows[1] = {minus_infinity, 0};
#pragma unroll
    for (float& x : out) x = 0;
#pragma unroll 1
    for (int n = job_.steps.begin; n < job_.steps.end; ++n)
#pragma unroll 1
      for (int i = 0; i < S.tile_keys; i += 16) add_16_keys(job_.walk.tile(n) * S.tile_keys + i, first, rows, out);
#pragma unroll
    for (RowSums& row : rows) row.sum = sum_of_lanes(row.sum);
  }

  // Of sixteen keys that all rows see, as `Products` has them; of rows past the used ones zeros.
  TESSERA_DEVICE void find_seen_scores(int key, float (&s)[8]) const {
    if constexpr (S.pairs) find_scores(key, s);
    else find_products(key, s);
  }

 private:
  using Type = Number<S.dtype>;
  using Numbers = const unsigned short*;
  static TESSERA_DEVICE int lane() {
    return thread_index() & 31;
  }

  TESSERA_DEVICE Sm90Pairs<S> pairs() const {
    return {p_.pairs, job_.item.batch, job_.item.head, job_.q, job_.k, job_.offset};
  }
  // Where the i-th of this lane's scores of sixteen keys is: as `Products` has them.
  TESSERA_DEVICE int row_at(int i) const {
    return row_ + 8 * (i / 2 & 1);
  }
  static TESSERA_DEVICE int key_at(int first, int i) {
    return first + 8 * (i / 4) + lane() % 4 * 2 + i % 2;
  }

  TESSERA_DEVICE void add_16_keys(int key, int first, RowSums (&rows)[2], float (&out)[columns / 2]) const {
    float s[8] = {};
    find_scores(key, s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = rows[r].largest;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if ((i / 2 & 1) == r) largest = fmaxf(largest, s[i]);
      largest = largest_of_lanes(largest);
      const float shrink = weight(rows[r].largest, largest);
      rows[r] = {largest, rows[r].sum * shrink};
#pragma unroll
      for (int i = 0; i < columns / 2; ++i)
        if ((i / 2 & 1) == r) out[i] *= shrink;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      RowSums& row = rows[i / 2 & 1];
      row.sum += s[i] = weight(s[i], row.largest);
    }
    if constexpr (S.pairs)
#pragma unroll 1
      for (int i = 0; p_.pairs.drops && i < 8; ++i)
        if (!pairs().keeps(row_at(i), key_at(key, i), p_.heads)) s[i] = 0;
    add_values(out, first, key, s);
  }
  TESSERA_DEVICE float weight(float score, float largest) const {
    return score == minus_infinity ? 0 : exp2_fast((score - largest) * p_.scale_log2);
  }
  TESSERA_DEVICE void find_products(int key, float (&s)[8]) const {
    const Numbers q[2] = {row_of_q(row_), row_of_q(row_ + 8)};
    const Numbers k[2] = {row_of_k(p_.k, p_.k_step, key + lane() / 4), row_of_k(p_.k, p_.k_step, key + 8 + lane() / 4)};
#pragma unroll 4
    for (int d = 0; d < S.dim; d += 16) {
      const int column = d + lane() % 4 * 2;
      const Word a[4] = {two(q[0], column), two(q[1], column), two(q[0], column + 8), two(q[1], column + 8)};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float(&c)[4] = reinterpret_cast<float(&)[4]>(s[4 * n]);
        Type::multiply_add(c, a, two(k[n], column), two(k[n], column + 8));
      }
    }
  }
  TESSERA_DEVICE void find_scores(int key, float (&s)[8]) const {
    find_products(key, s);
    const rules::NarrowBand band = band_of(p_, job_.k, job_.offset);
#pragma unroll(S.pairs ? 1 : 8)  // little code, as long as it takes to compile
    for (int i = 0; i < 8; ++i) {
      const int row = row_at(i), at = key_at(key, i);
      const bool seen = row < job_.q.used && (keys_of(band.near(row)).has(at) || keys_of(band.head(row)).has(at));
      if (!seen) s[i] = minus_infinity;
      else if constexpr (S.pairs) s[i] = pairs().score_of(p_, s[i], row, at);
    }
  }
  TESSERA_DEVICE void add_values(float (&out)[columns / 2], int first, int key, const float (&w)[8]) const {
    const Word a[4] = {Type::pack(w[0], w[1]), Type::pack(w[2], w[3]), Type::pack(w[4], w[5]), Type::pack(w[6], w[7])};
    const SeenKeys seen = seen_keys(p_, job_);
    Numbers v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = key_at(key, i / 2 * 4 + i % 2);
      bool there = seen.has(at);
      if constexpr (S.pairs) there = there && !(p_.pairs.excluded && pairs().is_excluded(at));
      v[i] = there ? row_of_k(p_.v, p_.v_step, at) : nullptr;
    }
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
      const int column = first + 8 * n + lane() / 4;
      const auto number = [&](int i) -> Word { return v[i] && column < p_.dim_v ? v[i][column] : 0; };
      float(&c)[4] = reinterpret_cast<float(&)[4]>(out[4 * n]);
      Type::multiply_add(c, a, number(0) | number(1) << 16, number(2) | number(3) << 16);
    }
  }

  TESSERA_DEVICE Word two(Numbers row, int column) const {  // dims are multiples of 8
    return row && column < p_.dim ? *reinterpret_cast<const Word*>(row + column) : 0;
  }
  // Absent rows are nullptr.
  TESSERA_DEVICE Numbers row_of_q(int row) const {
    if (row >= job_.q.used) return nullptr;
    return static_cast<Numbers>(p_.q) + job_.q.plane * p_.q_step.batch + (Index{job_.q.first} + row) * p_.q_step.row +
           job_.item.head * p_.q_step.head;
  }
  TESSERA_DEVICE Numbers row_of_k(const void* all, const rules::Steps& step, int key) const {
    if (key >= job_.k.used) return nullptr;
    Index plane = job_.k.plane, row = Index{job_.k.first} + key;
    if constexpr (S.parts)
      if (p_.cache.page > 0) {
        plane = p_.cache.table[plane * p_.cache.table_row + key / p_.cache.page * p_.cache.table_step];
        row = key % p_.cache.page;
        if (plane < 0 || plane >= p_.cache.pages) return nullptr;
      }
    return static_cast<Numbers>(all) + plane * step.batch + row * step.row + job_.item.head / p_.group * step.head;
  }

  const Sm90ForwardParams& p_;
  const Sm90Job& job_;
  const int row_;
};

}  // namespace tessera::device
