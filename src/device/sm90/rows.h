// A warpgroup that attends 64 rows.
#pragma once
#include "device/sm90/results.h"
#include "device/sm90/retry.h"

namespace tessera::device {

// The weights of this lane's two rows: 0 is row lane / 4 of the warp's sixteen, 1 the eighth after it. They are exp2 of
// scores less a base, which is a whole number: a row that changes it multiplies its sums by a power of two, exactly, so
// that no bit depends on when it does.
template <int scores>
struct Weights {
  // Bases beyond it have no fractions left for scores: such rows are attended once more. A base that stands at `none`
  // has seen no score above -inf, one at twice that only scores below.
  static constexpr float most = 1 << 22, none = -2 * most;
  // How far weights, and a lane's sums of a tile, may grow before the base follows, as a power of two.
  static constexpr float slack = 8, limit = 256;

  float base[2] = {none, none}, sum[2] = {0, 0};
  float shrink[2];  // what earlier sums are owed
  float added[2];   // the last tile's share of `sum`
  bool uncommon;    // some row of the warp shrinks its sums

  TESSERA_DEVICE bool is_lost(int r) const { return base[r] != none && !(fabsf(base[r]) < most); }

  // Scores become weights. The base follows the largest score.
  TESSERA_DEVICE void weigh(float (&s)[scores], float scale_log2) {
    bool saw[2];  // a score above -inf
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = largest_of(s, r), wanted = rintf(largest * scale_log2), grown = wanted - base[r];
      const bool follows = grown > slack;
      shrink[r] = follows ? exp2_fast(-grown) : 1;
      if (follows) base[r] = wanted;
      saw[r] = largest > minus_infinity;
    }
    uncommon = __any_sync(0xFFFFFFFFu, shrink[0] != 1 || shrink[1] != 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      exponentiate(s, r, scale_log2);
      sum[r] = fmaf(sum[r], shrink[r], added[r]);
      if (base[r] == none && saw[r]) base[r] = 2 * none;
    }
  }

  // The same of rows that have a base. Their largest scores are not looked for: whether the base must follow is told by
  // the weights, and if so (`uncommon`) `settle` puts them right; else `keep` ends it.
  TESSERA_DEVICE void weigh_by_base(float (&s)[scores], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) exponentiate(s, r, scale_log2);
    uncommon = __any_sync(0xFFFFFFFFu, added[0] > limit || added[1] > limit);
  }
  TESSERA_DEVICE void keep() {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += added[r];
  }
  // A row that overflows is lost, or stays as it is and is weighed again.
  template <bool weighs_again>
  TESSERA_DEVICE void settle(float (&s)[scores]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float most_added = largest_of_lanes(added[r]);  // a row decides alone, as if no other had asked
      if (weighs_again && most_added == infinity) continue;
      const float grown =
          most_added > limit ? static_cast<float>(min((__float_as_int(most_added) >> 23) - 127, 126)) : 0;
      shrink[r] = exp2_fast(-grown);
      base[r] = most_added == infinity ? infinity : base[r] + grown;
      sum[r] = (sum[r] + added[r]) * shrink[r];
#pragma unroll
      for (int i = 2 * r; i < scores; i += 4) s[i] *= shrink[r], s[i + 1] *= shrink[r];
    }
  }
  // In this lane.
  TESSERA_DEVICE bool overflows() const {
    return added[0] == infinity || added[1] == infinity;
  }
  // Row r of that tile, where it overflowed, once more from its scores. All of it lies in memory.
  TESSERA_DEVICE void weigh_again(float (&s)[scores], int r, const float (&of)[scores], float scale_log2) {
    float largest = minus_infinity;
#pragma unroll 1
    for (int i = 2 * r; i < scores; i += 4) largest = fmaxf(largest, fmaxf(of[i], of[i + 1]));
    const float wanted = rintf(largest_of_lanes(largest) * scale_log2);
    if (largest_of_lanes(added[r]) != infinity) return;
    const float to = fabsf(wanted) < most ? wanted : infinity;  // weights of a lost row are zeros
    shrink[r] = exp2_fast(base[r] - to);
    base[r] = to;
    added[r] = 0;
#pragma unroll 1
    for (int i = 2 * r; i < scores; i += 4)
      for (int n = i; n < i + 2; ++n) added[r] += s[n] = exp2_fast(fmaf(of[n], scale_log2, -to));
    sum[r] = fmaf(sum[r], shrink[r], added[r]);
  }

 private:
  static TESSERA_DEVICE float largest_of(const float (&s)[scores], int r) {
    float largest = minus_infinity;
#pragma unroll
    for (int i = 2 * r; i < scores; i += 4) largest = fmaxf(largest, fmaxf(s[i], s[i + 1]));
    return largest_of_lanes(largest);
  }
  TESSERA_DEVICE void exponentiate(float (&s)[scores], int r, float scale_log2) {
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 2 * r; i < scores; i += 4) {
      even += s[i] = exp2_fast(fmaf(s[i], scale_log2, -base[r]));
      odd += s[i + 1] = exp2_fast(fmaf(s[i + 1], scale_log2, -base[r]));
    }
    added[r] = even + odd;
  }
};

template <Sm90ForwardSpec S>
class Sm90Rows {
 public:
  TESSERA_DEVICE Sm90Rows(const Sm90ForwardParams& p, Sm90Shared<S>& shared, int group)
      : p_(p), shared_(shared), results_(p, shared), group_(group), leads_(thread() == 0) {}

  TESSERA_DEVICE void attend_items() {
    if (S.turns && group_ == S.groups - 1) end_turn();
    for (count_ = 0; await_item();) {
      if (has_keys()) {
        attend_from_here();
      } else {
        results_.store_nothing(job(), group_);
        q_done();
        ++count_;
      }
    }
    if constexpr (S.parts)
      if (results_.joins() && count_ > 0) results_.join(shared_.jobs[0]);  // of the only item
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
  TESSERA_DEVICE bool has_keys() const { return uniform(job().steps.end - job().steps.begin) > 0; }
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
    if (is_last(job(), uniform(job().steps.begin))) q_done();
    Weights<scores> weights;
    weigh(job(), uniform(job().steps.begin), weights);
    pack();
    clear_out();
    while (true) {
      const Sm90Job& job = this->job();
      const int end_step = uniform(job.steps.end);
      Keys clean = {uniform(job.clean.begin), uniform(min(job.clean.end, job.steps.end))};
      if (S.pairs && p_.pairs.excluded) clean = {0, 0};  // v's rows of such keys may hold anything
      bool turns_over = false;
      for (int n = uniform(job.steps.begin) + 1; !turns_over; ++n) {
        for (; clean.begin < n && n < clean.end; ++n) clean_step(job, n, weights);
        turns_over = n == end_step;
        if (turns_over) {
          if (!releases_q_early) q_done();
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
    const int of_item = turns_over ? uniform(this->job().steps.begin) : n;
    if (is_last(this->job(), of_item)) q_done();
    const Weights<scores> before = weights;
    const auto turn_over = [&] {
      if (!turns_over) return;
      finish(job, before);
      clear_out();
    };
    // Where there are no registers for two items' weights; the other groups work while one stores.
    constexpr bool stores_first = S.groups == 3 || S.pairs || S.parts;
    if (stores_first && turns_over) {
      wait_products<0>();
      landed(out_);
      turn_over();
    }
    if (turns_over) weights = {};
    weigh(this->job(), of_item, weights);
    finish_values<false>(job, n, weights, !turns_over);
    if (!stores_first) turn_over();
    pack();
  }
  // The same of a tile that every row sees whole, as the one before. The loop that does most of the work holds no mask:
  // even untaken it costs.
  TESSERA_DEVICE void clean_step(const Sm90Job& job, int n, Weights<scores>& weights) {
    await_keys();
    begin_turn();
    issue_keys();
    await_values();
    issue_values();
    end_turn();
    wait_products<1>();
    keys_done();
    if (is_last(job, n)) q_done();
    if constexpr (S.pairs) {
      score(job, job.walk.tile(n));
      if (pairs_of(job).may_drop_keys() || p_.pairs.drops) {
        weights.weigh(s_, p_.scale_log2);
        drop_out(job, n);
        finish_values<false>(job, n, weights, true);
        return pack();
      }
    }
    weights.weigh_by_base(s_, p_.scale_log2);
    finish_values<true>(job, n, weights, true);
    pack();
  }
  TESSERA_DEVICE void end(const Sm90Job& job, const Weights<scores>& weights) {
    await_values();
    clear_unseen(job, job.walk.tile(job.steps.end - 1));
    issue_values();
    wait_products<0>();
    landed(out_);
    values_done();
    results_.begin_sums();
    finish(job, weights);
  }
  TESSERA_DEVICE void weigh(const Sm90Job& job, int n, Weights<scores>& weights) {
    if constexpr (S.pairs) score(job, job.walk.tile(n));
    if (uniform(!job.clean.has(n))) mask(job, job.walk.tile(n));
    weights.weigh(s_, p_.scale_log2);
    if constexpr (S.pairs) drop_out(job, n);
  }
  TESSERA_DEVICE void drop_out(const Sm90Job& job, int n) {
    landed(s_);
    if (!p_.pairs.drops) return;
    forget();  // what is known of the item is read again, and takes no registers beside the exponentials
    pairs_of(job).drop_out(s_, place_in(job, job.walk.tile(n)), p_.heads);
  }
  TESSERA_DEVICE Sm90Pairs<S> pairs_of(const Sm90Job& job) const {
    return {p_.pairs, job.item.batch, job.item.head, job.q, job.k, job.offset};
  }
  TESSERA_DEVICE Place place_in(const Sm90Job& job, int tile) const {
    return {job.first_row + my_row(), tile * S.tile_keys, lane() % 4 * 2};
  }
  TESSERA_DEVICE void score(const Sm90Job& job, int tile) {
    const Sm90Pairs<S> pairs = pairs_of(job);
    const Place at = place_in(job, tile);
    if (pairs.has_grids()) wait(shared_address(&shared_.pairs_full[pairs_.stage()]), pairs_.parity());
    pairs.score(s_, at, pairs.tile(shared_address(shared_.pairs), p_.pairs, pairs_.stage(), group_));
    if (pairs.has_grids()) {
      __syncwarp();
      if (lane() == 0) arrive(shared_address(&shared_.pairs_empty[pairs_.stage()]));
      pairs_.advance(p_.pairs.slots);
    }
    pairs.exclude(s_, at);
    landed(s_);
  }
  template <bool settles>
  TESSERA_DEVICE void finish_values(const Sm90Job& job, int n, Weights<scores>& weights, bool rescales) {
    // A branch, and a wait in each arm: in one piece ptxas moves the wait above the exponentials.
    if (weights.uncommon) {
      if constexpr (settles) settle(job, n, weights);
      wait_products<0>();
      landed(out_);
      if (rescales)  // by exactly 1 where a row did not ask for it
#pragma unroll
        for (int i = 0; i < sums; ++i) out_[i] *= weights.shrink[i / 2 & 1];
    } else {
      if constexpr (settles) weights.keep();
      wait_products<0>();
      landed(out_);
    }
    values_done();
  }

  // Weights of the clean loop: where a base lags, and where a score so far above its row's base came that weights are
  // beyond float32. Such rows' scores of the tile are found again. (Beyond those dims registers are wanting for it.)
  TESSERA_DEVICE void settle(const Sm90Job& job, int n, Weights<scores>& weights) {
    constexpr bool weighs_again = S.dim <= 128;
    weights.template settle<weighs_again>(s_);
    if constexpr (!weighs_again) return;
    if (!__any_sync(0xFFFFFFFFu, weights.overflows())) return;
    wait_products<0>();
    landed(out_);
    float found[scores], parked_s[scores], parked_out[sums];  // in local memory: registers are scarce
    park(s_, parked_s), park(out_, parked_out);
    const Sm90Retry<S> retry(p_, job, job.first_row + my_row());
#pragma unroll 1
    for (int i = 0; i < S.tile_keys; i += 16) {
      float some[8] = {};
      retry.find_seen_scores(job.walk.tile(n) * S.tile_keys + i, some);
#pragma unroll
      for (int at = 0; at < 8; ++at) found[i / 2 + at] = some[at];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) weights.weigh_again(parked_s, r, found, p_.scale_log2);
    __syncwarp();
    take_back(s_, parked_s), take_back(out_, parked_out);
  }
  template <int n>
  static TESSERA_DEVICE void park(const float (&x)[n], float (&parked)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) parked[i] = x[i];
    keep_in_memory(parked);
  }
  template <int n>
  static TESSERA_DEVICE void take_back(float (&x)[n], float (&parked)[n]) {
    keep_in_memory(parked);
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = parked[i];
  }

  TESSERA_DEVICE void await_keys() {
    wait(shared_address(&shared_.k_full[Slot::stage(k_)]), Slot::parity(k_));
  }
  TESSERA_DEVICE void await_values() {
    wait(shared_address(&shared_.v_full[Slot::stage(v_)]), Slot::parity(v_));
  }
  TESSERA_DEVICE void issue_keys() {
    const Address q_at = shared_address(shared_.q[QSlot::stage(count_)][group_]);
    const Descriptor q = describe(S.pairs ? anew(q_at) : q_at, 16);
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
  // The only q there is place for: the next one comes while the last tile's scores are weighed.
  static constexpr bool releases_q_early = S.q_stages == 1;
  TESSERA_DEVICE bool is_last(const Sm90Job& job, int n) const {
    return releases_q_early && n == uniform(job.steps.end) - 1;
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

  // Keys from this lane's `end` on, of its rows.
  TESSERA_DEVICE void hide_from(int end_0, int end_1) {
#pragma unroll
    for (int i = 0; i < scores; ++i)
      if (i / 4 * 8 + i % 2 >= (i & 2 ? end_1 : end_0)) s_[i] = minus_infinity;
  }
  // Where a warp's rows see all keys up to an end, as under a causal mask, a comparison a score; else as bits, a word
  // for 32 keys.
  TESSERA_DEVICE void mask(const Sm90Job& job, int tile) {
    const int first = tile * S.tile_keys, column = lane() % 4 * 2;
    if (p_.plain_causal) {
      const int row = job.first_row + my_row(), end = row + job.offset + 1 - first - column;
      const int last = job.k.used - first - column;
      return hide_from(row < job.q.used ? min(end, last) : 0, row + 8 < job.q.used ? min(end + 8, last) : 0);
    }
    const rules::NarrowBand band = band_of(p_, job.k, job.offset);
    const auto keys_seen = [&](int r, auto&& range) {
      const int row = job.first_row + my_row() + 8 * r;
      return (row < job.q.used ? keys_of(range(row)) : Keys{0, 0}).from(first + column);
    };
    const auto near = [&](int row) { return band.near(row); };
    const auto head = [&](int row) { return band.head(row); };
    const Keys seen[2] = {keys_seen(0, near), keys_seen(1, near)};
    if (band.first <= 0 && __all_sync(0xFFFFFFFFu, seen[0].begin <= 0 && seen[1].begin <= 0))
      return hide_from(seen[0].end, seen[1].end);
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
    const bool some_excluded = S.pairs && p_.pairs.excluded;
    if (!some_excluded && (covers(job.walk.near) || covers(job.walk.head))) return;
    SeenKeys keys = seen_keys(p_, job);
    if (!p_.keys.cu && keys.near.end == job.k.stored)  // past a tensor's end zeros came
      keys.near.end = max(keys.near.end, end);
    if (!some_excluded && (covers(keys.near) || covers(keys.head))) return;
    const auto seen = [&](int key) {
      return keys.has(key) && !(some_excluded && key < job.k.used && pairs_of(job).is_excluded(key));
    };
    const Address v = shared_address(shared_.v[0]) + Slot::stage(v_) * Layout::v_bytes;
    for (int n = thread(); n < S.tile_keys; n += 128) {
      if (seen(first + n)) continue;
      for (int slab = 0; slab < Layout::slabs_v; ++slab)
        for (int chunk = 0; chunk < 8; ++chunk)
          store_chunk(v + slab * (S.tile_keys * 128) + n * 128 + chunk * 16, Chunk{});
    }
    show_to_engines();
    meet_group();
  }

  // Stores this lane's rows; those whose scores were beyond what weights serve are attended once more for it.
  TESSERA_DEVICE void finish(const Sm90Job& job, const Weights<scores>& weights) {
    const int row = job.first_row + my_row();
    bool again[2], wanted[2];
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowSums sums = {weights.base[r] * ln_2, sum_of_lanes(weights.sum[r])};
      bool lost = weights.is_lost(r);
      if constexpr (S.pairs) lost = lost || pairs_of(job).may_be_lost(sums.sum);
      again[r] = lost && row + 8 * r < job.q.used;
      wanted[r] = !again[r];
      const float unit = results_.is_split() ? unit_of(weights.base[r], sums.largest) : 1;
      factor[r] = results_.store_sum(job, row + 8 * r, sums, unit, wanted[r]);
    }
    results_.store_columns(job, row, 0, out_, factor, wanted);
    if (__any_sync(0xFFFFFFFFu, again[0] || again[1])) attend_again(job, row, again);
  }
  TESSERA_DEVICE void attend_again(const Sm90Job& job, int row, const bool (&again)[2]) {
    float parked[scores];  // the next item's
    park(s_, parked);
    const Sm90Retry<S> retry(p_, job, row);
#pragma unroll 1
    for (int column = 0; column < p_.dim_v; column += retry.columns) {
      RowSums sums[2];
      float out[retry.columns / 2], factor[2];
      retry.attend(column, sums, out);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        RowSums whole = {sums[r].largest * p_.scale, sums[r].sum};
        float unit = 1;
        const float base = sums[r].largest * p_.scale_log2;
        // In units of other splits' bases, or rounding would set them apart; far beyond these it is all that there is.
        if (results_.is_split() && fabsf(base) < 4 * Weights<scores>::most) {
          whole.largest = base * ln_2;
          unit = unit_of(base, whole.largest) * exp2_fast(fmaf(sums[r].largest, p_.scale_log2, -base));
        }
        factor[r] = results_.store_sum(job, row + 8 * r, whole, unit, again[r]);
      }
      results_.store_columns(job, row, column, out, factor, again);
    }
    take_back(s_, parked);
  }
  // What rounding a base, which is in units of 1 / log2(e), is worth: it goes to a split's sums.
  static TESSERA_DEVICE float unit_of(float base, float scaled) {
    constexpr float log2_e_rest = 1.4426950408889634 - log2_e;
    return exp2_fast(fmaf(-scaled, log2_e, base) - scaled * log2_e_rest);
  }

  const Sm90ForwardParams& p_;
  Sm90Shared<S>& shared_;
  const Sm90Results<S> results_;
  const int group_;
  const bool leads_;                    // its group
  unsigned count_ = 0, k_ = 0, v_ = 0;  // items and tiles so far
  TurningRing pairs_;
  float s_[scores], out_[sums];
  Word weight_[scores / 2];
};

}  // namespace tessera::device
