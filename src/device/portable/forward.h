// Forward attention on the tensor cores that every chip from sm_80 on has (mma.sync).
//
// A block owns tile_rows query rows of one head, each warp some of them, with their sums in registers. It walks the
// tiles of keys that some of its rows see, last first: tile n + 1 is copied to shared memory while tile n is attended.
// Bands are run-time values; a tile that every row sees whole jumps over the test. (Two copies of the step, one without
// the test, were 2 % slower at dim 128 on h200; a kernel compiled for no mask at all was level.)
//
// Tiles lie at multiples of tile_keys, whatever a block's rows are, and a tile that a row does not see changes nothing
// of its sums; each row decides alone when it is rescaled. So a row's bits depend on nothing but its own keys.
#pragma once
#include "device/forward_item.h"
#include "device/tile.h"
#include "device/walk.h"
#include "rules/spec.h"

namespace tessera::device {

using rules::ForwardSpec;

struct Sequence {
  Rows q, k;
  rules::BandMask band;
  TESSERA_DEVICE bool sound() const { return q.sound && k.sound; }
};
TESSERA_DEVICE Sequence sequence(const ForwardParams& p, int batch) {
  Sequence s = {rows_of(p.queries, batch), rows_of(p.keys, batch), p.band};
  s.band.keys = s.k.used;
  if (p.corner == rules::Corner::bottom_right) s.band.offset = s.k.used - s.q.used;
  if (p.corner == rules::Corner::per_sequence) s.band.offset = p.corner_offsets[batch];
  return s;
}

struct alignas(16) Row {
  Keys near, head;  // that it keeps
};

// ------------------------------------------------------------------------------------------------- what a block does

// All that a block must know, found out by one thread. It stays in shared memory: registers are for the sums.
struct Job {
  Item item;
  Sequence sequence;
  Walk walk;
  const unsigned short *q, *k, *v;  // of the first row, of key 0
  bool nothing;
};
template <ForwardSpec S>
struct Shared {
  Tile<S.tile_rows, S.dim> q;  // at the end out, row by row
  Tile<S.tile_keys, S.dim> k[S.stages], v[S.stages];
  Row rows[S.tile_rows];
  float reference[S.tile_rows];
  Job job;
};

template <ForwardSpec S>
TESSERA_DEVICE void find_job(const ForwardParams& p, int block, Job& job) {
  const Item item = item_of(p, block);
  const Sequence s = sequence(p, item.batch);
  const Index first = Index{item.tile} * S.tile_rows;
  if (!s.sound() && p.status) atomicOr(p.status, rules::unsound_length);
  job.item = item;
  job.sequence = s;
  job.nothing = !s.sound() || first >= s.q.stored;
  if (job.nothing) return;
  job.walk = walk_of(s.band, rules::overlap({first, first + S.tile_rows}, {0, s.q.used}), S.tile_keys);
  const auto row = [](const void* data, const rules::Steps& step, const Rows& rows, Index n, int head) {
    return static_cast<const unsigned short*>(data) + rows.plane * step.batch + (rows.first + n) * step.row +
           head * step.head;
  };
  job.q = row(p.q, p.q_step, s.q, first, item.head);
  job.k = row(p.k, p.k_step, s.k, 0, item.head / p.group);
  job.v = row(p.v, p.v_step, s.k, 0, item.head / p.group);
}

// ------------------------------------------------------------------------------------------------- the rows of a warp

template <ForwardSpec S>
class WarpRows {
 public:
  static constexpr int blocks = S.tile_rows / S.warps / 16;  // of 16 rows
  static constexpr int key_blocks = S.tile_keys / 8, dim_blocks = S.dim / 8;
  using Type = Number<S.dtype>;

  TESSERA_DEVICE WarpRows(const ForwardParams& p, Shared<S>& shared) : p_(p), shared_(shared) {
    for (int n = lane(); n < 16 * blocks; n += 32) shared.reference[first() + n] = minus_infinity;
    __syncwarp();
  }

  // One tile of keys. If `masked`, some row does not keep all of it.
  TESSERA_DEVICE void attend(unsigned stage, int first_key, bool masked) {
    Scores s;
    Pairs pairs;
    if constexpr (S.pairs) load_pairs(pairs, first_key);
    multiply_keys(s, columns_first<S.dim>(shared_address(&shared_.k[stage]), lane()));
    if constexpr (S.pairs) apply_pairs(s, pairs);
    if (masked) mask(s, first_key);
    follow_largest(s);
    multiply_values(s, rows_first<S.dim>(shared_address(&shared_.v[stage]), lane()));
  }

  TESSERA_DEVICE void store() const;

 private:
  using Scores = float[blocks][key_blocks][4];

  TESSERA_DEVICE void multiply_keys(Scores& s, Address k) {
    const Address rows = rows_first<S.dim>(shared_address(&shared_.q) + first() * Tile<1, S.dim>::row_bytes, lane());
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int n = 0; n < key_blocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[b][n][i] = 0;
#pragma unroll
    for (int d = 0; d < S.dim / 16; ++d) {
      Word q[blocks][4];
#pragma unroll
      for (int b = 0; b < blocks; ++b) load_matrices(q[b], (rows ^ d * 32) + b * 16 * Tile<1, S.dim>::row_bytes);
#pragma unroll
      for (int n = 0; n < key_blocks / 2; ++n) {
        Word key[4];
        load_matrices(key, (k ^ d * 32) + n * 16 * Tile<1, S.dim>::row_bytes);
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
          Type::multiply_add(s[b][2 * n], q[b], key[0], key[1]);
          Type::multiply_add(s[b][2 * n + 1], q[b], key[2], key[3]);
        }
      }
    }
  }

  // Biases and keep masks of the scores, in the scores' order. They are on their way while keys are multiplied.
  struct Pairs {
    Word bias[S.pairs ? 2 : 1][key_blocks];
    unsigned short keep[S.pairs ? 2 : 1][key_blocks];
  };
  TESSERA_DEVICE void load_pairs(Pairs& pairs, int first_key) const {
    const Item item = shared_.job.item;
    const int column = first_key + lane() % 4 * 2, keys = p_.keys.longest;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = item.tile * S.tile_rows + first() + half * 8 + lane() / 4;
      const bool used = row < shared_.job.sequence.q.used;
      if (p_.bias) {
        const unsigned short* const from =
            p_.bias + item.batch * p_.bias_step.batch + item.head * p_.bias_step.head + row * p_.bias_step.row + column;
#pragma unroll
        for (int n = 0; n < key_blocks; ++n)
          pairs.bias[half][n] = used && column + n * 8 < keys ? *reinterpret_cast<const Word*>(from + n * 8) : 0;
      }
      if (p_.keep) {
        const unsigned char* const from =
            p_.keep + item.batch * p_.keep_step.batch + item.head * p_.keep_step.head + row * p_.keep_step.row + column;
#pragma unroll
        for (int n = 0; n < key_blocks; ++n)
          pairs.keep[half][n] = used ? load_keep(from + n * 8, keys - column - n * 8) : 0;
      }
    }
  }
  TESSERA_DEVICE unsigned short load_keep(const unsigned char* from, int keys) const {  // two, as far as there are keys
    if (keys <= 0) return 0;
    if (p_.keep_in_words) return *reinterpret_cast<const unsigned short*>(from);
    return static_cast<unsigned short>(from[0] | (keys > 1 ? from[1] << 8 : 0));
  }
  TESSERA_DEVICE void apply_pairs(Scores& s, const Pairs& pairs) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < key_blocks; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[0][n][half * 2 + i];
          if (p_.bias) {
            const float bias = Type::unpack(pairs.bias[half][n] >> i * 16);
            x = bias == minus_infinity ? bias : fmaf(x, p_.pair_scale, bias);
          } else {
            x *= p_.pair_scale;
          }
          if (p_.keep && !(pairs.keep[half][n] >> i * 8 & 0xFF)) x = minus_infinity;
        }
  }

  // As bits, a word for 32 keys: both bands become one test.
  TESSERA_DEVICE void mask(Scores& s, int first_key) {
    const Row* const rows = shared_.rows + first() + lane() / 4;
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int group = 0; group < key_blocks / 4; ++group) {
          const Row& row = rows[b * 16 + half * 8];
          const Word kept =
              (row.near.bits(first_key + group * 32) | row.head.bits(first_key + group * 32)) >> lane() % 4 * 2;
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (!(kept >> (n * 8 + i) & 1)) s[b][group * 4 + n][half * 2 + i] = minus_infinity;
        }
  }

  // Weights are exp2(scale (score - reference)), so that the reference's own weight is 1 exactly: a single fused
  // multiply and add would round scale * reference, and a row of one key would not return v. A row's reference is its
  // largest score so far, but follows it only once the weight would pass 2^slack: sums are seldom rescaled.
  TESSERA_DEVICE void follow_largest(const Scores& s) {
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      float shrink[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = minus_infinity;
#pragma unroll
        for (int n = 0; n < key_blocks; ++n) largest = fmaxf(fmaxf(largest, s[b][n][half * 2]), s[b][n][half * 2 + 1]);
        largest = fmaxf(largest, from_lane(largest, 1));
        largest = fmaxf(largest, from_lane(largest, 2));
        float& reference = reference_of(b, half);
        const float grown = (largest - reference) * p_.scale_log2;
        const bool follows = grown > p_.slack;  // false where both are -inf
        shrink[half] = follows ? exp2_fast(-grown) : 1;
        __syncwarp();
        if (follows && lane() % 4 == 0) reference = largest;
      }
      // By exactly 1 where a row did not ask for it.
      if (__any_sync(0xFFFFFFFFu, shrink[0] != 1 || shrink[1] != 1)) rescale(b, shrink);
    }
    __syncwarp();
  }
  // In shared memory, and this warp's alone: registers are for the sums.
  TESSERA_DEVICE float& reference_of(int b, int half) const {
    return shared_.reference[first() + b * 16 + half * 8 + lane() / 4];
  }

  TESSERA_DEVICE void rescale(int b, const float (&shrink)[2]) {
    sum_[b][0] *= shrink[0];
    sum_[b][1] *= shrink[1];
#pragma unroll
    for (int n = 0; n < dim_blocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[b][n][i] *= shrink[i / 2];
  }

  // Sixteen keys at a time, so that one's exponentials run beside the products of the one before.
  TESSERA_DEVICE void multiply_values(const Scores& s, Address v) {
    const float* const of_lane = shared_.reference + first() + lane() / 4;
    float references[blocks][2], sums[blocks][2] = {};
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float reference = of_lane[b * 16 + half * 8];
        references[b][half] = reference == minus_infinity ? 0 : reference;
      }
#pragma unroll
    for (int n = 0; n < key_blocks / 2; ++n) {
      Word weight[blocks][4];
#pragma unroll
      for (int b = 0; b < blocks; ++b)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          weight[b][half] = weights(s[b][2 * n], references[b][half], half, sums[b][half]);
          weight[b][2 + half] = weights(s[b][2 * n + 1], references[b][half], half, sums[b][half]);
        }
#pragma unroll
      for (int d = 0; d < dim_blocks / 2; ++d) {
        Word value[4];
        load_transposed(value, (v ^ d * 32) + n * 16 * Tile<1, S.dim>::row_bytes);
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
          Type::multiply_add(out_[b][2 * d], weight[b], value[0], value[1]);
          Type::multiply_add(out_[b][2 * d + 1], weight[b], value[2], value[3]);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < blocks; ++b) {  // tile by tile, or small weights would be lost beside a long row's sum
      sum_[b][0] += sums[b][0];
      sum_[b][1] += sums[b][1];
    }
  }
  TESSERA_DEVICE Word weights(const float (&s)[4], float reference, int half, float& sum) const {
    const float low = exp2_fast((s[half * 2] - reference) * p_.scale_log2);
    const float high = exp2_fast((s[half * 2 + 1] - reference) * p_.scale_log2);
    sum += low + high;
    return Type::pack(low, high);
  }

  // Read again wherever they are needed: registers are for the sums.
  static TESSERA_DEVICE int lane() {
    return thread_index() & 31;
  }
  static TESSERA_DEVICE int first() {
    return (thread_index() >> 5) * (16 * blocks);
  }  // of the warp's rows

  const ForwardParams& p_;
  Shared<S>& shared_;
  float sum_[blocks][2] = {};  // of this lane's columns
  float out_[blocks][dim_blocks][4] = {};
};

// out and lse of the warp's rows. Rows past the sequence's used ones are zeros and -inf, as empty rows are.
template <ForwardSpec S>
TESSERA_DEVICE void WarpRows<S>::store() const {
  const Item item = shared_.job.item;
  const Rows rows = shared_.job.sequence.q;
  const int tile_first = item.tile * S.tile_rows + first();  // in the sequence
  const Index out_base = rows.plane * p_.out_step.batch + (rows.first + Index{tile_first}) * p_.out_step.row +
                         item.head * p_.out_step.head;
  const Index lse_base = rows.plane * p_.lse_step.batch + (rows.first + Index{tile_first}) * p_.lse_step.row +
                         item.head * p_.lse_step.head;
  const Address staging =
      anew(shared_address(&shared_.q) + first() * Tile<1, S.dim>::row_bytes);  // this warp's rows alone
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = b * 16 + half * 8 + lane() / 4;
      const bool used = tile_first + row < rows.used, stored = tile_first + row < rows.stored;
      float sum = sum_[b][half];
      sum += from_lane(sum, 1);
      sum += from_lane(sum, 2);
      const bool empty = !used || sum == 0;  // a NaN is not empty
      const float inverse = 1 / sum;
      if (p_.lse && stored && lane() % 4 == 0)
        p_.lse[lse_base + row * p_.lse_step.row] =
            empty ? minus_infinity : reference_of(b, half) * p_.scale + logf(sum);
#pragma unroll
      for (int n = 0; n < dim_blocks; ++n) {
        const float low = empty ? 0 : out_[b][n][half * 2] * inverse;
        const float high = empty ? 0 : out_[b][n][half * 2 + 1] * inverse;
        if (!p_.out_is_f32) {
          store_word(staging + place<S.dim>(row, n) + lane() % 4 * 4, Type::pack(low, high));
        } else if (stored) {
          float* const to = static_cast<float*>(p_.out) + out_base + row * p_.out_step.row + n * 8 + lane() % 4 * 2;
          to[0] = low;
          to[1] = high;
        }
      }
    }
  if (p_.out_is_f32) return;
  __syncwarp();
  constexpr int chunks = S.dim / 8, rows_at_once = 32 / chunks;
#pragma unroll
  for (int i = 0; i < 16 * blocks / rows_at_once; ++i) {
    const int row = i * rows_at_once + lane() / chunks, chunk = lane() % chunks;
    if (tile_first + row < rows.stored)
      store_chunk(static_cast<unsigned short*>(p_.out) + out_base + row * p_.out_step.row + chunk * 8,
                  load_chunk(staging + place<S.dim>(row, chunk)));
  }
}

// -------------------------------------------------------------------------------------------------------- the kernel

// Rows of a packed q past its last sequence, by the blocks past the last item.
TESSERA_DEVICE void clear_tail(const ForwardParams& p, int dim, int block, int blocks) {
  const int* const cu = p.queries.cu;
  bool unsound = cu[0] != 0 || cu[p.batch] > p.queries.rows;
  for (int b = thread_index(); b < p.batch; b += static_cast<int>(blockDim.x)) unsound |= cu[b + 1] < cu[b];
  if (__syncthreads_or(unsound)) {
    if (p.status && threadIdx.x == 0) atomicOr(p.status, rules::unsound_length);
    return;
  }
  const int end = cu[p.batch];
  const Index numbers = (p.queries.rows - end) * p.heads * dim;
  for (Index n = block * Index{blockDim.x} + threadIdx.x; n < numbers; n += blocks * Index{blockDim.x}) {
    const Index row = end + n / dim / p.heads, head = n / dim % p.heads, d = n % dim;
    const Index at = row * p.out_step.row + head * p.out_step.head + d;
    if (p.out_is_f32) static_cast<float*>(p.out)[at] = 0;
    else static_cast<unsigned short*>(p.out)[at] = 0;
    if (p.lse && d == 0) p.lse[row * p.lse_step.row + head * p.lse_step.head] = minus_infinity;
  }
}

template <ForwardSpec S>
TESSERA_DEVICE void forward(const ForwardParams& p, Shared<S>& shared) {
  constexpr int threads = 32 * S.warps;
  const int items = p.heads * p.batch * p.row_tiles, block = static_cast<int>(blockIdx.x), thread = thread_index();
  if (block >= items) return clear_tail(p, S.dim, block - items, static_cast<int>(gridDim.x) - items);
  const Job& job = shared.job;
  if (thread == 0) find_job<S>(p, block, shared.job);
  __syncthreads();
  if (job.nothing) return;

  const int first_row = job.item.tile * S.tile_rows, used = job.sequence.q.used;
  const auto stage_of = [](int n) { return static_cast<unsigned>(n) % S.stages; };
  const auto copy_keys = [&](int n) {  // keys that no row sees become zeros: what lies there may be anything
    if (n < job.walk.count) {
      const int first_key = job.walk.tile(n) * S.tile_keys;
      const unsigned stage = stage_of(n);
      const int thread = thread_index();
      const auto there = [&, near = job.walk.near, far = job.walk.head](int row) {
        return near.has(first_key + row) || far.has(first_key + row);
      };
      copy_tile<S.tile_keys, S.dim, threads>(shared_address(&shared.k[stage]), job.k + first_key * p.k_step.row,
                                             p.k_step.row, thread, there);
      copy_tile<S.tile_keys, S.dim, threads>(shared_address(&shared.v[stage]), job.v + first_key * p.v_step.row,
                                             p.v_step.row, thread, there);
    }
    close_copies();
  };
  copy_tile<S.tile_rows, S.dim, threads>(shared_address(&shared.q), job.q, p.q_step.row, thread,
                                         [&](int row) { return first_row + row < used; });
  for (int n = 0; n < S.stages - 1; ++n) copy_keys(n);
  for (int row = thread; row < S.tile_rows; row += threads) {
    Row keeps = {};
    const rules::BandMask& band = job.sequence.band;
    if (first_row + row < used) keeps = {keys_of(band.near(first_row + row)), keys_of(band.head(first_row + row))};
    shared.rows[row] = keeps;
  }

  WarpRows<S> mine(p, shared);
  const auto next = [&](int n) {  // tile n has come, and nobody still reads the stage that tile n + stages - 1 takes
    wait_copies<S.stages - 2>();
    __syncthreads();
    copy_keys(n + S.stages - 1);
  };
  // With 255 registers in use, ptxas 13.0 spills a few bytes on sm_90 if this count stays in one, elsewhere if not.
  const int count = job.walk.count;
#pragma unroll 1
  for (int n = 0; n < (is_sm90 && S.dim == 128 ? job.walk.count : count); ++n) {
    next(n);
    mine.attend(stage_of(n), job.walk.tile(n) * S.tile_keys, !job.walk.clean(n));
  }
  wait_copies<0>();  // of q, where nothing was visited
  __syncthreads();
  mine.store();
}

}  // namespace tessera::device
