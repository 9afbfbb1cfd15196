// What the per-instruction-set bodies are handed: one item of work at a time, and one thread's buffers.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/sequence.h"

namespace tessera::cpu {

using core::Bindings;
using core::Operand;
using core::Problem;
using core::Sequence;
using rules::Index;
using rules::Range;

// Keys are attended in chunks of this many, or the next less that is whole tiles; each has a softmax of its own, and
// they are joined in order. So it changes no bit whether one thread takes them all or each goes to another.
inline constexpr Index chunk_of_keys = 1024;

struct Task {
  const Problem& p;
  const Bindings& bound;
  Index tile_rows, tile_keys;
  double scale = p.has_scale ? p.scale : 1 / std::sqrt(static_cast<double>(p.dim));
  // States of chunks: by row_slot, then chunk, `state_size` numbers each.
  std::byte* states = nullptr;
  // (plane, Hq, rows of q): dO . out, by what accumulates; each row's share of dSlopes.
  float* delta_f32 = nullptr;
  double* delta_f64 = nullptr;
  double* slope_rows = nullptr;

  template <class T>
  T* delta() const {
    if constexpr (sizeof(T) == 4) return delta_f32;
    else return delta_f64;
  }
  Index chunk_keys() const { return rules::max(Index{1}, chunk_of_keys / tile_keys) * tile_keys; }
  Index most_chunks() const { return rules::ceil_div(p.len_k, chunk_keys()); }
  // Chunks that some row of the sequence sees, and those between.
  Range chunks(const Sequence& s) const {
    const core::Seen seen = core::seen_keys(p, s);
    const Range keys = rules::hull(seen.head, seen.near);
    return keys.empty() ? Range{0, 0} : Range{keys.begin / chunk_keys(), rules::ceil_div(keys.end, chunk_keys())};
  }
  // Place of (row i, head h) in them.
  Index row_slot(const Sequence& s, Index h, Index i) const {
    const Index rows = core::packed_q(p) ? p.rows_q : p.len_q;
    return (s.q.plane * p.heads_q + h) * rows + s.q.first + i;
  }
  bool has(int name) const { return core::has(p, name); }
  const Operand& operand(int name) const { return core::operand(p, name); }
  template <class T>
  const T* data(int name) const {
    return static_cast<const T*>(bound.data[name]);
  }
};

// Query rows of one KV head's group, flattened: r = i * group + g is row i of head kv * group + g.
struct RowItem {
  Sequence s;
  Index kv;
  Range rows;
  rules::BandMask band;
  rules::Visit visit;  // the keys that the rows see
  core::Seen seen;
};
// The same against one chunk of keys; the state goes to the workspace.
struct ChunkItem {
  RowItem rows;
  Index chunk;
};
struct NewItem {  // new tokens of a sequence
  Sequence s;
  Range tokens;
};
struct KeyItem {
  Sequence s;
  Index kv;
  Range keys;
};
// A tile of dbias; a broadcast dimension has its whole range here.
struct BiasItem {
  Range batches, heads, rows, keys;
};

// Hands out one thread's buffers; with a null base it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(Index count) {
    const Index at = used_;
    used_ = rules::round_up(used_ + count * static_cast<Index>(sizeof(T)), 64);
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  Index used() const { return used_; }

 private:
  std::byte* base_;
  Index used_ = 0;
};

// Rows are padded to 16 numbers, a whole number of registers on every instruction set.
inline Index padded(Index n) {
  return rules::round_up(n, 16);
}

// out, its largest score and its sum of weights, as one line of the workspace.
inline Index state_size(const Problem& p) {
  return padded(p.dim_v) + 16;
}

// The rows of one tile, and what is known of each.
struct RowTile {
  Index count;
  Index* i;  // row of the sequence
  Index* h;  // query head
  RowTile(Carver& carve, Index most) : count(0), i(carve.take<Index>(most)), h(carve.take<Index>(most)) {}
};

template <class T>
struct Buffers {
  Index d, dv, n;     // padded dims and tile of keys
  T *q, *k, *kt, *v;  // rows x d, keys x d (also a stage for values), d x keys, keys x dv
  T* scores;          // rows x keys; weights later
  uint8_t* kept;      // rows x keys
  T* line;            // one row of bias, dropout factors or out
  RowTile rows;

  Buffers(Carver& carve, const Problem& p, Index tile_rows, Index tile_keys)
      : d(padded(p.dim)),
        dv(padded(p.dim_v)),
        n(padded(tile_keys)),
        q(carve.take<T>(tile_rows * d)),
        k(carve.take<T>(n * rules::max(d, dv))),
        kt(carve.take<T>(d * n)),
        v(carve.take<T>(n * dv)),
        scores(carve.take<T>(tile_rows * n)),
        kept(carve.take<uint8_t>(tile_rows * n)),
        line(carve.take<T>(rules::max(n, dv))),
        rows(carve, tile_rows) {}
};

// Running softmax of a tile of rows.
template <class T>
struct State {
  T* out;            // rows x dv
  T *largest, *sum;  // rows
  State(Carver& carve, Index rows, Index dv)
      : out(carve.take<T>(rows * dv)), largest(carve.take<T>(rows)), sum(carve.take<T>(rows)) {}
};

// What rotating takes: one row, and the cosines and sines of one position.
template <class T>
struct RotaryBuffers {
  Index pairs;
  T *row, *cos, *sin;
  RotaryBuffers(Carver& carve, const Problem& p)
      : pairs(p.cache.rotary_dim / 2),
        row(carve.take<T>(pairs ? padded(p.dim) : 0)),
        cos(carve.take<T>(padded(pairs))),
        sin(carve.take<T>(padded(pairs))) {}
};

template <class T>
struct AppendBuffers {
  T* row;
  RotaryBuffers<T> rotary;
  AppendBuffers(Carver& carve, const Problem& p)
      : row(carve.take<T>(padded(rules::max(p.dim, p.dim_v)))), rotary(carve, p) {}
};

template <class T>
struct ForwardBuffers : Buffers<T> {
  State<T> whole, part;  // of all chunks so far, of the chunk at hand
  RotaryBuffers<T> rotary;
  uint16_t* weights;  // rows x keys, in bf16 for products of pairs
  ForwardBuffers(Carver& carve, const Problem& p, Index tile_rows, Index tile_keys)
      : Buffers<T>(carve, p, tile_rows, tile_keys),
        whole(carve, tile_rows, this->dv),
        part(carve, tile_rows, this->dv),
        rotary(carve, p),
        weights(carve.take<uint16_t>(tile_rows * this->n)) {}
};

template <class T>
struct BackwardBuffers : Buffers<T> {
  T *dout, *vt;                 // rows x dv, dv x keys
  T *g, *dz, *cap;              // rows x keys: G, dZ, dt/dz
  T *lse, *delta, *dlse;        // rows
  T* shares;                    // rows: shares of dSlopes
  T *grad_q, *grad_k, *grad_v;  // rows x d, keys x d, keys x dv
  T* grad_bias;                 // rows x keys
  BackwardBuffers(Carver& carve, const Problem& p, Index tile_rows, Index tile_keys)
      : Buffers<T>(carve, p, tile_rows, tile_keys),
        dout(carve.take<T>(tile_rows * this->dv)),
        vt(carve.take<T>(this->dv * this->n)),
        g(carve.take<T>(tile_rows * this->n)),
        dz(carve.take<T>(tile_rows * this->n)),
        cap(carve.take<T>(tile_rows * this->n)),
        lse(carve.take<T>(tile_rows)),
        delta(carve.take<T>(tile_rows)),
        dlse(carve.take<T>(tile_rows)),
        shares(carve.take<T>(tile_rows)),
        grad_q(carve.take<T>(tile_rows * this->d)),
        grad_k(carve.take<T>(this->n * this->d)),
        grad_v(carve.take<T>(this->n * this->dv)),
        grad_bias(carve.take<T>(tile_rows * this->n)) {}
};

// One instruction set's functions, for one type of accumulation.
struct Body {
  void (*append)(const Task&, const NewItem&, std::byte* scratch);
  void (*attend)(const Task&, const RowItem&, std::byte* scratch);
  void (*attend_chunk)(const Task&, const ChunkItem&, std::byte* scratch);
  void (*combine)(const Task&, const RowItem&, std::byte* scratch);
  void (*deltas)(const Task&, const RowItem&, std::byte* scratch);
  void (*gradients_of_keys)(const Task&, const KeyItem&, std::byte* scratch);
  void (*gradients_of_rows)(const Task&, const RowItem&, std::byte* scratch);
  void (*gradients_of_slopes)(const Task&, const RowItem&, std::byte* scratch);
  void (*gradients_of_bias)(const Task&, const BiasItem&, std::byte* scratch);
};

namespace baseline {
const Body& body(bool f64);
}
namespace avx2 {
const Body& body(bool f64);
}
namespace avx512 {
const Body& body(bool f64);
}
namespace avx512bf16 {
const Body& body();
}  // namespace avx512bf16

}  // namespace tessera::cpu
