// Forward attention for Hopper: the copy engine fills rings of tiles, warpgroups multiply them by wgmma.
//
// A block holds a multiprocessor and takes items (a tile of rows of one head), whoever is free the next. Its first
// warpgroup copies: one thread finds the next item, then feeds the rings of K and V, each slot behind a `full` and an
// `empty` barrier. Every other warpgroup attends 64 rows, with scores, weights and sums in registers. Tiles of keys are
// walked last first; while a tile's weights are found, the products of the tile before it with V are still under way.
//
// A row decides alone when it is rescaled, so its bits depend on its own keys alone.
#pragma once
#include "device/forward_item.h"
#include "device/ptx/sm90.h"
#include "device/walk.h"
#include "rules/spec.h"

namespace tessera::device {

using rules::Sm90ForwardParams;
using rules::Sm90ForwardSpec;

struct Sm90Job {  // an item, as warpgroups are told
  Item item;
  Rows q, k;
  int first_row, offset;  // of its rows, of the band
  Walk walk;
  Keys clean;  // steps of the walk whose tiles every row keeps whole
  bool last;   // there is no item, and none will come
};
TESSERA_DEVICE rules::NarrowBand band_of(const Sm90ForwardParams& p, const Rows& k, int offset) {
  rules::NarrowBand band = p.narrow_band;
  band.keys = k.used;
  band.offset = offset;
  return band;
}

template <Sm90ForwardSpec S>
struct Sm90Shared {
  static constexpr int slabs = rules::slabs_of(S.dim), slabs_v = rules::slabs_of(S.dim_v);
  static constexpr int q_bytes = slabs * 64 * 128, k_bytes = slabs * S.tile_keys * 128;
  static constexpr int v_bytes = slabs_v * S.tile_keys * 128;
  char q[S.q_stages][S.groups][q_bytes], k[S.stages][k_bytes], v[S.stages][v_bytes];
  Sm90Job jobs[4];  // one is written while a slow group may still store the one before the last
  Barrier q_full[S.q_stages][S.groups], q_empty[S.q_stages][S.groups];
  Barrier k_full[S.stages], k_empty[S.stages], v_full[S.stages], v_empty[S.stages];
};

// Of the n-th tile that goes through a ring.
template <int stages>
struct Ring {
  static TESSERA_DEVICE unsigned stage(unsigned n) { return n % stages; }
  static TESSERA_DEVICE unsigned parity(unsigned n) { return n / stages & 1; }
};

// ------------------------------------------------------------------------------------------- the warpgroup that copies

// One thread: finds items, and keeps the rings full.
template <Sm90ForwardSpec S>
class Sm90Copies {
 public:
  TESSERA_DEVICE Sm90Copies(const Sm90ForwardParams& p, Sm90Shared<S>& shared) : p_(p), shared_(shared) {}

  TESSERA_DEVICE void copy_items() {
    unsigned count = 0;
    for (bool more = find_item(take_item(), 0); more;) {
      const Sm90Job& job = shared_.jobs[count % 4];
      // In registers: between a slot that is free and its copy nothing else may take time.
      const int plane = job.k.plane, kv = job.item.head / p_.group, tiles = job.walk.count;
      const int head_row = job.k.first + (job.walk.head_end - 1) * S.tile_keys;
      int to_head = job.walk.near_count, row = job.k.first + job.walk.tile(0) * S.tile_keys;
      if (tiles > 0) copy_k(row, kv, plane);
      copy_q(job, count++);
      // The next item is taken late, so that whoever is free first has it, and found while tiles are still under way.
      const int take_at = max(tiles - 4, 1), find_at = min(take_at + 1, max(tiles, 1));
      int next_item = 0;
      for (int n = 1; n <= max(tiles, 1); ++n) {
        if (n == take_at) next_item = take_item();
        if (n == find_at) more = find_item(next_item, count);
        const int next = --to_head == 0 ? head_row : row - S.tile_keys;
        if (n < tiles) copy_k(next, kv, plane);
        if (tiles > 0) copy_v(row, kv, plane);
        row = next;
      }
    }
    shared_.jobs[count % 4].last = true;
    for (int g = 0; g < S.groups; ++g) {
      await_q(g, count);
      arrive(shared_address(&shared_.q_full[QSlot::stage(count)][g]));
    }
  }

 private:
  using Layout = Sm90Shared<S>;
  using Slot = Ring<S.stages>;
  using QSlot = Ring<S.q_stages>;

  TESSERA_DEVICE int take_item() const { return atomicAdd(p_.next, 1); }
  TESSERA_DEVICE bool find_item(int n, unsigned count) const {  // false: nothing is left to do
    while (n < p_.items) {
      if (find_job(n, shared_.jobs[count % 4])) return true;
      n = take_item();
    }
    return false;
  }
  TESSERA_DEVICE bool find_job(int n, Sm90Job& job) const {  // false: nothing is to be done
    constexpr int tile_rows = 64 * S.groups;
    const Item item = item_of(p_, n);
    const Rows q = rows_of(p_.queries, item.batch), k = rows_of(p_.keys, item.batch);
    const int first = item.tile * tile_rows;
    const bool sound = q.sound && k.sound;
    if (!sound && p_.status) atomicOr(p_.status, rules::unsound_length);
    if (!sound || first >= q.stored) return false;
    int offset = p_.narrow_band.offset;
    if (p_.corner == rules::Corner::bottom_right) offset = k.used - q.used;
    if (p_.corner == rules::Corner::per_sequence) offset = rules::narrow_offset(p_.corner_offsets[item.batch]);
    job.item = item;
    job.q = q;
    job.k = k;
    job.first_row = first;
    job.offset = offset;
    job.walk = walk_of<int>(band_of(p_, k, offset), {first, min(first + tile_rows, q.used)}, S.tile_keys);
    job.clean = job.walk.clean_steps();
    job.last = false;
    return true;
  }
  TESSERA_DEVICE void await_q(int group, unsigned count) const {
    wait(shared_address(&shared_.q_empty[QSlot::stage(count)][group]), QSlot::parity(count) ^ 1);
  }
  TESSERA_DEVICE void copy_q(const Sm90Job& job, unsigned count) const {
    const unsigned stage = QSlot::stage(count);
#pragma unroll
    for (int g = 0; g < S.groups; ++g) {
      const Address full = shared_address(&shared_.q_full[stage][g]);
      await_q(g, count);
      arrive_expecting(full, Layout::q_bytes);
#pragma unroll
      for (int slab = 0; slab < Layout::slabs; ++slab)
        copy_box(shared_address(shared_.q[stage][g]) + slab * 64 * 128, &p_.q_map, full, slab * 64,
                 job.q.first + job.first_row + 64 * g, job.item.head, job.q.plane, Kept::once);
    }
  }
  TESSERA_DEVICE void copy_k(int row, int kv, int plane) {
    copy_tile<Layout::slabs>(shared_address(shared_.k), shared_address(shared_.k_full), shared_address(shared_.k_empty),
                             k_++, &p_.k_map, row, kv, plane);
  }
  TESSERA_DEVICE void copy_v(int row, int kv, int plane) {
    copy_tile<Layout::slabs_v>(shared_address(shared_.v), shared_address(shared_.v_full),
                               shared_address(shared_.v_empty), v_++, &p_.v_map, row, kv, plane);
  }
  template <int slabs>
  TESSERA_DEVICE void copy_tile(Address tiles, Address full, Address empty, unsigned n, const rules::TensorMap* map,
                                int row, int kv, int plane) {
    constexpr unsigned slab_bytes = S.tile_keys * 128;
    const unsigned stage = Slot::stage(n);
    const Address to = tiles + stage * (slabs * slab_bytes);
    wait(empty + stage * 8, Slot::parity(n) ^ 1);
    arrive_expecting(full + stage * 8, slabs * slab_bytes);
#pragma unroll
    for (int slab = 0; slab < slabs; ++slab)
      copy_box(to + slab * slab_bytes, map, full + stage * 8, slab * 64, row, kv, plane, Kept::often);
  }

  const Sm90ForwardParams& p_;
  Sm90Shared<S>& shared_;
  unsigned k_ = 0, v_ = 0;  // tiles so far
};

// ------------------------------------------------------------------------------------------ a warpgroup that attends

// The weights of this lane's two rows: 0 is row lane / 4 of the warp's sixteen, 1 the eighth after it.
template <int scores>
struct Weights {
  float reference[2] = {minus_infinity, minus_infinity}, sum[2] = {0, 0}, shrink[2];
  bool uncommon;  // some row of the warp shrinks its sums, or has large scores

  // Scores become weights, exp2(scale (score - reference)). A row's reference is its largest score so far, but follows
  // it only once a weight would pass 2^slack; `shrink` is what all earlier sums are then owed.
  TESSERA_DEVICE void weigh(float (&s)[scores], float scale_log2, float slack) {
    float offset[2], taken[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = minus_infinity;
#pragma unroll
      for (int i = 2 * r; i < scores; i += 4) largest = fmaxf(largest, fmaxf(s[i], s[i + 1]));
      largest = fmaxf(largest, from_lane(largest, 1));
      largest = fmaxf(largest, from_lane(largest, 2));
      const float grown = (largest - reference[r]) * scale_log2;
      const bool follows = grown > slack;  // false where both are -inf
      shrink[r] = follows ? exp2_fast(-grown) : 1;
      if (follows) reference[r] = largest;
      // Fused, all weights of a row have a factor in common, what this product is rounded by. Of scores so large that
      // it could be seen, the reference is taken away first.
      const float product = reference[r] == minus_infinity ? 0 : reference[r] * scale_log2;
      const bool large = !(fabsf(product) <= 2048);
      taken[r] = large ? reference[r] : 0;
      offset[r] = large ? 0 : -product;
    }
    uncommon = __any_sync(0xFFFFFFFFu, shrink[0] != 1 || shrink[1] != 1 || taken[0] != 0 || taken[1] != 0);
    if (uncommon) {
#pragma unroll
      for (int i = 0; i < scores; ++i) s[i] -= taken[i / 2 & 1];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = 0, odd = 0;
#pragma unroll
      for (int i = 2 * r; i < scores; i += 4) {
        even += s[i] = exp2_fast(fmaf(s[i], scale_log2, offset[r]));
        odd += s[i + 1] = exp2_fast(fmaf(s[i + 1], scale_log2, offset[r]));
      }
      sum[r] = fmaf(sum[r], shrink[r], even + odd);
    }
  }
};

template <Sm90ForwardSpec S>
class Sm90Rows {
 public:
  TESSERA_DEVICE Sm90Rows(const Sm90ForwardParams& p, Sm90Shared<S>& shared, int group)
      : p_(p), shared_(shared), group_(group), leads_(thread() == 0) {}

  TESSERA_DEVICE void attend_items() {
    if (S.turns && group_ == S.groups - 1) end_turn();
    for (count_ = 0; await_item();) {
      if (has_keys()) {
        attend_from_here();
      } else {
        store_nothing();
        q_done();
        ++count_;
      }
    }
  }

 private:
  using Layout = Sm90Shared<S>;
  static constexpr int scores = S.tile_keys / 2, sums = S.dim_v / 2;  // of a lane
  using Slot = Ring<S.stages>;
  using QSlot = Ring<S.q_stages>;
  using Scores = Products<S.dtype, S.tile_keys>;
  using Out = Products<S.dtype, S.dim_v>;
  using Type = Number<S.dtype>;

  static TESSERA_DEVICE int lane() { return thread_index() & 31; }
  static TESSERA_DEVICE int thread() { return thread_index() & 127; }
  // Of the tile; this lane's other row is the eighth after it.
  TESSERA_DEVICE int my_row() const { return 64 * group_ + thread() / 32 * 16 + lane() / 4; }
  TESSERA_DEVICE void begin_turn() const {
    if (S.turns) meet(1 + group_, 256);
  }
  TESSERA_DEVICE void end_turn() const {
    if (S.turns) pass_by(1 + (group_ ^ 1), 256);
  }
  TESSERA_DEVICE void meet_group() const { meet(4 + group_, 128); }

  TESSERA_DEVICE const Sm90Job& job() const { return shared_.jobs[count_ % 4]; }
  TESSERA_DEVICE bool await_item() const {  // false: none is left
    wait(shared_address(&shared_.q_full[QSlot::stage(count_)][group_]), QSlot::parity(count_));
    return !uniform(job().last);
  }
  TESSERA_DEVICE bool has_keys() const { return uniform(job().walk.count) > 0; }
  TESSERA_DEVICE void clear_out() {
#pragma unroll
    for (int i = 0; i < sums; ++i) out_[i] = 0;
  }

  // This item and those that follow, while they have keys: one pipeline of tiles, in which an item's last products with
  // V run beside the next item's first exponentials.
  TESSERA_DEVICE void attend_from_here() {
    await_keys();
    issue_keys();
    wait_products<0>();
    keys_done();
    Weights<scores> weights;
    weigh(job(), 0, weights);
    pack();
    clear_out();
    while (true) {
      const Sm90Job& job = this->job();
      const int count = uniform(job.walk.count);
      const Keys clean = {uniform(job.clean.begin), uniform(job.clean.end)};
      bool turns_over = false;
      for (int n = 1; !turns_over; ++n) {
        for (; clean.begin < n && n < clean.end; ++n) clean_step(weights);
        turns_over = n == count;
        if (turns_over) {
          q_done();
          ++count_;
          if (!await_item() || !has_keys()) return end(job, weights);
        }
        step(job, n, turns_over, weights);
      }
    }
  }
  // Scores of the n-th tile or, if the item turns over, of the first of the next, beside the products of the tile
  // before with V.
  TESSERA_DEVICE void step(const Sm90Job& job, int n, bool turns_over, Weights<scores>& weights) {
    await_keys();
    begin_turn();
    issue_keys();
    await_values();
    clear_unseen(job, job.walk.tile(n - 1));
    issue_values();
    end_turn();
    wait_products<1>();
    keys_done();
    const Weights<scores> before = weights;
    const auto turn_over = [&] {
      if (!turns_over) return;
      store(job, before);
      clear_out();
    };
    // Three groups have no registers for two items' weights; the others work while one stores.
    constexpr bool stores_first = S.groups == 3;
    if (stores_first && turns_over) {
      wait_products<0>();
      landed(out_);
      turn_over();
    }
    if (turns_over) weights = {};
    weigh(this->job(), turns_over ? 0 : n, weights);
    finish_values(weights, !turns_over);
    if (!stores_first) turn_over();
    pack();
  }
  // The same of a tile that every row sees whole, as the one before. The loop that does most of the work holds no mask:
  // even untaken it costs.
  TESSERA_DEVICE void clean_step(Weights<scores>& weights) {
    await_keys();
    begin_turn();
    issue_keys();
    await_values();
    issue_values();
    end_turn();
    wait_products<1>();
    keys_done();
    weights.weigh(s_, p_.scale_log2, p_.slack);
    finish_values(weights, true);
    pack();
  }
  TESSERA_DEVICE void end(const Sm90Job& job, const Weights<scores>& weights) {
    await_values();
    clear_unseen(job, job.walk.tile(job.walk.count - 1));
    issue_values();
    wait_products<0>();
    landed(out_);
    values_done();
    store(job, weights);
  }
  TESSERA_DEVICE void weigh(const Sm90Job& job, int n, Weights<scores>& weights) {
    if (uniform(!job.clean.has(n))) mask(job, job.walk.tile(n));
    weights.weigh(s_, p_.scale_log2, p_.slack);
  }
  TESSERA_DEVICE void finish_values(const Weights<scores>& weights, bool rescales) {
    // A branch, and a wait in each arm: in one piece ptxas moves the wait above the exponentials.
    if (weights.uncommon) {
      wait_products<0>();
      landed(out_);
      if (rescales)  // by exactly 1 where a row did not ask for it
#pragma unroll
        for (int i = 0; i < sums; ++i) out_[i] *= weights.shrink[i / 2 & 1];
    } else {
      wait_products<0>();
      landed(out_);
    }
    values_done();
  }

  TESSERA_DEVICE void await_keys() {
    wait(shared_address(&shared_.k_full[Slot::stage(k_)]), Slot::parity(k_));
  }
  TESSERA_DEVICE void await_values() {
    wait(shared_address(&shared_.v_full[Slot::stage(v_)]), Slot::parity(v_));
  }
  TESSERA_DEVICE void issue_keys() {
    const Descriptor q = describe(shared_address(shared_.q[QSlot::stage(count_)][group_]), 16);
    const Descriptor k = further(describe(shared_address(shared_.k[0]), 16), Slot::stage(k_) * Layout::k_bytes);
    begin_products();
#pragma unroll
    for (int d = 0; d < S.dim / 16; ++d) {
      const Descriptor a = further(q, d / 4 * (64 * 128) + d % 4 * 32);
      const Descriptor b = further(k, d / 4 * (S.tile_keys * 128) + d % 4 * 32);
      d == 0 ? Scores::set(s_, a, b) : Scores::add(s_, a, b);
    }
    close_products();
  }
  TESSERA_DEVICE void issue_values() {
    const Descriptor v =
        further(describe(shared_address(shared_.v[0]), S.tile_keys * 128), Slot::stage(v_) * Layout::v_bytes);
    begin_products();
#pragma unroll
    for (int n = 0; n < S.tile_keys / 16; ++n) Out::add_rows(out_, weight_ + 4 * n, further(v, n * 16 * 128));
    close_products();
  }
  TESSERA_DEVICE void q_done() {
    __syncwarp();  // of the item too, which other lanes may still read
    if (lane() == 0) arrive(shared_address(&shared_.q_empty[QSlot::stage(count_)][group_]));
  }
  TESSERA_DEVICE void keys_done() {
    landed(s_);
    if (leads_) arrive(shared_address(&shared_.k_empty[Slot::stage(k_)]));
    ++k_;
  }
  TESSERA_DEVICE void values_done() {
    landed(weight_);
    if (leads_) arrive(shared_address(&shared_.v_empty[Slot::stage(v_)]));
    ++v_;
  }
  TESSERA_DEVICE void pack() {
#pragma unroll
    for (int i = 0; i < scores / 2; ++i) weight_[i] = Type::pack(s_[2 * i], s_[2 * i + 1]);
  }

  // Where a warp's rows see all keys up to an end, as under a causal mask, a comparison a score; else as bits, a word
  // for 32 keys.
  TESSERA_DEVICE void mask(const Sm90Job& job, int tile) {
    const int first = tile * S.tile_keys, column = lane() % 4 * 2;
    const rules::NarrowBand band = band_of(p_, job.k, job.offset);
    const auto keys_seen = [&](int r, auto&& range) {
      const int row = job.first_row + my_row() + 8 * r;
      return (row < job.q.used ? keys_of(range(row)) : Keys{0, 0}).from(first + column);
    };
    const auto near = [&](int row) { return band.near(row); };
    const auto head = [&](int row) { return band.head(row); };
    const Keys seen[2] = {keys_seen(0, near), keys_seen(1, near)};
    if (band.first <= 0 && __all_sync(0xFFFFFFFFu, seen[0].begin <= 0 && seen[1].begin <= 0)) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int n = 0; n < S.tile_keys / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (8 * n + i >= seen[r].end) s_[4 * n + 2 * r + i] = minus_infinity;
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Keys far = keys_seen(r, head);
#pragma unroll
      for (int word = 0; word < (S.tile_keys + 31) / 32; ++word) {
        const Word kept = seen[r].bits(32 * word) | far.bits(32 * word);
#pragma unroll
        for (int n = 4 * word; n < 4 * word + 4 && n < S.tile_keys / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (!(kept >> (n % 4 * 8 + i) & 1)) s_[4 * n + 2 * r + i] = minus_infinity;
      }
    }
  }

  // Rows of V that no row of the sequence sees become zeros, or what lies there would meet a weight of zero. Each group
  // does so for itself.
  TESSERA_DEVICE void clear_unseen(const Sm90Job& job, int tile) {
    const int first = tile * S.tile_keys, end = first + S.tile_keys;
    const auto covers = [&](const Keys& keys) { return keys.begin <= first && end <= keys.end; };
    if (covers(job.walk.near) || covers(job.walk.head)) return;
    const auto whole = rules::visit_of<int>(band_of(p_, job.k, job.offset), {0, job.q.used});
    Keys near = keys_of(whole.near);
    const Keys head = keys_of(whole.head);
    if (!p_.keys.cu && near.end == job.k.stored) near.end = max(near.end, end);  // past a tensor's end zeros came
    if (covers(near) || covers(head)) return;
    const Address v = shared_address(shared_.v[0]) + Slot::stage(v_) * Layout::v_bytes;
    for (int n = thread(); n < S.tile_keys; n += 128) {
      if (near.has(first + n) || head.has(first + n)) continue;
      for (int slab = 0; slab < Layout::slabs_v; ++slab)
        for (int chunk = 0; chunk < 8; ++chunk)
          store_chunk(v + slab * (S.tile_keys * 128) + n * 128 + chunk * 16, Chunk{});
    }
    show_to_engines();
    meet_group();
  }

  TESSERA_DEVICE Index row_at(const Sm90Job& job, int row, const rules::Steps& step) const {
    return job.q.plane * step.batch + (Index{job.q.first} + row) * step.row + job.item.head * step.head;
  }
  // Rows that see no key.
  TESSERA_DEVICE void store_nothing() const {
    const Sm90Job& job = this->job();
    for (int n = thread(); n < 64 * p_.dim_v / 8; n += 128) {
      const int row = job.first_row + 64 * group_ + n / (p_.dim_v / 8), column = n % (p_.dim_v / 8) * 8;
      if (row >= job.q.stored) break;
      store_chunk(static_cast<unsigned short*>(p_.out) + row_at(job, row, p_.out_step) + column, Chunk{});
      if (p_.lse && column == 0) p_.lse[row_at(job, row, p_.lse_step)] = minus_infinity;
    }
  }
  TESSERA_DEVICE void store(const Sm90Job& job, const Weights<scores>& weights);

  const Sm90ForwardParams& p_;
  Sm90Shared<S>& shared_;
  const int group_;
  const bool leads_;                    // its group
  unsigned count_ = 0, k_ = 0, v_ = 0;  // items and tiles so far
  float s_[scores], out_[sums];
  Word weight_[scores / 2];
};

// out and lse of this lane's rows. Rows past the sequence's used ones are zeros and -inf, as empty rows are.
template <Sm90ForwardSpec S>
TESSERA_DEVICE void Sm90Rows<S>::store(const Sm90Job& job, const Weights<scores>& weights) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = weights.sum[r];
    sum += from_lane(sum, 1);
    sum += from_lane(sum, 2);
    const int row = job.first_row + my_row() + 8 * r;
    const bool stored = row < job.q.stored, empty = row >= job.q.used || sum == 0;  // a NaN is not empty
    const float inverse = 1 / sum;
    unsigned short* const to = static_cast<unsigned short*>(p_.out) + row_at(job, row, p_.out_step);
#pragma unroll
    for (int n = 0; n < S.dim_v / 8; n += 4) {
      Chunk c;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (n + i < S.dim_v / 8) {
          const float* const two = out_ + 4 * (n + i) + 2 * r;
          c.word[i] = empty ? 0 : Type::pack(two[0] * inverse, two[1] * inverse);
        }
      transpose_4(c.word);
      const int column = 8 * (n + lane() % 4);
      if (stored && column < p_.dim_v) store_chunk(to + column, c);
    }
    if (p_.lse && stored && lane() % 4 == 0)
      p_.lse[row_at(job, row, p_.lse_step)] = empty ? minus_infinity : weights.reference[r] * p_.scale + logf(sum);
  }
}

// -------------------------------------------------------------------------------------------------------- the kernel

template <Sm90ForwardSpec S>
TESSERA_DEVICE void sm90_forward(const Sm90ForwardParams& p, Sm90Shared<S>& shared) {
  static_assert(sizeof(Sm90Shared<S>) <= rules::shared_bytes(S));
  if (threadIdx.x == 0) {
    prefetch_map(&p.q_map), prefetch_map(&p.k_map), prefetch_map(&p.v_map);
    for (int i = 0; i < S.q_stages; ++i)
      for (int g = 0; g < S.groups; ++g) {
        make_barrier(shared_address(&shared.q_full[i][g]), 1);
        make_barrier(shared_address(&shared.q_empty[i][g]), 4);
      }
    for (int i = 0; i < S.stages; ++i) {
      make_barrier(shared_address(&shared.k_full[i]), 1);
      make_barrier(shared_address(&shared.v_full[i]), 1);
      make_barrier(shared_address(&shared.k_empty[i]), S.groups);
      make_barrier(shared_address(&shared.v_empty[i]), S.groups);
    }
    show_barriers();
  }
  __syncthreads();
  // A multiprocessor's 65,536 registers, shared out anew: 504 or 512 a thread of each group.
  constexpr int few = S.groups == 3 ? 32 : 24, many = S.groups == 3 ? 160 : 240;
  if (threadIdx.x < 128) {
    give_registers<few>();
    if (threadIdx.x < 32 && is_elected()) Sm90Copies<S>(p, shared).copy_items();
  } else {
    take_registers<many>();
    const int group = uniform(static_cast<int>(threadIdx.x) / 128) - 1;
    Sm90Rows<S>(p, shared, group).attend_items();
  }
}

}  // namespace tessera::device
