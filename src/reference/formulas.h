// The contract's lengths (section 2), mask (3), dropout (6) and cache (7) as plain formulas.
#pragma once
#include <array>
#include <vector>

#include "core/sequence.h"
#include "reference/reference.h"

namespace tessera::reference {

using core::Bindings;
using core::Problem;
using Wide = __int128;  // no sum of positions and bounds leaves it, so nothing here needs to saturate

inline View view(const Problem& p, const Bindings& bound, int name) {
  return {p.operand[name], bound.data[name]};
}
inline Target target(const Problem& p, const Bindings& bound, int name) {
  return {p.operand[name], bound.data[name]};
}

// Rows of one sequence on one side: element (plane, first + i) of an operand is its row i.
struct Rows {
  int64_t plane, first;
  int64_t used, stored;  // rows [used, stored) belong to the sequence but are not used
};

struct Side {
  int cu_seqlens, seqused;
  int64_t length, rows;
};
inline Side query_side(const Problem& p) {
  return {TESSERA_CU_SEQLENS_Q, TESSERA_SEQUSED_Q, p.len_q, p.rows_q};
}
inline Side key_side(const Problem& p) {
  return {TESSERA_CU_SEQLENS_K, TESSERA_SEQUSED_K, p.len_k, p.rows_k};
}
inline Side new_side(const Problem& p) {
  return {TESSERA_CU_SEQLENS_NEW, TESSERA_SEQUSED_NEW, p.len_new, p.rows_new};
}

inline Rows rows_of(const Problem& p, const Bindings& bound, const Side& side, int64_t b) {
  const View cu = view(p, bound, side.cu_seqlens), seqused = view(p, bound, side.seqused);
  const auto end = [&](int64_t n) { return static_cast<int64_t>(cu.at(n, 0, 0, 0)); };
  Rows r = {b, 0, side.length, side.length};
  if (cu.present()) r = {0, end(b), end(b + 1) - end(b), end(b + 1) - end(b)};
  if (seqused.present()) r.used = static_cast<int64_t>(seqused.at(b, 0, 0, 0));
  return r;
}
// What a list says of sequence b; a list of one says it of all.
inline int64_t listed(const Problem& p, const Bindings& bound, int name, int64_t b, int64_t otherwise) {
  const View list = view(p, bound, name);
  return list.present() ? static_cast<int64_t>(list.at(b, 0, 0, 0)) : otherwise;
}
// A cache's keys are those in the slots in use, less the left padding, and then the new ones.
inline Rows keys_of(const Problem& p, const Bindings& bound, int64_t b) {
  if (!core::is_cache(p)) return rows_of(p, bound, key_side(p), b);
  const int64_t full = listed(p, bound, TESSERA_SEQUSED_K, b, p.len_k);
  const int64_t before = listed(p, bound, TESSERA_CACHE_LENS, b, full) - listed(p, bound, TESSERA_LEFT_PAD, b, 0);
  return {b, 0, before + rows_of(p, bound, new_side(p), b).used, p.len_k};
}
// Rows of a packed operand past the last sequence: none is used.
inline Rows tail_of(const Problem& p, const Bindings& bound, const Side& side) {
  const View cu = view(p, bound, side.cu_seqlens);
  if (!cu.present()) return {0, 0, 0, 0};
  const auto end = static_cast<int64_t>(cu.at(p.batch, 0, 0, 0));
  return {0, end, 0, side.rows - end};
}

inline Wide floor_divide(Wide a, Wide b) {
  return a / b - (a % b < 0 ? 1 : 0);
}

struct Slot {
  int64_t plane, row;
};

struct Sequence {
  Sequence(const Problem& p, const Bindings& bound, int64_t b)
      : problem(p),
        batch(b),
        q(rows_of(p, bound, query_side(p), b)),
        k(keys_of(p, bound, b)),
        fresh(rows_of(p, bound, new_side(p), b)),
        left_pad(listed(p, bound, TESSERA_LEFT_PAD, b, 0)),
        cache_row(listed(p, bound, TESSERA_CACHE_BATCH_IDX, b, b)),
        page_table(view(p, bound, TESSERA_PAGE_TABLE)),
        bias(view(p, bound, TESSERA_BIAS)),
        keep(view(p, bound, TESSERA_KEEP)),
        exclude_keys(view(p, bound, TESSERA_EXCLUDE_KEYS)),
        documents_q(view(p, bound, TESSERA_DOCUMENTS_Q)),
        documents_k(view(p, bound, TESSERA_DOCUMENTS_K)) {
    const View offsets = view(p, bound, TESSERA_CORNER_OFFSETS);
    if (p.mask.corner == TESSERA_BOTTOM_RIGHT) offset = k.used - q.used;
    if (p.mask.corner == TESSERA_CORNER_AT)
      offset = offsets.present() ? static_cast<int64_t>(offsets.at(b, 0, 0, 0)) : p.mask.corner_at;
  }

  Wide position(int64_t i) const { return Wide{i} + offset; }
  double distance(int64_t i, int64_t j) const {
    const Wide d = position(i) - j;
    return static_cast<double>(d < 0 ? -d : d);
  }

  // The key, and the position, of new token n.
  int64_t new_key(int64_t n) const { return k.used - fresh.used + n; }

  // Where key j lies in k and v. Reads its page id.
  Slot slot(int64_t j) const {
    if (!core::is_cache(problem)) return {k.plane, k.first + j};
    const tessera_cache& c = problem.cache;
    const int64_t t = c.ring ? (left_pad + j) % core::slots_of(problem) : left_pad + j;
    if (!c.page_size) return {cache_row, t};
    return {static_cast<int64_t>(page_table.at(cache_row, t / c.page_size, 0, 0)), t % c.page_size};
  }

  // Does row i of query head h see key j?
  bool keeps(int64_t h, int64_t i, int64_t j) const {
    const tessera_mask& m = problem.mask;
    const Wide p = position(i);
    if (m.causal && j > p) return false;
    if (m.has_prefix && j >= m.prefix && j > p) return false;
    if (m.has_window && j >= m.first) {
      if (!m.window_left_unbounded && j < p - m.window_left) return false;
      if (!m.window_right_unbounded && j > p + m.window_right) return false;
    }
    if (m.chunk && floor_divide(j, m.chunk) != floor_divide(p, m.chunk)) return false;
    if (exclude_keys.present() && exclude_keys.at(batch, j, 0, 0) != 0) return false;
    if (keep.present() && keep.at(batch, h, i, j) == 0) return false;
    if (documents_q.present()) {
      const double mine = documents_q.at(q.plane, q.first + i, 0, 0), its = documents_k.at(k.plane, k.first + j, 0, 0);
      if (mine != its || mine < 0) return false;
    }
    return !bias.present() || bias.at(batch, h, i, j) != -infinity;
  }

  const Problem& problem;
  int64_t batch;
  Rows q, k, fresh;  // fresh: of k_new and v_new
  int64_t left_pad, cache_row;
  View page_table;
  Wide offset = 0;
  View bias, keep, exclude_keys, documents_q, documents_k;
};

// Philox4x32-10 (Salmon et al., SC 2011).
inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return c;
}

inline bool dropout_keeps(double p, uint64_t seed, uint64_t offset, int64_t row_of_heads, int64_t i, int64_t j) {
  const auto low = [](auto x) { return static_cast<uint32_t>(x & 0xFFFFFFFF); };
  const auto words = philox({low((i >> 4) * 8 + (i & 7)), low((j >> 4) * 8 + (j & 7)), low(row_of_heads), low(offset)},
                            {low(seed), low(seed >> 32) ^ low(offset >> 32)});
  const uint32_t word = words[static_cast<size_t>(((i >> 3) & 1) * 2 + ((j >> 3) & 1))];
  return word >= std::floor(p * 0x1p32 + 0.5);
}

inline bool samples(const Problem& p, int64_t n) {
  return n > 0 && n < p.batch * p.heads_kv;
}

// Results whose rows are queries and whose heads are query heads; dk and dv are the others that have rows.
inline bool by_query(int name) {
  return name == TESSERA_OUT || name == TESSERA_LSE || name == TESSERA_MAX_SCORE || name == TESSERA_DQ;
}
inline bool by_key(int name) {
  return name == TESSERA_DK || name == TESSERA_DV;
}

// k and v where new tokens go into them: what is appended is a result.
inline bool grows(const Problem& p, int name) {
  return (name == TESSERA_K || name == TESSERA_V) && core::role(p, name) == core::Role::update;
}
// Calls visit(sequence, n) for each new token.
template <class Visit>
void for_each_new(const Problem& p, const Bindings& bound, Visit visit) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s(p, bound, b);
    for (int64_t n = 0; n < s.fresh.used; ++n) visit(s, n);
  }
}
// No two new tokens may go to one slot: which of them would stay?
inline void check_targets(const Problem& p, const Bindings& bound) {
  std::vector<int64_t> room(static_cast<size_t>(core::most_targets(p)));
  core::check_targets(p, bound, room.data());
}

// What one pair owns of the results that have rows; rows past the last sequence are owned by no pair, only by all.
struct Place {
  Rows q, k;
  int64_t head_kv;
};
inline std::vector<Place> places(const Problem& p, const Bindings& bound, int64_t sample_pairs) {
  std::vector<Place> all;
  for (const Pair& pair : sampled_pairs(p.batch, p.heads_kv, sample_pairs))
    all.push_back({rows_of(p, bound, query_side(p), pair.batch), keys_of(p, bound, pair.batch), pair.head_kv});
  if (samples(p, sample_pairs)) return all;
  for (int64_t head = 0; head < p.heads_kv; ++head)
    all.push_back({tail_of(p, bound, query_side(p)), tail_of(p, bound, key_side(p)), head});
  return all;
}

// Calls visit(plane, row, head, used) for each row of a result that `place` owns.
template <class Visit>
void for_each_row(const Problem& p, const Place& place, int name, Visit visit) {
  const Rows& rows = by_query(name) ? place.q : place.k;
  const int64_t heads = by_query(name) ? core::group(p) : 1;
  for (int64_t i = 0; i < rows.stored; ++i)
    for (int64_t h = place.head_kv * heads; h < (place.head_kv + 1) * heads; ++h)
      visit(rows.plane, rows.first + i, h, i < rows.used);
}

}  // namespace tessera::reference
