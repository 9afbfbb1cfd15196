// Moving tiles between the caller's tensors and packed buffers: any dtype, any strides, zeros where nothing counts.
#pragma once
#include "cpu/matmul.h"

namespace tessera::cpu::TESSERA_ISA {

// One head of an operand: element (row, d) lies at at + (row * row_stride + d * dim_stride) elements.
struct Plane {
  char* at;
  int32_t dtype;
  Index row_stride, dim_stride;
};
inline Plane plane_of(const Task& t, int name, Index plane, Index first, Index head) {
  const Operand& o = t.operand(name);
  const Index bytes = bytes_of(o.dtype);
  char* const base = static_cast<char*>(t.bound.data[name]);
  return {base + core::offset_of(o, plane, first, head, 0) * bytes, o.dtype, o.extent[1] == 1 ? 0 : o.stride[1],
          o.extent[3] == 1 ? 0 : o.stride[3]};
}
inline Plane plane_q(const Task& t, int name, const Sequence& s, Index head) {
  return plane_of(t, name, s.q.plane, s.q.used ? s.q.first : 0, head);
}
inline Plane plane_k(const Task& t, int name, const Sequence& s, Index head) {  // of a gradient
  return plane_of(t, name, s.k.plane, s.k.used ? s.k.first : 0, head);
}
// The scale of row n of a run of quantised k or v.
template <class T>
T scale_at(const Task& t, int name, const rules::Run& run, Index n, Index kv) {
  const Operand& o = t.operand(name);
  return read<T>(t.data<char>(name) + core::offset_of(o, run.plane, run.row + n, kv, 0) * bytes_of(o.dtype), o.dtype);
}

// Row `row` as T: `n` numbers and zeros up to padded(n).
template <class T>
void load_row(T* to, const Plane& from, Index row, Index n) {
  const char* at = from.at + row * from.row_stride * bytes_of(from.dtype);
  const Index end = padded(n);
  Index i = 0;
  if (from.dim_stride == 1) {
    if (from.dtype == (sizeof(T) == 4 ? TESSERA_F32 : TESSERA_F64)) {
      std::memcpy(to, at, static_cast<size_t>(n) * sizeof(T));
      i = n;
    } else if constexpr (sizeof(T) == 4) {
      const Half* half = reinterpret_cast<const Half*>(at);
      if (from.dtype == TESSERA_BF16)
        for (; i + lanes<T> <= n; i += lanes<T>) store(to + i, load_bf16(half + i));
      else if (from.dtype == TESSERA_F16)
        for (; i + lanes<T> <= n; i += lanes<T>) store(to + i, load_f16(half + i));
    }
  }
  for (; i < n; ++i) to[i] = read<T>(at + i * from.dim_stride * bytes_of(from.dtype), from.dtype);
  for (; i < end; ++i) to[i] = 0;
}

template <class T>
TESSERA_ALWAYS bool is_finite(T x) {
  return x - x == 0;
}
// Is every number of `rows` rows of `width` finite? Asked where an excluded pair could otherwise spoil a sum.
template <class T>
bool all_finite(const T* at, Index rows, Index width) {
  Vec<T> zero{};  // x - x is 0 for finite x, else NaN
  for (Index i = 0; i < rows * width; i += lanes<T>) zero += load(at + i) - load(at + i);
  return sum<T>(zero) == 0;
}

template <class T>
void store_row(const T* from, const Plane& to, Index row, Index n) {
  char* at = to.at + row * to.row_stride * bytes_of(to.dtype);
  Index i = 0;
  if (to.dim_stride == 1) {
    if (to.dtype == (sizeof(T) == 4 ? TESSERA_F32 : TESSERA_F64)) {
      std::memcpy(at, from, static_cast<size_t>(n) * sizeof(T));
      return;
    }
    if constexpr (sizeof(T) == 4)
      if (to.dtype == TESSERA_BF16)
        for (; i + lanes<T> <= n; i += lanes<T>) store_bf16(reinterpret_cast<Half*>(at) + i, load(from + i));
  }
  for (; i < n; ++i) write(at + i * to.dim_stride * bytes_of(to.dtype), to.dtype, from[i]);
}

// to[c][r] = from[r][c]; rows past `rows` become zeros up to `to_row`.
template <class E>
void transpose(const E* from, Index from_row, Index rows, Index columns, E* to, Index to_row) {
  for (Index c = 0; c < columns; ++c) {
    E* line = to + c * to_row;
    for (Index r = 0; r < rows; ++r) line[r] = from[r * from_row + c];
    for (Index r = rows; r < to_row; ++r) line[r] = 0;
  }
}

template <class T>
void multiply_row(T* row, T factor, Index end) {
  for (Index c = 0; c < end; c += lanes<T>) store(row + c, load(row + c) * factor);
}
// Of keys in the hulls of what is seen: is there one that nobody may see? Then each key is asked.
inline bool is_picky(const Task& t, const core::Seen& seen) {
  return seen.gaps || t.has(TESSERA_EXCLUDE_KEYS);
}
inline bool is_seen(const Task& t, const Sequence& s, const core::Seen& seen, Index j) {
  return seen.has(j) && !core::excluded_for_all(t.p, t.bound, s, j);
}
inline bool any_seen(const Task& t, const Sequence& s, const core::Seen& seen, Range keys) {
  while (!keys.empty() && !is_seen(t, s, seen, keys.begin)) ++keys.begin;
  return !keys.empty();
}

// Runs f(first key, where they lie) for the runs of `keys` that somebody may see. Nothing is read of the others, be it
// a number or a page id.
template <class F>
TESSERA_ALWAYS void for_seen_runs(const Sequence& s, Range keys, const core::Seen& seen, F&& f) {
  for (const Range range : {rules::overlap(seen.head, keys), rules::overlap(seen.near, keys)})
    for (Index j = range.begin; j < range.end;) {
      const rules::Run run = s.slots.run(j, range.end);
      f(j, run);
      j += run.count;
    }
}

// keys x n numbers of k or v, zeros for keys that nobody may see.
template <class T>
void load_keys(const Task& t, int name, const Sequence& s, Index kv, Range keys, const core::Seen& seen, Index n, T* to,
               Index to_row) {
  clear(to, keys.size() * to_row);
  const int scale_name = name == TESSERA_K ? TESSERA_K_SCALE : TESSERA_V_SCALE;
  const bool scaled = t.has(scale_name), picky = is_picky(t, seen);
  for_seen_runs(s, keys, seen, [&](Index first, const rules::Run& run) {
    if (picky && !any_seen(t, s, seen, {first, first + run.count})) return;  // the page id may be rubbish
    const Plane from = plane_of(t, name, run.plane, run.row, kv);
    for (Index n_key = 0; n_key < run.count; ++n_key) {
      if (picky && !is_seen(t, s, seen, first + n_key)) continue;
      T* const row = to + (first + n_key - keys.begin) * to_row;
      load_row(row, from, n_key, n);
      if (scaled) multiply_row(row, scale_at<T>(t, scale_name, run, n_key, kv), padded(n));
    }
  });
}

// The rows of a flattened range, as (i, h).
inline void name_rows(RowTile& tile, const Task& t, Index kv, Range rows) {
  const Index group = core::group(t.p);
  tile.count = rows.size();
  for (Index r = rows.begin; r < rows.end; ++r) {
    tile.i[r - rows.begin] = r / group;
    tile.h[r - rows.begin] = kv * group + r % group;
  }
}

// Rotates `x` in place as stands at `position`.
template <class T>
void rotate_row(const Task& t, RotaryBuffers<T>& b, Index position, T* x) {
  load_row(b.cos, plane_of(t, TESSERA_COS, 0, 0, 0), position, b.pairs);
  load_row(b.sin, plane_of(t, TESSERA_SIN, 0, 0, 0), position, b.pairs);
  for (Index n = 0; n < b.pairs; ++n) {
    const rules::RotaryPair pair = rules::rotary_pair(n, b.pairs, t.p.cache.rotary_interleaved != 0);
    rules::rotate(x[pair.one], x[pair.two], b.cos[n], b.sin[n]);
  }
}
// Is row i of q rotated? Where a sequence has no keys its tables may not reach, and nothing depends on it.
inline bool rotates(const Task& t, const Sequence& s) {
  return t.p.cache.rotary_dim > 0 && s.k.used > 0;
}

template <class T>
void load_rows(const Task& t, int name, const Sequence& s, const RowTile& tile, Index n, T* to, Index to_row) {
  Plane from = {};
  for (Index r = 0; r < tile.count; ++r) {
    if (r == 0 || tile.h[r] != tile.h[r - 1]) from = plane_q(t, name, s, tile.h[r]);
    load_row(to + r * to_row, from, tile.i[r], n);
  }
}

// One number of a row operand (lse, dlse, max_score) and of a head operand (slopes, sinks).
inline char* row_number(const Task& t, int name, const Sequence& s, Index h, Index i) {
  const Operand& o = t.operand(name);
  return static_cast<char*>(t.bound.data[name]) +
         core::offset_of(o, s.q.plane, s.q.first + i, h, 0) * bytes_of(o.dtype);
}
template <class T>
T read_row(const Task& t, int name, const Sequence& s, Index h, Index i) {
  return read<T>(row_number(t, name, s, h, i), t.operand(name).dtype);
}
template <class T>
void write_row(const Task& t, int name, const Sequence& s, Index h, Index i, T x) {
  write(row_number(t, name, s, h, i), t.operand(name).dtype, x);
}
template <class T>
T head_number(const Task& t, int name, Index batch, Index h) {
  const Operand& o = t.operand(name);
  return read<T>(t.data<char>(name) + core::offset_of(o, batch, 0, h, 0) * bytes_of(o.dtype), o.dtype);
}

}  // namespace tessera::cpu::TESSERA_ISA
