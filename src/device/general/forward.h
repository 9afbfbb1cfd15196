// Forward attention for every option of the contract.
//
// A block owns 16 rows a warp and `columns` columns of out. A row is a query of one head, or where few queries come one
// of a group's (query, head) pairs, so that keys are read once for all heads that share them. The block walks the tiles
// of keys that some of its rows see, or its split's share of them: V of a tile is copied while its scores are made, K
// of the next while its values are summed. A tile that a row does not see changes nothing of its sums.
#pragma once
#include "device/general/block.h"

namespace tessera::device {

using rules::GeneralSpec;

// What a row's sums come to.
struct RowResult {
  bool empty;
  float factor;  // from sums to out
  float lse, largest;
};
// The row's sink joins its sums, and they are divided.
TESSERA_DEVICE RowResult finish_row(const GeneralParams& p, int head, bool used, float largest, float sum) {
  RowResult r = {!used || sum == 0, 0, minus_infinity, used ? largest : minus_infinity};  // a NaN is not empty
  if (sum != sum && largest < infinity) r.largest = sum;
  if (used && p.sinks.present()) {
    const auto exponent = [](float x) { return expf(x); };
    const float sink = read(p.sinks, p.sinks.at(0, 0, head));
    const float whole = sink > largest || r.empty ? sink : largest;
    const float share = rules::weight(largest, whole, exponent);
    sum = sum * share + rules::weight(sink, whole, exponent);
    r.factor = share / sum;
    r.lse = whole == minus_infinity ? minus_infinity : whole + logf(sum);
  } else if (!r.empty) {
    r.factor = 1 / sum;
    r.lse = largest + logf(sum);
  }
  r.factor *= p.keep_scale;
  return r;
}
TESSERA_DEVICE void write_facts(const GeneralParams& p, const Rows& rows, int row, int head, const RowResult& r) {
  if (p.lse.present()) write(p.lse, at_row(p.lse, rows, row, head), r.lse);
  if (p.max_score.present()) write(p.max_score, at_row(p.max_score, rows, row, head), r.largest);
}

template <GeneralSpec S>
class Forward {
 public:
  static constexpr Product product = S.product;
  static constexpr int width = S.width, columns = S.columns;
  using F = Format<product>;

  TESSERA_DEVICE Forward(const GeneralParams& p, char* memory) : p_(p), memory_(memory_of(memory, 16 * warps())) {
    q_ = {memory_.panels, 16 * warps()};
    k_ = {q_.panel(p.panels), width};
    v_ = {k_.panel(p.at_once), width};
    totals_ = v_.panel(columns / F::per_panel);
    const Address after = totals_ + static_cast<Address>(p.flushes ? 16 * warps() * columns * 4 : 0);
    scratch_ = {after + static_cast<Address>(warp_index() * rules::scratch_bytes(width)), width};
    // At the end, where tiles were.
    staging_ = {memory_.panels + static_cast<Address>(warp_index() * rules::scratch_bytes(64)), 64};
  }

  TESSERA_DEVICE void run(Index item) {
    if (!find(item)) return;
    load_queries();
    const auto [begin, end] = share();
    for (int n = begin - 1; n < end; ++n) {  // the first turn only loads
      Block<width> s;
      if (n >= begin) {
        wait_copies<0>();
        __syncthreads();  // K is there, and V's place free
        load_v(n);
        close_copies();
        multiply_keys(s, n);
        score(s, n);
        weigh(s, n);
        wait_copies<0>();
        __syncthreads();  // V is there, and K's place free
      }
      if (n + 1 < end) load_k(n + 1, 0);
      close_copies();
      if (n < begin) continue;
      multiply_values(s);
      // Parts end at fixed keys, whatever tiles this block walks.
      if (p_.flushes && n + 1 < end && walk().tile(n) / tiles_a_flush != walk().tile(n + 1) / tiles_a_flush) flush();
    }
    wait_copies<0>();
    if (p_.flushes) flush();
    p_.splits > 1 ? store_partial() : store();
  }

 private:
  static constexpr int tiles_a_flush = 2048 / width;

  TESSERA_DEVICE const Sequence& sequence() const { return memory_.header->sequence; }
  TESSERA_DEVICE const Walk& walk() const { return memory_.header->walk; }
  TESSERA_DEVICE const Query& query(int half) const { return memory_.queries[lane_row(half)]; }

  // Which rows of which heads, and the tiles they see; false if there is nothing to do.
  TESSERA_DEVICE bool find(Index item) {
    split_ = static_cast<int>(item % p_.splits);
    item /= p_.splits;
    slice_ = static_cast<int>(item % p_.slices);
    item /= p_.slices;
    const int tile = p_.row_tiles - 1 - static_cast<int>(item % p_.row_tiles);
    item /= p_.row_tiles;
    const int heads = p_.heads / p_.pack;
    first_head_ = static_cast<int>(item % heads) * p_.pack;
    const int batch = static_cast<int>(item / heads);
    const int first = tile * 16 * warps();
    if (thread_index() == 0) {
      Header& h = *memory_.header;
      h.sequence = device::sequence(p_, batch);
      note(p_, h.sequence.unsound);
      const Range rows = {div(first), div(first + 16 * warps() - 1) + 1};
      h.walk = walk_of(h.sequence.band, rules::overlap(rows, {0, h.sequence.q.used}), width);
    }
    __syncthreads();
    const Sequence& s = sequence();
    if (s.unsound || first >= Index{s.q.stored} * p_.pack) return false;
    for (int r = thread_index(); r < 16 * warps(); r += static_cast<int>(blockDim.x)) {
      const int row = div(first + r);
      memory_.queries[r] = query_of(p_, s, row, first_head_ + first + r - row * p_.pack);
    }
    __syncthreads();
    clear<columns>(out_);
    for (int half = 0; half < 2; ++half) {
      largest_[half] = minus_infinity;
      sum_[half] = 0;
      since_flush_[half] = 1;
    }
    exponent_ = -infinity;
    if (p_.flushes)
      for (int n = 0; n < columns / 2; ++n) store_word(total(n), 0);
    return true;
  }
  TESSERA_DEVICE int div(int r) const { return p_.pack == 1 ? r : r / p_.pack; }
  // Its split's share of the walk.
  struct Tiles {
    int begin, end;
  };
  TESSERA_DEVICE Tiles share() const {
    const int count = walk().count, each = (count + p_.splits - 1) / p_.splits;
    return {min(split_ * each, count), min((split_ + 1) * each, count)};
  }
  TESSERA_DEVICE int kv() const { return first_head_ / p_.group; }

  TESSERA_DEVICE void load_queries() {
    load_panels<product>(q_, p_.q, {0, p_.panels, p_.dim}, [&](int r) {
      const Query& f = memory_.queries[r];
      return f.row < sequence().q.used ? at_row(p_.q, sequence().q, f.row, f.head_q) : Index{-1};
    });
    close_copies();
    if (p_.rotary.pairs && sequence().k.used > 0) rotate_queries();
  }
  TESSERA_DEVICE void rotate_queries() {
    wait_copies<0>();
    __syncthreads();
    const auto& rotary = p_.rotary;
    for (int n = thread_index(); n < 16 * warps() * rotary.pairs; n += static_cast<int>(blockDim.x)) {
      const int r = n / rotary.pairs, pair = n % rotary.pairs;
      const Query& f = memory_.queries[r];
      if (f.row >= sequence().q.used) continue;
      const rules::RotaryPair at = rules::rotary_pair(pair, rotary.pairs, rotary.interleaved);
      const Address one = place_of<product>(q_, r, static_cast<int>(at.one)),
                    two = place_of<product>(q_, r, static_cast<int>(at.two));
      float x = get<product>(one), y = get<product>(two);
      rules::rotate(x, y, read(rotary.cos, rotary.cos.at(0, f.position, 0, pair)),
                    read(rotary.sin, rotary.sin.at(0, f.position, 0, pair)));
      put<product>(one, x);
      put<product>(two, y);
    }
  }

  TESSERA_DEVICE int first_key(int n) const { return walk().tile(n) * width; }
  TESSERA_DEVICE void load_k(int n, int panel) {
    load_keys<product>(p_, *memory_.header, k_, p_.k, p_.k_scale, memory_.header->k_scale, kv(), first_key(n),
                       {panel, min(panel + p_.at_once, p_.panels), p_.dim}, walk().near, walk().head);
  }
  TESSERA_DEVICE void load_v(int n) {
    constexpr int panels = columns / F::per_panel;
    load_keys<product>(p_, *memory_.header, v_, p_.v, p_.v_scale, memory_.header->v_scale, kv(), first_key(n),
                       {slice_ * panels, (slice_ + 1) * panels, p_.dim_v}, walk().near, walk().head);
  }

  TESSERA_DEVICE void multiply_keys(Block<width>& s, int n) {
    clear<width>(s);
    for (int panel = 0;;) {
      const int count = min(p_.at_once, p_.panels - panel);
      multiply_transposed<product, width>(s, Panels{q_.panel(panel), q_.rows}.from_row(warp_index() * 16), k_, count);
      panel += count;
      if (panel == p_.panels) return;
      __syncthreads();
      load_k(n, panel);
      close_copies();
      wait_copies<0>();
      __syncthreads();
    }
  }

  TESSERA_DEVICE void score(Block<width>& s, int n) {
    const Header& header = *memory_.header;
    const int first = first_key(n), column = (lane_index() & 3) * 2;
    if (p_.score_unit == 1) {
#pragma unroll
      for (int m = 0; m < width / 8; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][i] *= p_.scale;
    }
    if (p_.k_scale.present()) {
#pragma unroll
      for (int m = 0; m < width / 8; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][i] *= header.k_scale[m * 8 + column + (i & 1)];
    }
    if (has_pair_options(p_)) score_pairs(s, first);
    if (!walk().clean(n)) mask(s, first);
    if (!p_.plain_keys) {
#pragma unroll
      for (int m = 0; m < width / 8; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (!header.there[m * 8 + column + (i & 1)]) s[m][i] = minus_infinity;
    }
  }
  TESSERA_DEVICE void mask(Block<width>& s, int first) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Keys near = query(half).near, head = query(half).head;
      Word kept = 0;
#pragma unroll
      for (int m = 0; m < width / 8; ++m) {
        if (m % 4 == 0) kept = (near.bits(first + m * 8) | head.bits(first + m * 8)) >> (lane_index() & 3) * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!(kept >> (m % 4 * 8 + i) & 1)) s[m][half * 2 + i] = minus_infinity;
      }
    }
  }
  // Lanes are keys here, so that what lies along the keys is read in one go.
  TESSERA_DEVICE void score_pairs(Block<width>& s, int first) {
    spread<width>(s, scratch_);
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const Query& f = memory_.queries[warp_index() * 16 + row];
#pragma unroll 1
      for (int column = lane_index(); column < width; column += 32) {
        const int key = first + column;
        if (f.near.has(key) || f.head.has(key))
          scratch_.put(row, column, score_of(p_, sequence(), f, key, scratch_.get(row, column)).value);
      }
    }
    collect<width>(s, scratch_);
  }

  // Scores become weights, against each row's largest so far.
  TESSERA_DEVICE void weigh(Block<width>& s, int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = minus_infinity;
#pragma unroll
      for (int m = 0; m < width / 8; ++m) largest = fmaxf(largest, fmaxf(s[m][half * 2], s[m][half * 2 + 1]));
      largest = fmaxf(largest, from_lane(largest, 1));
      largest = fmaxf(largest, from_lane(largest, 2));
      if (largest > largest_[half]) {
        const float shrink = exponential<product>((largest_[half] - largest) * p_.score_unit);
        largest_[half] = largest;
        sum_[half] *= shrink;
        since_flush_[half] *= shrink;
#pragma unroll
        for (int m = 0; m < columns / 8; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) out_[m][half * 2 + i] *= shrink;
      }
      const float reference = rules::reference_score(largest_[half]);
      float sum = 0;
#pragma unroll
      for (int m = 0; m < width / 8; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[m][half * 2 + i];
          x = exponential<product>((x - reference) * p_.score_unit);
          sum += x;
        }
      sum_[half] += sum;
    }
    if (p_.drops) drop(s, first_key(n));
  }

  // One call of Philox serves rows 8 apart and keys 8 apart.
  TESSERA_DEVICE void drop(Block<width>& s, int first) {
    spread<width>(s, scratch_);
#pragma unroll 1
    for (int n = lane_index(); n < 4 * width; n += 32) {
      const int row = n / (width / 2), column = n % (width / 2) / 8 * 16 + n % 8;
      rules::Words4 words = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Query& f = memory_.queries[warp_index() * 16 + half * 8 + row];
        if (half == 0 || p_.pack > 1) words = dropout_words(p_, sequence(), f.head_q, f.row, first + column);
#pragma unroll
        for (int next = 0; next < 2; ++next)
          if (drops(p_, words, f.row, first + column + next * 8)) scratch_.put(half * 8 + row, column + next * 8, 0);
      }
    }
    collect<width>(s, scratch_);
  }

  // Where V's scale is a token's, it goes to the weights: as float16 in units of a power of 2 that no scale passes.
  TESSERA_DEVICE void scale_by_values(Block<width>& s) {
    const float* const scales = memory_.header->v_scale;
    float unit = 1;
    if constexpr (product == Product::f16) {
      float most = 0;
      for (int j = 0; j < width; ++j) most = fmaxf(most, fabsf(scales[j]));
      const float exponent = most > 0 && most < infinity ? ceilf(log2f(most)) : 0.0f;
      if (exponent > exponent_) {
        const float shrink = exp2f(exponent_ - exponent);
        exponent_ = exponent;
#pragma unroll
        for (int half = 0; half < 2; ++half) since_flush_[half] *= shrink;
#pragma unroll
        for (int m = 0; m < columns / 8; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) out_[m][i] *= shrink;
      }
      unit = exp2f(-exponent_);
    }
    const int column = (lane_index() & 3) * 2;
#pragma unroll
    for (int m = 0; m < width / 8; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][i] = rounded<product>(s[m][i]) * scales[m * 8 + column + (i & 1)] * unit;
  }
  // Scaled weights have more digits than the product takes: what is left over makes a second product.
  TESSERA_DEVICE void multiply_values(Block<width>& s) {
    const bool scaled = p_.v_scale.present() && (p_.v_scale.step[0] != 0 || p_.v_scale.step[1] != 0);
    if (scaled) scale_by_values(s);
    multiply<product, width, columns>(out_, s, v_);
    if (!scaled || !F::halves) return;
#pragma unroll
    for (int m = 0; m < width / 8; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][i] -= rounded<product>(s[m][i]);
    multiply<product, width, columns>(out_, s, v_);
  }

  // The tensor cores cut digits when they add, so long sums are kept in parts of 2048 keys.
  TESSERA_DEVICE Address total(int n) const {
    return totals_ + (n * blockDim.x + threadIdx.x) * 4;
  }
  TESSERA_DEVICE void flush() {
#pragma unroll
    for (int m = 0; m < columns / 8; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Address at = total(m * 4 + i);
        const float sum = rules::float_of_bits(load_word(at)) * since_flush_[i / 2] + out_[m][i];
        store_word(at, rules::bits_of_float(sum));
        out_[m][i] = 0;
      }
    since_flush_[0] = since_flush_[1] = 1;
  }
  TESSERA_DEVICE float summed(int m, int i) const {
    return p_.flushes ? rules::float_of_bits(load_word(total(m * 4 + i))) : out_[m][i];
  }
  // What the sums are in units of.
  TESSERA_DEVICE float value_unit() const {
    if (!p_.v_scale.present()) return 1;
    if (p_.v_scale.step[0] == 0 && p_.v_scale.step[1] == 0) return read(p_.v_scale, p_.v_scale.at(0, 0, kv()));
    return product == Product::f16 && exponent_ > -infinity ? exp2f(exponent_) : 1.0f;
  }
  TESSERA_DEVICE float row_sum(int half) const {
    float sum = sum_[half];
    sum += from_lane(sum, 1);
    sum += from_lane(sum, 2);
    return sum;
  }

  // Sums to be stored, with those of long rows put together.
  TESSERA_DEVICE void finish_sums(const bool (&empty)[2]) {
#pragma unroll
    for (int m = 0; m < columns / 8; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (p_.flushes) out_[m][i] = rules::float_of_bits(load_word(total(m * 4 + i)));
        if (empty[i / 2]) out_[m][i] = 0;
      }
    __syncthreads();  // tiles' places are free
  }

  TESSERA_DEVICE void store_partial() {
    const float unit = value_unit(), factor[2] = {unit, unit};
    const Rows& rows = sequence().q;
    const auto partial = [&](const Query& f) {
      return (row_number(p_, rows, f.row, f.head_q) * p_.splits + split_) * rules::partial_size(p_.dim_v);
    };
    finish_sums({false, false});
    store_sums<product, columns>(out_, factor, {p_.partials, {0, 0, 0, 1}, Stored::f32, false}, slice_ * columns,
                                 p_.dim_v, staging_, [&](int row) {
                                   const Query& f = memory_.queries[warp_index() * 16 + row];
                                   return f.row < rows.used ? partial(f) : Index{-1};
                                 });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_sum(half);
      if (slice_ != 0 || (lane_index() & 3) != 0 || query(half).row >= rows.used) continue;
      float* const to = p_.partials + partial(query(half)) + p_.dim_v;
      to[0] = largest_[half] * p_.score_unit;
      to[1] = sum;
    }
  }

  TESSERA_DEVICE void store() {
    const Rows& rows = sequence().q;
    float factor[2];
    bool empty[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_sum(half);
      const Query& f = query(half);
      const RowResult result = finish_row(p_, f.head_q, f.row < rows.used, largest_[half] * p_.score_unit, sum);
      factor[half] = result.factor * value_unit();
      empty[half] = result.empty;
      if (result.empty) factor[half] = 1;
      if (slice_ == 0 && (lane_index() & 3) == 0 && f.row < rows.stored) write_facts(p_, rows, f.row, f.head_q, result);
    }
    finish_sums(empty);
    store_sums<product, columns>(out_, factor, p_.out, slice_ * columns, p_.dim_v, staging_, [&](int row) {
      const Query& f = memory_.queries[warp_index() * 16 + row];
      return f.row < rows.stored ? at_row(p_.out, rows, f.row, f.head_q) : Index{-1};
    });
  }

 private:
  const GeneralParams& p_;
  Memory memory_;
  Panels q_, k_, v_;
  Address totals_;
  Scratch scratch_, staging_;
  int split_, slice_, first_head_;
  Block<columns> out_;
  float largest_[2], sum_[2];  // in units of score_unit; of this lane's columns
  float since_flush_[2];       // how much sums have shrunk since the last flush
  float exponent_;             // of the unit of V's scales
};

// A part's sums are against its own largest score; where that is -inf they are 0, or, of NaN scores, NaN.
TESSERA_DEVICE float part_weight(float part, float whole) {
  return part == whole ? 1 : expf(part - whole);
}

// The splits of each row become one, in order; a warp takes one row of one head.
TESSERA_DEVICE void combine(const GeneralParams& p) {
  const Index rows = p.queries.longest, all = Index{p.batch} * rows * p.heads;
  const int lane = lane_index();
  for (Index n = Index{blockIdx.x} * warps() + warp_index(); n < all; n += Index{gridDim.x} * warps()) {
    const int head = static_cast<int>(n % p.heads), row = static_cast<int>(n / p.heads % rows);
    const Sequence s = sequence(p, static_cast<int>(n / p.heads / rows));
    if (s.unsound || row >= s.q.stored) continue;
    const bool used = row < s.q.used;
    const Index size = rules::partial_size(p.dim_v);
    const float* const parts = p.partials + row_number(p, s.q, row, head) * p.splits * size;
    float largest = minus_infinity, sum = 0;
    if (used) {
      for (int part = 0; part < p.splits; ++part) largest = fmaxf(largest, parts[part * size + p.dim_v]);
      for (int part = 0; part < p.splits; ++part)
        sum += parts[part * size + p.dim_v + 1] * part_weight(parts[part * size + p.dim_v], largest);
    }
    const RowResult result = finish_row(p, head, used, largest, sum);
    const Index at = at_row(p.out, s.q, row, head);
    for (int column = lane; column < p.dim_v; column += 32) {
      float x = 0;
      if (!result.empty)
        for (int part = 0; part < p.splits; ++part)
          x += parts[part * size + column] * part_weight(parts[part * size + p.dim_v], largest);
      write(p.out, at + column * p.out.step[3], result.empty ? 0 : x * result.factor);
    }
    if (lane == 0) write_facts(p, s.q, row, head, result);
  }
}

}  // namespace tessera::device
