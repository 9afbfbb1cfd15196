// Backward attention on the tensor cores that every chip from sm_80 on has (mma.sync).
//
// A block owns tile_keys keys of one KV head, each warp some of them, with the sums of dK and dV in registers over all
// query heads that share the keys. It walks the tiles of queries that see some of its keys. Scores are made the other
// way round, keys as rows: so the weights and dS of a warp are at once the left operands of its dV and dK. Only for dQ,
// which sums over all keys, dS goes through shared memory; dQ's sums are added to a float32 buffer in the order in
// which lanes hold them, and `convert` brings them into dq's own.
#pragma once
#include "device/tile.h"
#include "device/walk.h"
#include "rules/params.h"
#include "rules/spec.h"

namespace tessera::device {

using rules::BackwardParams;
using rules::BackwardSpec;

struct BackwardRow {
  Keys near, head;  // queries that see a key
};

struct BackwardJob {
  int batch, kv, first_key;
  Rows q, k;
  Keys seen;                   // queries that see some key of the block
  int tile_begin, tile_end;    // of queries
  int clean_begin, clean_end;  // tiles whose every query sees every key
  bool nothing;
};

template <BackwardSpec S>
struct BackwardShared {
  Tile<S.tile_keys, S.dim> k, v;
  Tile<S.tile_rows, S.dim> q[2], dout[2];
  Tile<S.tile_keys, S.tile_rows> ds[2];  // keys are rows; of this tile and the one before
  float lse[2][S.tile_rows], term[2][S.tile_rows];
  BackwardRow rows[S.tile_keys];
  BackwardJob job;
};

// Where the sums of dQ of a block of 16 rows lie: fragments of 8 columns, 32 lanes x 4 numbers each. Rows of a sequence
// begin at a multiple of 64, wherever it lies in a packed q.
TESSERA_DEVICE Index first_sum_row(const BackwardParams& p, const Rows& q, int batch) {
  return p.queries.cu ? (Index{q.first} / 64 + batch) * 64 : Index{q.plane} * p.sum_rows;
}
TESSERA_DEVICE float* sums_of(const BackwardParams& p, Index sum_row, int head, int dim) {
  return p.dq_sums + ((Index{head} * p.sum_rows_in_all + sum_row) * dim);
}

template <BackwardSpec S>
class BackwardBlock {
 public:
  static constexpr int blocks = S.tile_keys / S.warps / 16;  // of 16 keys a warp
  static constexpr int query_blocks = S.tile_rows / 8, dim_blocks = S.dim / 8;
  // dQ's share of a warp: rows x columns.
  static constexpr int dq_rows = S.dim == 128 ? 32 : S.tile_rows / 2, dq_across = S.tile_rows / dq_rows;
  static constexpr int dq_columns = S.dim / (S.warps / dq_across);
  using Type = Number<S.dtype>;

  TESSERA_DEVICE BackwardBlock(const BackwardParams& p, BackwardShared<S>& shared) : p_(p), shared_(shared) {}

  TESSERA_DEVICE void attend(unsigned stage, int tile, bool masked) {
    float s[blocks][query_blocks][4], dp[blocks][query_blocks][4];
    multiply(s, shared_address(&shared_.k), shared_address(&shared_.q[stage]));
    // Before the exponentials where registers allow it.
    constexpr bool both = S.tile_rows == 64;
    if (both) multiply(dp, shared_address(&shared_.v), shared_address(&shared_.dout[stage]));
    if (masked) mask(s, tile * S.tile_rows);
    weigh(s, stage);
    add(dv_, s, shared_address(&shared_.dout[stage]));
    if (!both) multiply(dp, shared_address(&shared_.v), shared_address(&shared_.dout[stage]));
    find_ds(s, dp, stage);
    store_ds(s, stage);
    add(dk_, s, shared_address(&shared_.q[stage]));
  }
  // dQ of this warp's share of a tile: dS of all keys times K. A tile later, so that warps need to meet only once a
  // tile.
  TESSERA_DEVICE void add_dq(unsigned stage, int head, int tile);

  TESSERA_DEVICE void store();

 private:
  using Scores = float[blocks][query_blocks][4];
  using Sums = float[blocks][dim_blocks][4];

  // scores = the warp's rows of `keys` times `queries`, transposed.
  TESSERA_DEVICE void multiply(Scores& s, Address keys, Address queries) {
    const Address rows = rows_first<S.dim>(keys + first() * Tile<1, S.dim>::row_bytes, lane());
    const Address columns = columns_first<S.dim>(queries, lane());
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int n = 0; n < query_blocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[b][n][i] = 0;
#pragma unroll
    for (int d = 0; d < S.dim / 16; ++d) {
      Word key[blocks][4];
#pragma unroll
      for (int b = 0; b < blocks; ++b) load_matrices(key[b], (rows ^ d * 32) + b * 16 * Tile<1, S.dim>::row_bytes);
#pragma unroll
      for (int n = 0; n < query_blocks / 2; ++n) {
        Word query[4];
        load_matrices(query, (columns ^ d * 32) + n * 16 * Tile<1, S.dim>::row_bytes);
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
          Type::multiply_add(s[b][2 * n], key[b], query[0], query[1]);
          Type::multiply_add(s[b][2 * n + 1], key[b], query[2], query[3]);
        }
      }
    }
  }
  // sums += weights (keys x queries) times rows of `from` (queries x dim).
  TESSERA_DEVICE void add(Sums& sums, const Scores& s, Address from) {
    const Address rows = rows_first<S.dim>(from, lane());
#pragma unroll
    for (int n = 0; n < query_blocks / 2; ++n) {
      Word weight[blocks][4];
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
        weight[b][0] = Type::pack(s[b][2 * n][0], s[b][2 * n][1]);
        weight[b][1] = Type::pack(s[b][2 * n][2], s[b][2 * n][3]);
        weight[b][2] = Type::pack(s[b][2 * n + 1][0], s[b][2 * n + 1][1]);
        weight[b][3] = Type::pack(s[b][2 * n + 1][2], s[b][2 * n + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < dim_blocks / 2; ++d) {
        Word value[4];
        load_transposed(value, (rows ^ d * 32) + n * 16 * Tile<1, S.dim>::row_bytes);
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
          Type::multiply_add(sums[b][2 * d], weight[b], value[0], value[1]);
          Type::multiply_add(sums[b][2 * d + 1], weight[b], value[2], value[3]);
        }
      }
    }
  }

  // As bits, a word for 32 queries.
  TESSERA_DEVICE void mask(Scores& s, int first_row) const {
    const BackwardRow* const rows = shared_.rows + first() + lane() / 4;
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int group = 0; group < query_blocks / 4; ++group) {
          const BackwardRow& row = rows[b * 16 + half * 8];
          const Word kept =
              (row.near.bits(first_row + group * 32) | row.head.bits(first_row + group * 32)) >> lane() % 4 * 2;
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (!(kept >> (n * 8 + i) & 1)) s[b][group * 4 + n][half * 2 + i] = minus_infinity;
        }
  }
  TESSERA_DEVICE void weigh(Scores& s, unsigned stage) const {
#pragma unroll
    for (int n = 0; n < query_blocks; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float lse = shared_.lse[stage][n * 8 + lane() % 4 * 2 + i];
#pragma unroll
        for (int b = 0; b < blocks; ++b)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& x = s[b][n][half * 2 + i];
            x = exp2_fast(fmaf(x, p_.scale_log2, -lse));
          }
      }
  }
  TESSERA_DEVICE void find_ds(Scores& s, const Scores& dp, unsigned stage) const {
#pragma unroll
    for (int n = 0; n < query_blocks; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float term = shared_.term[stage][n * 8 + lane() % 4 * 2 + i];
#pragma unroll
        for (int b = 0; b < blocks; ++b)
#pragma unroll
          for (int half = 0; half < 2; ++half) s[b][n][half * 2 + i] *= dp[b][n][half * 2 + i] + term;
      }
  }
  TESSERA_DEVICE void store_ds(const Scores& s, unsigned stage) const {
    const Address tile = shared_address(&shared_.ds[stage]);
#pragma unroll
    for (int b = 0; b < blocks; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < query_blocks; ++n)
          store_word(tile + place<S.tile_rows>(first() + b * 16 + half * 8 + lane() / 4, n) + lane() % 4 * 4,
                     Type::pack(s[b][n][half * 2], s[b][n][half * 2 + 1]));
  }

  TESSERA_DEVICE void store_sums(const Sums& sums, float factor, const rules::Steps& step, void* to);

  static TESSERA_DEVICE int lane() {
    return thread_index() & 31;
  }
  static TESSERA_DEVICE int warp() {
    return thread_index() >> 5;
  }
  static TESSERA_DEVICE int first() {
    return warp() * (16 * blocks);
  }  // of the warp's keys

  const BackwardParams& p_;
  BackwardShared<S>& shared_;
  Sums dk_ = {}, dv_ = {};
};

template <BackwardSpec S>
TESSERA_DEVICE void BackwardBlock<S>::add_dq(unsigned stage, int head, int tile) {
  const int row = warp() % dq_across * dq_rows, column = warp() / dq_across * dq_columns;
  float sum[dq_rows / 16][dq_columns / 8][4] = {};
  const Address ds = columns_first<S.tile_rows>(shared_address(&shared_.ds[stage]), lane());
  const Address k = rows_first<S.dim>(shared_address(&shared_.k), lane());
#pragma unroll
  for (int n = 0; n < S.tile_keys / 16; ++n) {
    Word x[dq_rows / 16][4];
#pragma unroll
    for (int r = 0; r < dq_rows / 16; ++r)
      load_transposed(x[r], (ds ^ static_cast<Address>((row + r * 16) * 2)) + n * 16 * Tile<1, S.tile_rows>::row_bytes);
#pragma unroll
    for (int d = 0; d < dq_columns / 16; ++d) {
      Word y[4];
      const int at = column + d * 16;
      load_transposed(y, (k ^ static_cast<Address>(at * 2)) + n * 16 * Tile<1, S.dim>::row_bytes);
#pragma unroll
      for (int r = 0; r < dq_rows / 16; ++r) {
        Type::multiply_add(sum[r][2 * d], x[r], y[0], y[1]);
        Type::multiply_add(sum[r][2 * d + 1], x[r], y[2], y[3]);
      }
    }
  }
  const BackwardJob& job = shared_.job;
#pragma unroll
  for (int r = 0; r < dq_rows / 16; ++r) {
    const int first_row = tile * S.tile_rows + row + r * 16;
    if (first_row >= job.q.used) continue;
    float* const to =
        sums_of(p_, first_sum_row(p_, job.q, job.batch) + first_row, head, S.dim) + (column / 8 * 32 + lane()) * 4;
#pragma unroll
    for (int d = 0; d < dq_columns / 8; ++d) add_to_4(to + d * 128, sum[r][d]);
  }
}

// dK and dV of the warp's keys, row by row through the places of k and v.
template <BackwardSpec S>
TESSERA_DEVICE void BackwardBlock<S>::store() {
  store_sums(dk_, p_.scale, p_.dk_step, p_.dk);
  store_sums(dv_, 1, p_.dv_step, p_.dv);
}
template <BackwardSpec S>
TESSERA_DEVICE void BackwardBlock<S>::store_sums(const Sums& sums, float factor, const rules::Steps& step, void* to) {
  if (!to) return;
  const BackwardJob& job = shared_.job;
  const Address staging =
      anew(shared_address(&shared_.k) + first() * Tile<1, S.dim>::row_bytes);  // this warp's rows alone
  __syncwarp();
#pragma unroll
  for (int b = 0; b < blocks; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < dim_blocks; ++n)
        store_word(staging + place<S.dim>(b * 16 + half * 8 + lane() / 4, n) + lane() % 4 * 4,
                   Type::pack(sums[b][n][half * 2] * factor, sums[b][n][half * 2 + 1] * factor));
  __syncwarp();
  constexpr int chunks = S.dim / 8, rows_at_once = 32 / chunks;
  const Index base =
      job.k.plane * step.batch + (Index{job.k.first} + job.first_key + first()) * step.row + job.kv * step.head;
#pragma unroll
  for (int i = 0; i < 16 * blocks / rows_at_once; ++i) {
    const int row = i * rows_at_once + lane() / chunks, chunk = lane() % chunks;
    if (job.first_key + first() + row < job.k.stored)
      store_chunk(static_cast<unsigned short*>(to) + base + row * step.row + chunk * 8,
                  load_chunk(staging + place<S.dim>(row, chunk)));
  }
}

// -------------------------------------------------------------------------------------------------------- the kernel

template <BackwardSpec S>
TESSERA_DEVICE void find_job(const BackwardParams& p, int block, BackwardJob& job, rules::BandMask& band) {
  const int heads = p.heads_kv * p.batch, whole = p.section * p.key_tiles;
  const int first = block / whole * p.section, side_by_side = min(p.section, heads - first), rest = block % whole;
  const int pair = first + rest % side_by_side;
  job = {};
  job.batch = pair / p.heads_kv;
  job.kv = pair % p.heads_kv;
  job.first_key = rest / side_by_side * S.tile_keys;  // under a causal mask the first keys are seen by most queries
  job.q = rows_of(p.queries, job.batch);
  job.k = rows_of(p.keys, job.batch);
  band = p.band;
  band.keys = job.k.used;
  if (p.corner == rules::Corner::bottom_right) band.offset = job.k.used - job.q.used;
  if (p.corner == rules::Corner::per_sequence) band.offset = p.corner_offsets[job.batch];
  const bool sound = job.q.sound && job.k.sound;
  if (!sound && p.status) atomicOr(p.status, rules::unsound_length);
  job.nothing = !sound || job.first_key >= job.k.stored;
  const Range keys = rules::overlap({job.first_key, job.first_key + S.tile_keys}, {0, job.k.used});
  const Range queries = {0, job.q.used};
  if (job.nothing || keys.empty() || queries.empty()) return;
  const Range seen = rules::rows_visiting(band, queries, keys);
  job.seen = keys_of(seen);
  job.tile_begin = job.seen.begin / S.tile_rows;
  job.tile_end = (job.seen.end + S.tile_rows - 1) / S.tile_rows;
  if (keys.size() < S.tile_keys) return;  // keys that are not there are masked
  const Keys full =
      keys_of(rules::overlap(queries, {band.rows_near(keys.end - 1).begin, band.rows_near(keys.begin).end}));
  job.clean_begin = (full.begin + S.tile_rows - 1) / S.tile_rows;
  job.clean_end = full.end / S.tile_rows;
}

template <BackwardSpec S>
TESSERA_DEVICE void backward(const BackwardParams& p, BackwardShared<S>& shared) {
  constexpr int threads = 32 * S.warps;
  const int thread = thread_index();
  const BackwardJob& job = shared.job;
  rules::BandMask& band = *reinterpret_cast<rules::BandMask*>(&shared.ds[1]);  // until the first dS
  if (thread == 0) find_job<S>(p, static_cast<int>(blockIdx.x), shared.job, band);
  __syncthreads();
  if (job.nothing) return;

  const auto source = [&](const void* data, const rules::Steps& step, const Rows& rows, int head) {
    return static_cast<const unsigned short*>(data) + rows.plane * step.batch + Index{rows.first} * step.row +
           head * step.head;
  };
  const auto copy_keys = [&](auto& tile, const void* data, const rules::Steps& step) {
    copy_tile<S.tile_keys, S.dim, threads>(
        shared_address(&tile), source(data, step, job.k, job.kv) + job.first_key * step.row, step.row, thread,
        [&](int row) {  // keys that nobody sees become zeros: what lies there may be anything
          const BackwardRow& key = shared.rows[row];
          return key.near.end > key.near.begin || key.head.end > key.head.begin;
        });
  };
  // All heads' tiles of queries, one after the other.
  struct Place {
    int head, tile;
    unsigned stage;
  };
  const auto after = [&](const Place& at) {
    const bool last = at.tile + 1 == job.tile_end;
    return Place{at.head + last, last ? job.tile_begin : at.tile + 1, at.stage ^ 1};
  };
  const auto add_dq_before = [&](BackwardBlock<S>& mine, const Place& at) {
    const bool first = at.tile == job.tile_begin;
    const int head = at.head - first;
    if (head >= job.kv * p.group) mine.add_dq(at.stage ^ 1, head, first ? job.tile_end - 1 : at.tile - 1);
  };
  const auto copy_queries = [&](const Place& at) {
    if (at.head < (job.kv + 1) * p.group) {
      const int head = at.head, first = at.tile * S.tile_rows;
      const unsigned stage = at.stage;
      const int thread = thread_index();
      const auto there = [&, seen = job.seen](int row) { return seen.has(first + row); };
      copy_tile<S.tile_rows, S.dim, threads>(shared_address(&shared.q[stage]),
                                             source(p.q, p.q_step, job.q, head) + first * p.q_step.row, p.q_step.row,
                                             thread, there);
      copy_tile<S.tile_rows, S.dim, threads>(shared_address(&shared.dout[stage]),
                                             source(p.dout, p.dout_step, job.q, head) + first * p.dout_step.row,
                                             p.dout_step.row, thread, there);
      if (thread < S.tile_rows) {
        const Index stored = p.queries.cu ? p.queries.rows : p.queries.longest;
        const Index at = (Index{job.q.plane} * p.heads + head) * stored + job.q.first + first + thread;
        copy_4(shared_address(&shared.lse[stage][thread]), p.row_lse + at, there(thread));
        copy_4(shared_address(&shared.term[stage][thread]), p.row_term + at, there(thread));
      }
    }
    close_copies();
  };
  for (int row = thread; row < S.tile_keys; row += threads) {
    const Index key = job.first_key + row;
    const Range queries = {0, job.q.used};
    BackwardRow seen = {};
    if (key < job.k.used)
      seen = {keys_of(rules::overlap(band.rows_near(key), queries)),
              keys_of(rules::overlap(band.rows_heading(key), queries))};
    shared.rows[row] = seen;
  }
  __syncthreads();
  copy_keys(shared.k, p.k, p.k_step);
  copy_keys(shared.v, p.v, p.v_step);
  Place at = {job.tile_begin < job.tile_end ? job.kv * p.group : (job.kv + 1) * p.group, job.tile_begin, 0};
  copy_queries(at);
  BackwardBlock<S> mine(p, shared);
#pragma unroll 1
  for (; at.head < (job.kv + 1) * p.group; at = after(at)) {
    wait_copies<0>();
    __syncthreads();  // the tile and the dS before are there, and nobody still reads the places of the next
    copy_queries(after(at));
    // Half of the warps add it before the tile and half after, so that products of some run beside exponentials of
    // others.
    const bool early = thread_index() < threads / 2;
    if (early) add_dq_before(mine, at);
    mine.attend(at.stage, at.tile, at.tile < job.clean_begin || at.tile >= job.clean_end);
    if (!early) add_dq_before(mine, at);
  }
  wait_copies<0>();
  __syncthreads();
  if (job.tile_begin < job.tile_end) add_dq_before(mine, at);
  __syncthreads();  // K's place becomes that of results
  mine.store();
}

// ------------------------------------------------------------------------------------------------ before and after

// A warp takes sixteen rows of one head at a time.
struct RowGroup {
  int batch, head, first;
  Rows q;
};
template <class Do>
TESSERA_DEVICE void each_group(const BackwardParams& p, Do&& act) {
  const int warps = static_cast<int>(blockDim.x) >> 5;
  const Index groups = (p.queries.longest + 15) / 16, all = Index{p.batch} * p.heads * groups;
  for (Index n = Index{blockIdx.x} * warps + (thread_index() >> 5); n < all; n += Index{gridDim.x} * warps) {
    const Index pair = n / groups;
    const int batch = static_cast<int>(pair / p.heads);
    const Rows q = rows_of(p.queries, batch);
    if (q.sound)
      act(RowGroup{batch, static_cast<int>(pair - Index{batch} * p.heads), static_cast<int>(n - pair * groups) * 16,
                   q});
  }
}
TESSERA_DEVICE Index place_of(const RowGroup& g, int row, const rules::Steps& step) {
  return g.q.plane * step.batch + (Index{g.q.first} + g.first + row) * step.row + g.head * step.head;
}

// Of each row and head: lse as a power of 2, +inf where the row keeps nothing, dLSE - dO . out, and dQ's sums as zeros.
template <int dim>
TESSERA_DEVICE void prepare(const BackwardParams& p) {
  constexpr int lanes_a_row = dim / 8, rows_at_once = 32 / lanes_a_row, steps = 16 / rows_at_once;
  const auto number = [&](Word w) {
    return p.is_f16 ? Number<rules::Float::f16>::unpack(w) : Number<rules::Float::bf16>::unpack(w);
  };
  each_group(p, [&](const RowGroup& g) {
    const int lane = thread_index() & 31, rows = g.q.used - g.first;
    if (rows <= 0) return;
    float* const sums = sums_of(p, first_sum_row(p, g.q, g.batch) + g.first, g.head, dim) + lane * 4;
#pragma unroll
    for (int d = 0; d < dim / 8; ++d) store_chunk(sums + d * 128, Chunk{});
    Chunk out[steps], dout[steps];
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int row = i * rows_at_once + lane / lanes_a_row, column = lane % lanes_a_row * 8;
      out[i] = dout[i] = {};
      if (row >= rows) continue;
      out[i] = load_chunk(static_cast<const unsigned short*>(p.out) + place_of(g, row, p.out_step) + column);
      dout[i] = load_chunk(static_cast<const unsigned short*>(p.dout) + place_of(g, row, p.dout_step) + column);
    }
    float mine = 0;  // of row `lane`
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      float delta = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          delta = fmaf(number(out[i].word[w] >> half * 16), number(dout[i].word[w] >> half * 16), delta);
#pragma unroll
      for (int lanes = lanes_a_row / 2; lanes > 0; lanes /= 2) delta += from_lane(delta, lanes);
      const float other = of_lane(delta, lane % rows_at_once * lanes_a_row);
      if (lane / rows_at_once == i) mine = other;
    }
    if (lane >= 16 || lane >= rows) return;
    const Index stored = p.queries.cu ? p.queries.rows : p.queries.longest;
    const Index to = (Index{g.q.plane} * p.heads + g.head) * stored + g.q.first + g.first + lane;
    const float lse = p.lse[place_of(g, lane, p.lse_step)];
    const float dlse = p.dlse ? p.dlse[place_of(g, lane, p.dlse_step)] : 0;
    p.row_lse[to] = lse == minus_infinity ? infinity : lse * log2_e;
    p.row_term[to] = lse == minus_infinity ? 0 : dlse - mine;
  });
}

// dQ's sums become dq. Rows that no sequence uses become zeros.
template <int dim>
TESSERA_DEVICE void convert(const BackwardParams& p) {
  const auto pack = [&](float low, float high) {
    return p.is_f16 ? Number<rules::Float::f16>::pack(low, high) : Number<rules::Float::bf16>::pack(low, high);
  };
  each_group(p, [&](const RowGroup& g) {
    const int lane = thread_index() & 31, rows = g.q.stored - g.first, used = g.q.used - g.first;
    if (rows <= 0) return;
    const float* const sums = sums_of(p, first_sum_row(p, g.q, g.batch) + g.first, g.head, dim) + lane * 4;
    Chunk sum[dim / 8];
#pragma unroll
    for (int d = 0; d < dim / 8; ++d) sum[d] = used > 0 ? load_chunk(sums + d * 128) : Chunk{};
#pragma unroll
    for (int d = 0; d < dim / 8; d += 4)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = half * 8 + lane / 4;
        Chunk c;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float low = rules::float_of_bits(sum[d + i].word[half * 2]) * p.scale;
          const float high = rules::float_of_bits(sum[d + i].word[half * 2 + 1]) * p.scale;
          c.word[i] = row < used ? pack(low, high) : 0;
        }
        transpose_4(c.word);
        if (row < rows)
          store_chunk(static_cast<unsigned short*>(p.dq) + place_of(g, row, p.dq_step) + (d + lane % 4) * 8, c);
      }
  });
}

template <BackwardSpec S>
TESSERA_DEVICE void run_part(const BackwardParams& p, char* memory) {
  using rules::BackwardPart;
  if constexpr (S.part == BackwardPart::prepare) {
    prepare<S.dim>(p);
  } else if constexpr (S.part == BackwardPart::convert) {
    convert<S.dim>(p);
  } else {
    static_assert(sizeof(BackwardShared<S>) <= rules::shared_bytes(S));
    backward<S>(p, *reinterpret_cast<BackwardShared<S>*>(memory));
  }
}

}  // namespace tessera::device
