// Gradients for every option of the contract, always in one order: no sum is left to whoever comes first.
//
// Each task makes the scores again. A block of `queries` owns 16 queries a warp and walks the keys that they see; a
// block of `keys` owns 16 keys a warp and walks the queries that see them, of all heads that share the keys; a block of
// `bias` owns a tile of dBias and walks what is broadcast over it. Wide gradients are cut into slices, and each slice
// makes the scores for itself.
#pragma once
#include "device/general/block.h"

namespace tessera::device {

using rules::GeneralSpec;

// Two operands stay in shared memory, or take turns in one place; two come by in steps, a group of panels at a time. Of
// those that come by, a slice is needed as rows once more: it lies in the panels already, or in places of its own.
template <Product P, int width, int columns>
struct Places {
  static constexpr int slice_panels = columns / Format<P>::per_panel;
  Panels stay, stay_v, pass, pass_v;
  Panels slice, slice_v;

  Scratch scratch, scratch_v, staging;  // of this warp; the last at the end, where tiles were

  TESSERA_DEVICE Places(const GeneralParams& p, Address first, int rows, bool both_slices) {
    stay = {first, rows};
    stay_v = p.takes_turns ? stay : Panels{stay.panel(p.panels), rows};
    pass = {p.takes_turns ? stay.panel(max(p.panels, p.panels_v)) : stay_v.panel(p.panels_v), width};
    pass_v = {pass.panel(p.at_once), width};
    slice = {pass_v.panel(p.at_once_v), width};
    slice_v = {whole(p) ? slice.first : slice.panel(slice_panels), width};
    if (!both_slices) slice_v = slice;
    const int slices = (whole(p) ? 0 : 1) + (both_slices && !whole_v(p) ? 1 : 0);
    const Address after = slice.panel(slices * slice_panels);
    scratch = {after + static_cast<Address>(warp_index() * 2 * rules::scratch_bytes(width)), width};
    scratch_v = {scratch.first + static_cast<Address>(rules::scratch_bytes(width)), width};
    staging = {first + static_cast<Address>(warp_index() * rules::scratch_bytes(64)), 64};
  }
  static TESSERA_DEVICE bool whole(const GeneralParams& p) { return p.at_once >= p.panels; }
  static TESSERA_DEVICE bool whole_v(const GeneralParams& p) { return p.at_once_v >= p.panels_v; }
  TESSERA_DEVICE Panels slice_of(const GeneralParams& p, int n) const {
    return whole(p) ? Panels{pass.panel(n * slice_panels), width} : slice;
  }
  TESSERA_DEVICE Panels slice_v_of(const GeneralParams& p, int n) const {
    return whole_v(p) ? Panels{pass_v.panel(n * slice_panels), width} : slice_v;
  }
};

// block = a b^T, group after group of b's panels; the first is there. `load(panel)` brings the group from that panel
// on.
template <Product P, int width, class Load>
TESSERA_DEVICE void multiply_groups(Block<width>& block, const Panels& a, const Panels& b, int panels, int at_once,
                                    Load&& load) {
  clear<width>(block);
  for (int panel = 0;;) {
    const int count = min(at_once, panels - panel);
    multiply_transposed<P, width>(block, Panels{a.panel(panel), a.rows}.from_row(warp_index() * 16), b, count);
    panel += count;
    if (panel == panels) return;
    __syncthreads();
    load(panel);
    close_copies();
    wait_copies<0>();
    __syncthreads();
  }
}

// What one pair of query and key adds. dp is dO . v.
struct PairGradient {
  float weight;  // P times dropout's factor: of dV
  float g, dz;
};
template <Product P>
TESSERA_DEVICE PairGradient gradient_of(const GeneralParams& p, const Sequence& s, const Query& query, int key,
                                        float product, float dp, bool dropped) {
  const float z = product * p.scale;
  const Score x = has_pair_options(p) ? score_of(p, s, query, key, z) : Score{z, 1};
  if (x.value == minus_infinity) return {};
  const float prob = exponential<P>(x.value - query.lse), factor = dropped ? 0 : p.keep_scale;
  const float g = prob * (factor * dp + query.term);
  return {prob * factor, g, g * x.slope};
}

// Rows of q or dO of one head; a row that keeps nothing becomes zeros, whatever lies there.
template <Product P>
TESSERA_DEVICE void load_queries(const GeneralParams& p, const Sequence& s, const Query* queries, const Panels& tile,
                                 const View& from, Columns columns) {
  load_panels<P>(tile, from, columns, [&](int row) {
    const Query& f = queries[row];
    const bool keeps = f.lse != infinity && (f.near.end > f.near.begin || f.head.end > f.head.begin);
    return keeps ? at_row(from, s.q, f.row, f.head_q) : Index{-1};
  });
}

// Of a tile of `rows` queries and `width` keys: products, loads and turns, for the tasks that own queries.
template <GeneralSpec S>
class QueryTile {
 public:
  static constexpr Product product = S.product;
  static constexpr int width = S.width, columns = S.columns;

  TESSERA_DEVICE QueryTile(const GeneralParams& p, char* memory)
      : p_(p), memory_(memory_of(memory, 16 * warps())), places_(p, memory_.panels, 16 * warps(), false) {}

 protected:
  TESSERA_DEVICE const Sequence& sequence() const { return memory_.header->sequence; }
  TESSERA_DEVICE bool is_there(int key) const {
    return p_.plain_keys || memory_.header->there[key];
  }  // of those at hand
  TESSERA_DEVICE const Query& query(int half) const { return memory_.queries[lane_row(half)]; }

  // Queries first_row ... of a head, and the walk over their keys. False if there are none.
  TESSERA_DEVICE bool find(int batch, int head, Index first_row) {
    __syncthreads();
    if (thread_index() == 0) {
      Header& h = *memory_.header;
      h.sequence = device::sequence(p_, batch);
      note(p_, h.sequence.unsound);
      h.walk = walk_of(h.sequence.band, rules::overlap({first_row, first_row + 16 * warps()}, {0, h.sequence.q.used}),
                       width);
    }
    __syncthreads();
    if (sequence().unsound || first_row >= sequence().q.stored) return false;
    for (int r = thread_index(); r < 16 * warps(); r += static_cast<int>(blockDim.x))
      memory_.queries[r] = query_of(p_, sequence(), first_row + r, head);
    kv_ = head / p_.group;
    __syncthreads();
    return true;
  }
  TESSERA_DEVICE void load_stay() {
    if (p_.takes_turns) return;
    load_queries<product>(p_, sequence(), memory_.queries, places_.stay, p_.q, {0, p_.panels, p_.dim});
    load_queries<product>(p_, sequence(), memory_.queries, places_.stay_v, p_.dout, {0, p_.panels_v, p_.dim_v});
    close_copies();
  }
  TESSERA_DEVICE void load_keys(const Panels& to, const View& from, int first_key, Columns columns) {
    const Walk& walk = memory_.header->walk;
    device::load_keys<product>(p_, *memory_.header, to, from, View{}, nullptr, kv_, first_key, columns, walk.near,
                               walk.head);
  }
  // Scores' products and dO . v of the tile of keys from first_key on; `more` loads what else is needed.
  template <class More>
  TESSERA_DEVICE void multiply_both(Block<width>& s, Block<width>& dp, int first_key, More&& more) {
    const auto load_k = [&](int panel) {
      load_keys(places_.pass, p_.k, first_key, {panel, min(panel + p_.at_once, max(p_.panels, p_.at_once)), p_.dim});
    };
    const auto load_v = [&](int panel) {
      load_keys(places_.pass_v, p_.v, first_key,
                {panel, min(panel + p_.at_once_v, max(p_.panels_v, p_.at_once_v)), p_.dim_v});
    };
    __syncthreads();  // the last tile's places are free
    load_k(0);
    load_v(0);
    more();
    if (p_.takes_turns)
      load_queries<product>(p_, sequence(), memory_.queries, places_.stay, p_.q, {0, p_.panels, p_.dim});
    close_copies();
    wait_copies<0>();
    __syncthreads();
    multiply_groups<product, width>(s, places_.stay, places_.pass, p_.panels, p_.at_once, load_k);
    if (p_.takes_turns) {
      __syncthreads();
      load_queries<product>(p_, sequence(), memory_.queries, places_.stay_v, p_.dout, {0, p_.panels_v, p_.dim_v});
      close_copies();
      wait_copies<0>();
      __syncthreads();
    }
    multiply_groups<product, width>(dp, places_.stay_v, places_.pass_v, p_.panels_v, p_.at_once_v, load_v);
  }
  // s becomes `chosen` of each pair's gradient, 0 where the pair does not exist. `each(query, key, gradient)` sees them
  // too. Lanes are keys, so that what lies along the keys is read in one go.
  template <class Each>
  TESSERA_DEVICE void find_gradients(Block<width>& s, const Block<width>& dp, int first_key,
                                     float PairGradient::*chosen, Each&& each) {
    spread<width>(s, places_.scratch);
    spread<width>(dp, places_.scratch_v);
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const Query& f = memory_.queries[warp_index() * 16 + row];
      float shared = 0;
#pragma unroll 1
      for (int column = lane_index(); column < width; column += 32) {
        const int key = first_key + column;
        PairGradient gradient = {};
        if (is_there(column) && (f.near.has(key) || f.head.has(key))) {
          const bool dropped = p_.drops && drops(p_, dropout_words(p_, sequence(), f.head_q, f.row, key), f.row, key);
          gradient = gradient_of<product>(p_, sequence(), f, key, places_.scratch.get(row, column),
                                          places_.scratch_v.get(row, column), dropped);
        }
        places_.scratch.put(row, column, gradient.*chosen);
        shared += each(f, key, gradient);
      }
      add_row(row, shared);
    }
    collect<width>(s, places_.scratch);
  }
  // Lane r keeps the sum of what `each` gave for row r.
  TESSERA_DEVICE void add_row(int row, float x) {
    if (!p_.sums_slopes) return;
    for (int lanes = 16; lanes > 0; lanes /= 2) x += from_lane(x, lanes);
    if (lane_index() == row) row_share_ += x;
  }

  float row_share_ = 0;
  const GeneralParams& p_;
  Memory memory_;
  Places<product, width, columns> places_;
  int kv_ = 0;
};

// dQ, or if `sums_slopes` each row's share of dSlopes.
template <GeneralSpec S>
class QueryGradients : QueryTile<S> {
  using Base = QueryTile<S>;
  using Base::p_, Base::places_, Base::product, Base::width, Base::columns;

 public:
  using Base::Base;

  TESSERA_DEVICE void run(Index item) {
    const int slice = static_cast<int>(item % p_.slices);
    item /= p_.slices;
    const int tile = p_.row_tiles - 1 - static_cast<int>(item % p_.row_tiles);
    item /= p_.row_tiles;
    const int head = static_cast<int>(item % p_.heads), batch = static_cast<int>(item / p_.heads);
    if (!this->find(batch, head, Index{tile} * 16 * warps())) return;
    this->load_stay();
    Block<columns> sum;
    clear<columns>(sum);
    this->row_share_ = 0;
    const Walk& walk = this->memory_.header->walk;
    for (int n = 0; n < walk.count; ++n) {
      const int first_key = walk.tile(n) * width;
      Block<width> s, dp;
      this->multiply_both(s, dp, first_key, [&] {
        constexpr int panels = Places<product, width, columns>::slice_panels;
        if (!places_.whole(p_))
          this->load_keys(places_.slice, p_.k, first_key, {slice * panels, (slice + 1) * panels, p_.dim});
      });
      this->find_gradients(s, dp, first_key, &PairGradient::dz, [](const Query& f, int key, const PairGradient& x) {
        const Index far = f.position - key;
        return -static_cast<float>(far < 0 ? -far : far) * x.g;
      });
      if (p_.sums_slopes) continue;
      multiply<product, width, columns>(sum, s, places_.slice_of(p_, slice));
    }
    wait_copies<0>();  // of q, where nothing was visited
    __syncthreads();
    const Rows& rows = this->sequence().q;
    const auto at = [&](const View& view, int row) {
      const Query& f = this->memory_.queries[warp_index() * 16 + row];
      return f.row < rows.stored ? at_row(view, rows, f.row, f.head_q) : Index{-1};
    };
    if (!p_.sums_slopes)
      return store_sums<product, columns>(sum, {p_.scale, p_.scale}, p_.dq, slice * columns, p_.dim, places_.staging,
                                          [&](int row) { return at(p_.dq, row); });
    if (lane_index() >= 16) return;
    const Query& f = this->memory_.queries[warp_index() * 16 + lane_index()];
    if (f.row < rows.used) p_.row_slope[row_number(p_, rows, f.row, f.head_q)] = this->row_share_;
  }
};

// dK and dV.
template <GeneralSpec S>
class KeyGradients {
 public:
  static constexpr Product product = S.product;
  static constexpr int width = S.width, columns = S.columns;

  TESSERA_DEVICE KeyGradients(const GeneralParams& p, char* memory)
      : p_(p), memory_(memory_of(memory, width)), places_(p, memory_.panels, 16 * warps(), true) {}

  TESSERA_DEVICE void run(Index item) {
    const int slice = static_cast<int>(item % p_.slices);
    item /= p_.slices;
    const int tile = static_cast<int>(item % p_.key_tiles);
    item /= p_.key_tiles;
    kv_ = static_cast<int>(item % p_.heads_kv);
    const int batch = static_cast<int>(item / p_.heads_kv);
    const Index first = Index{tile} * 16 * warps();
    if (thread_index() == 0) {
      Header& h = *memory_.header;
      h.sequence = device::sequence(p_, batch);
      note(p_, h.sequence.unsound);
      const Range keys = rules::overlap({first, first + 16 * warps()}, {0, h.sequence.k.used});
      h.seen = keys.empty() || h.sequence.unsound || h.sequence.q.used == 0
                   ? Range{0, 0}
                   : rules::rows_visiting(h.sequence.band, {0, h.sequence.q.used}, keys);
      if (h.seen.empty()) h.seen = {0, 0};
    }
    __syncthreads();
    if (sequence().unsound || first >= sequence().k.stored) return;
    first_key_ = static_cast<int>(first);
    if (!p_.takes_turns) {
      load_stay(places_.stay, p_.k, {0, p_.panels, p_.dim});
      load_stay(places_.stay_v, p_.v, {0, p_.panels_v, p_.dim_v});
      close_copies();
    }
    Block<columns> dk, dv;
    clear<columns>(dk);
    clear<columns>(dv);
    const Range seen = memory_.header->seen;
    for (int head = kv_ * p_.group; head < (kv_ + 1) * p_.group; ++head)
      for (int t = static_cast<int>(seen.begin / width); t * Index{width} < seen.end; ++t) {
        Block<width> s, dp;
        multiply_both(s, dp, slice, head, t * width);
        find_gradients(s, dp);
        if (slice * columns < p_.dim_v) multiply<product, width, columns>(dv, s, places_.slice_v_of(p_, slice));
        if (slice * columns < p_.dim) multiply<product, width, columns>(dk, dp, places_.slice_of(p_, slice));
      }
    wait_copies<0>();
    __syncthreads();
    const auto store = [&](const Block<columns>& sum, float factor, const View& to, int count) {
      if (!to.present()) return;
      store_sums<product, columns>(sum, {factor, factor}, to, slice * columns, count, places_.staging, [&](int row) {
        const int key = first_key_ + warp_index() * 16 + row;
        return key < sequence().k.stored ? at_row(to, sequence().k, key, kv_) : Index{-1};
      });
    };
    store(dk, p_.scale, p_.dk, p_.dim);
    store(dv, 1, p_.dv, p_.dim_v);
  }

 private:
  TESSERA_DEVICE const Sequence& sequence() const { return memory_.header->sequence; }
  TESSERA_DEVICE bool is_there(int key) const {
    return p_.plain_keys || memory_.header->there[key];
  }  // of those at hand

  TESSERA_DEVICE void load_stay(const Panels& to, const View& from, Columns columns) {
    const Keys keys = {0, memory_.header->seen.empty() ? 0 : sequence().k.used};
    device::load_keys<product>(p_, *memory_.header, to, from, View{}, nullptr, kv_, first_key_, columns, keys, {0, 0});
  }

  TESSERA_DEVICE void multiply_both(Block<width>& s, Block<width>& dp, int slice, int head, int first_row) {
    __syncthreads();  // the last tile's places are free
    for (int r = thread_index(); r < width; r += static_cast<int>(blockDim.x))
      memory_.queries[r] = query_of(p_, sequence(), first_row + r, head);
    __syncthreads();
    const auto load = [&](const Panels& to, const View& from, Columns columns) {
      load_queries<product>(p_, sequence(), memory_.queries, to, from, columns);
    };
    const auto load_q = [&](int panel) {
      load(places_.pass, p_.q, {panel, min(panel + p_.at_once, max(p_.panels, p_.at_once)), p_.dim});
    };
    const auto load_dout = [&](int panel) {
      load(places_.pass_v, p_.dout, {panel, min(panel + p_.at_once_v, max(p_.panels_v, p_.at_once_v)), p_.dim_v});
    };
    constexpr int panels = Places<product, width, columns>::slice_panels;
    load_q(0);
    load_dout(0);
    if (!places_.whole(p_)) load(places_.slice, p_.q, {slice * panels, (slice + 1) * panels, p_.dim});
    if (!places_.whole_v(p_)) load(places_.slice_v, p_.dout, {slice * panels, (slice + 1) * panels, p_.dim_v});
    if (p_.takes_turns) load_stay(places_.stay, p_.k, {0, p_.panels, p_.dim});
    close_copies();
    wait_copies<0>();
    __syncthreads();
    multiply_groups<product, width>(s, places_.stay, places_.pass, p_.panels, p_.at_once, load_q);
    if (p_.takes_turns) {
      __syncthreads();
      load_stay(places_.stay_v, p_.v, {0, p_.panels_v, p_.dim_v});
      close_copies();
      wait_copies<0>();
      __syncthreads();
    }
    multiply_groups<product, width>(dp, places_.stay_v, places_.pass_v, p_.panels_v, p_.at_once_v, load_dout);
  }

  // s becomes the weights of dV, dp becomes dZ. One call of Philox serves keys 8 apart.
  TESSERA_DEVICE void find_gradients(Block<width>& s, Block<width>& dp) {
    spread<width>(s, places_.scratch);
    spread<width>(dp, places_.scratch_v);
#pragma unroll 1
    for (int n = lane_index(); n < 8 * width; n += 32) {
      const int column = n % width;
      const Query& f = memory_.queries[column];
      rules::Words4 words = {};
      if (p_.drops) words = dropout_words(p_, sequence(), f.head_q, f.row, first_key_ + warp_index() * 16 + n / width);
#pragma unroll 1
      for (int row = n / width; row < 16; row += 8) {
        const int key = first_key_ + warp_index() * 16 + row;
        PairGradient gradient = {};
        if (is_there(warp_index() * 16 + row) && (f.near.has(key) || f.head.has(key)))
          gradient = gradient_of<product>(p_, sequence(), f, key, places_.scratch.get(row, column),
                                          places_.scratch_v.get(row, column), p_.drops && drops(p_, words, f.row, key));
        places_.scratch.put(row, column, gradient.weight);
        places_.scratch_v.put(row, column, gradient.dz);
      }
    }
    collect<width>(s, places_.scratch);
    collect<width>(dp, places_.scratch_v);
  }

  const GeneralParams& p_;
  Memory memory_;
  Places<product, width, columns> places_;
  int kv_ = 0, first_key_ = 0;
};

// dBias. A block owns a tile of it and sums over the batches, heads, rows and keys that it is broadcast over.
template <GeneralSpec S>
class BiasGradients : QueryTile<S> {
  using Base = QueryTile<S>;
  using Base::p_, Base::product, Base::width;

 public:
  using Base::Base;

  TESSERA_DEVICE void run(Index item) {
    const int* const extent = p_.bias_extent;
    const int rows = 16 * warps();
    const bool one_row = extent[2] == 1, one_key = extent[3] == 1;
    const int row_tiles = one_row ? 1 : p_.row_tiles, key_tiles = one_key ? 1 : p_.key_tiles;
    const int key_tile = static_cast<int>(item % key_tiles);
    item /= key_tiles;
    const int row_tile = static_cast<int>(item % row_tiles);
    item /= row_tiles;
    const int head = static_cast<int>(item % extent[1]), batch = static_cast<int>(item / extent[1]);
    const Range batches = extent[0] == 1 ? Range{0, p_.batch} : Range{batch, batch + 1};
    const Range heads = extent[1] == 1 ? Range{0, p_.heads} : Range{head, head + 1};
    const Range tiles = one_row ? Range{0, p_.row_tiles} : Range{row_tile, row_tile + 1};
    Block<width> sum;
    clear<width>(sum);
    for (Index b = batches.begin; b < batches.end; ++b)
      for (Index h = heads.begin; h < heads.end; ++h)
        for (Index t = tiles.begin; t < tiles.end; ++t) {
          if (!this->find(static_cast<int>(b), static_cast<int>(h), t * rows)) continue;
          this->load_stay();
          const Walk& walk = this->memory_.header->walk;
          for (int n = 0; n < walk.count; ++n)
            if (one_key || walk.tile(n) == key_tile) add(sum, walk.tile(n) * width);
          wait_copies<0>();
        }
    store(sum, batch, head, row_tile, key_tile);
  }

 private:
  TESSERA_DEVICE void add(Block<width>& sum, int first_key) {
    Block<width> s, dp;
    this->multiply_both(s, dp, first_key, [] {});
    this->find_gradients(s, dp, first_key, &PairGradient::g,
                         [](const Query&, int, const PairGradient&) { return 0.0f; });
#pragma unroll
    for (int m = 0; m < width / 8; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m][i] += s[m][i];
  }

  // The tile goes to shared memory, and each number of dBias is the sum of those that fall on it.
  TESSERA_DEVICE void store(const Block<width>& sum, int batch, int head, int row_tile, int key_tile) {
    const int rows = 16 * warps(), column = (lane_index() & 3) * 2;
    const Address tile = this->memory_.panels;
    const auto at = [&](int r, int c) { return tile + static_cast<Address>((r * width + c) * 4); };
    __syncthreads();
#pragma unroll
    for (int m = 0; m < width / 8; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_word(at(lane_row(i / 2), m * 8 + column + (i & 1)), rules::bits_of_float(sum[m][i]));
    __syncthreads();
    const bool one_row = p_.bias_extent[2] == 1, one_key = p_.bias_extent[3] == 1;
    const int rows_out = one_row ? 1 : rows, keys_out = one_key ? 1 : width;
    for (int n = thread_index(); n < rows_out * keys_out; n += static_cast<int>(blockDim.x)) {
      const int r = n / keys_out, c = n % keys_out;
      const Index row = one_row ? 0 : Index{row_tile} * rows + r, key = one_key ? 0 : Index{key_tile} * width + c;
      if (row >= p_.bias_extent[2] || key >= p_.bias_extent[3]) continue;
      double total = 0;  // what cancels here loses no more digits
      for (int i = one_row ? 0 : r; i < (one_row ? rows : r + 1); ++i)
        for (int j = one_key ? 0 : c; j < (one_key ? width : c + 1); ++j)
          total += rules::float_of_bits(load_word(at(i, j)));
      write_any(p_.dbias, p_.dbias.at(batch, head, row, key), static_cast<float>(total));
    }
    __syncthreads();
  }
};

// dO . out of one row, by a warp or, of float32, by a thread in the order of the products: where out is a row of V, dO
// . v must be the same number, since their difference is what remains.
TESSERA_DEVICE float dot_of_row(const GeneralParams& p, Index at_out, Index at_dout, bool& zeros) {
  float delta = 0;
  zeros = true;
  const bool alone = p.out.dtype == Stored::f32;
  for (int c = alone ? 0 : lane_index(); c < p.dim_v; c += alone ? 1 : 32) {
    const float out = read(p.out, at_out + c * p.out.step[3]);
    zeros = zeros && out == 0;
    delta = fmaf(out, read(p.dout, at_dout + c * p.dout.step[3]), delta);
  }
  if (alone) return delta;
  for (int lanes = 16; lanes > 0; lanes /= 2) delta += from_lane(delta, lanes);
  zeros = __all_sync(0xFFFFFFFFu, zeros);
  return delta;
}

// Of each row and head: lse as the other tasks use it (+inf where the row keeps nothing) and dLSE - dO . out.
TESSERA_DEVICE void find_terms(const GeneralParams& p) {
  const bool alone = p.out.dtype == Stored::f32;  // a thread takes a row, else a warp
  const Index rows = p.queries.longest, all = Index{p.batch} * rows * p.heads;
  const Index mine = alone ? Index{blockIdx.x} * blockDim.x + threadIdx.x : Index{blockIdx.x} * warps() + warp_index();
  const Index at_once = Index{gridDim.x} * (alone ? static_cast<int>(blockDim.x) : warps());
  for (Index n = mine; n < all; n += at_once) {
    const int row = static_cast<int>(n % rows), head = static_cast<int>(n / rows % p.heads);
    const Sequence s = sequence(p, static_cast<int>(n / rows / p.heads));
    if (s.unsound || row >= s.q.used) continue;
    bool zeros;
    const float delta = dot_of_row(p, at_row(p.out, s.q, row, head), at_row(p.dout, s.q, row, head), zeros);
    if (!alone && lane_index() != 0) continue;
    const float lse = read(p.lse, at_row(p.lse, s.q, row, head));
    // Where the sink is all there is, no dO, be it NaN, makes the term anything but dLSE.
    const bool sink_alone = zeros && p.sinks.present() && lse == read(p.sinks, p.sinks.at(0, 0, head));
    const float dlse = p.dlse.present() ? read(p.dlse, at_row(p.dlse, s.q, row, head)) : 0;
    const Index at = row_number(p, s.q, row, head);
    p.row_lse[at] = lse == minus_infinity || sink_alone ? infinity : lse;
    p.row_term[at] = lse == minus_infinity ? 0 : dlse - (sink_alone ? 0 : delta);
  }
}

// The sum over a block's threads, always in one order; for thread 0.
TESSERA_DEVICE double sum_of_block(double x) {
  __shared__ double parts[32 * rules::most_warps];
  __syncthreads();
  parts[threadIdx.x] = x;
  __syncthreads();
  double sum = 0;
  for (unsigned n = 0; threadIdx.x == 0 && n < blockDim.x; ++n) sum += parts[n];
  return sum;
}

// dSlopes and dSinks: a block sums over all rows of one head, in float64.
TESSERA_DEVICE void reduce(const GeneralParams& p) {
  const bool slope_of_batch = p.dslopes.present() && p.slopes_by_batch;
  const auto exponent = [](float x) { return expf(x); };
  for (int head = static_cast<int>(blockIdx.x); head < p.heads; head += static_cast<int>(gridDim.x)) {
    double slope = 0, sink = 0;
    const auto write_slope = [&](int batch) {
      const double sum = sum_of_block(slope);
      if (threadIdx.x == 0) write(p.dslopes, p.dslopes.at(batch, 0, head), static_cast<float>(sum));
      slope = 0;
    };
    for (int b = 0; b < p.batch; ++b) {
      const Sequence s = sequence(p, b);
      for (int row = thread_index(); !s.unsound && row < s.q.used; row += static_cast<int>(blockDim.x)) {
        const Index n = row_number(p, s.q, row, head);
        if (p.dslopes.present()) slope += p.row_slope[n];
        if (!p.dsinks.present()) continue;
        const float lse = read(p.lse, at_row(p.lse, s.q, row, head));
        if (lse != minus_infinity)
          sink += rules::weight(read(p.sinks, p.sinks.at(0, 0, head)), lse, exponent) * p.row_term[n];
      }
      if (slope_of_batch) write_slope(b);
    }
    if (p.dslopes.present() && !slope_of_batch) write_slope(0);
    if (!p.dsinks.present()) continue;
    const double sum = sum_of_block(sink);
    if (threadIdx.x == 0) write(p.dsinks, p.dsinks.at(0, 0, head), static_cast<float>(sum));
  }
}

// Rows past the last sequence of packed operands: zeros, and -inf in lse and max_score.
TESSERA_DEVICE void clear_tails(const GeneralParams& p) {
  const auto clear_rows = [&](const View& view, const rules::DeviceLengths& lengths, int heads, int columns, float x) {
    if (!view.present() || !lengths.cu) return;
    const int begin = lengths.cu[p.batch];
    if (begin < 0 || begin > lengths.rows) return note(p, rules::unsound_length);
    const Index all = (lengths.rows - begin) * heads * columns;
    for (Index n = Index{blockIdx.x} * blockDim.x + threadIdx.x; n < all; n += Index{gridDim.x} * blockDim.x)
      write(view, view.at(0, begin + n / columns / heads, n / columns % heads, n % columns), x);
  };
  clear_rows(p.out, p.queries, p.heads, p.dim_v, 0);
  clear_rows(p.lse, p.queries, p.heads, 1, minus_infinity);
  clear_rows(p.max_score, p.queries, p.heads, 1, minus_infinity);
  clear_rows(p.dq, p.queries, p.heads, p.dim, 0);
  clear_rows(p.dk, p.keys, p.heads_kv, p.dim, 0);
  clear_rows(p.dv, p.keys, p.heads_kv, p.dim_v, 0);
}

}  // namespace tessera::device
