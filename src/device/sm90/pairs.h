// What a pair of a query and a key has beside its product, in the registers of a warpgroup: softcap, slopes, a bias, a
// keep mask, excluded keys, documents, dropout. Each is asked for at run time, once a tile.
#pragma once
#include "device/ptx/sm90.h"
#include "device/sequence.h"
#include "rules/score.h"
#include "rules/spec.h"

namespace tessera::device {

using rules::Sm90ForwardSpec;
using rules::Sm90PairParams;

// cap tanh(a s): of |a s| <= tanh_edge by a polynomial in s (relative error 2^-22.6), of larger ones by an exponential
// (some 2^-22 of cap, which small ones would feel).
inline constexpr float tanh_edge = 0.6f;
TESSERA_DEVICE bool caps_little(const Sm90PairParams& p, float s) {
  return fabsf(s * p.scale_to_cap) <= tanh_edge;
}
TESSERA_DEVICE float capped_little(const Sm90PairParams& p, float s) {
  const float y = s * s;
  const auto& c = p.cap_terms;
  return s * fmaf(y, fmaf(y, fmaf(y, fmaf(y, c[4], c[3]), c[2]), c[1]), c[0]);
}
TESSERA_DEVICE float capped(const Sm90PairParams& p, float s) {
  const float e = exp2_fast(s * p.scale_to_cap * (2 * log2_e)), little = capped_little(p, s);
  const float large = fmaf(-2 * p.softcap, __fdividef(1, e + 1), p.softcap);
  return caps_little(p, s) ? little : large;
}

// Where a lane's scores are: rows `row` and `row` + 8, of keys from `first` on those at columns 8 n + column and the
// next. Rows and keys count inside the sequence.
struct Place {
  int row, first, column;
};

template <Sm90ForwardSpec S>
class Sm90Pairs {
 public:
  using Scores = float[S.tile_keys / 2];
  // A warpgroup's bias in a slot of shared memory, and behind it its keep.
  static TESSERA_DEVICE int keep_begin(const Sm90PairParams& p) { return p.bias.bytes > 0 ? 64 * S.tile_keys * 2 : 0; }
  static TESSERA_DEVICE Address tile(Address all, const Sm90PairParams& p, int slot, int group) {
    const int bytes = rules::pair_bytes_of_tile(S, p.bias.bytes > 0, p.keep.bytes > 0) / S.groups;
    return all + (slot * S.groups + group) * bytes;
  }

  TESSERA_DEVICE Sm90Pairs(const Sm90PairParams& p, int batch, int head, const Rows& q, const Rows& k, int offset)
      : p_(p), batch_(batch), head_(head), q_(q), k_(k), offset_(offset) {}

  TESSERA_DEVICE bool has_grids() const { return p_.bias.bytes + p_.keep.bytes > 0; }
  // A row whose sum is NaN may have it from a key that a bias of -inf takes away.
  TESSERA_DEVICE bool may_be_lost(float sum) const { return p_.bias.bytes > 0 && sum != sum; }
  TESSERA_DEVICE bool may_drop_keys() const { return has_grids() || p_.excluded || p_.documents_q; }

  // From products to scores. `tile`: this warpgroup's bias and keep in shared memory, which have come.
  TESSERA_DEVICE void score(Scores& s, Place at, Address tile) const {
    if (p_.softcap != 0) cap(s);
    if (p_.slopes) slope(s, at);
    if (p_.bias.bytes > 0) add_bias(s, tile, p_.slopes ? 1 : p_.scale);
    if (p_.keep.bytes > 0) keep(s, tile + keep_begin(p_));
  }
  TESSERA_DEVICE void exclude(Scores& s, Place at) const {
    if (p_.excluded) drop_excluded(s, at);
    if (p_.documents_q) drop_other_documents(s, at);
  }
  TESSERA_DEVICE bool is_excluded(int key) const {  // for all rows
    return p_.excluded[batch_ * p_.excluded_step.batch + key * p_.excluded_step.row] != 0;
  }

  // The same of one pair, from global memory.
  TESSERA_DEVICE float score_of(const rules::ForwardParams& p, float product, int row, int key) const {
    float s = p_.softcap == 0 ? product * p_.scale : capped(p_, product);
    if (p_.slopes) s -= rules::alibi(slope_of_head(), fabsf(static_cast<float>(row + offset_ - key)));
    const auto place = [&](const rules::Steps& step) {
      return batch_ * step.batch + head_ * step.head + row * step.row + key;
    };
    if (p_.bias.bytes > 0) {
      const float bias = Number<S.dtype>::unpack(p.bias[place(p.bias_step)]);
      s = bias == minus_infinity ? bias : s + bias;
    }
    if (p_.keep.bytes > 0 && !p.keep[place(p.keep_step)]) return minus_infinity;
    if (p_.excluded && is_excluded(key)) return minus_infinity;
    if (p_.documents_q) {
      const int document = document_of(p_.documents_q, p_.document_q_step, q_, row);
      if (document < 0 || document != document_of(p_.documents_k, p_.document_k_step, k_, key)) return minus_infinity;
    }
    return s;
  }
  TESSERA_DEVICE bool keeps(int row, int key, int heads) const { return dropout(heads).keeps(row, key); }

  TESSERA_DEVICE void drop_out(Scores& weights, Place at, int heads) const {
    const rules::Dropout dropout = this->dropout(heads);
    if (dropout.threshold == 0) return;
    const Word last = static_cast<Word>(dropout.threshold - 1);  // in 32 bits, also where nothing is kept
#pragma unroll
    for (int n = 0; n < S.tile_keys / 8; n += 2)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const rules::Words4 words = dropout.words(at.row, at.first + 8 * n + at.column + i);
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if (words.at[w] <= last) weights[4 * (n + w % 2) + 2 * (w / 2) + i] = 0;
      }
  }

 private:
  static TESSERA_DEVICE int lane() {
    return thread_index() & 31;
  }

  TESSERA_DEVICE rules::Dropout dropout(int heads) const {
    rules::Dropout dropout = p_.dropout;
    dropout.plane = static_cast<Word>(batch_ * heads + head_);
    return dropout;
  }
  TESSERA_DEVICE float slope_of_head() const {
    return p_.slopes[batch_ * p_.slope_step.batch + head_ * p_.slope_step.head];
  }
  // A vote spares most tiles the exponentials; it changes no bit.
  TESSERA_DEVICE void cap(Scores& s) const {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < S.tile_keys / 2; ++i) largest = fmaxf(largest, fabsf(s[i]));
    if (__all_sync(0xFFFFFFFFu, caps_little(p_, largest))) {
#pragma unroll
      for (int i = 0; i < S.tile_keys / 2; ++i) s[i] = capped_little(p_, s[i]);
    } else {
#pragma unroll
      for (int i = 0; i < S.tile_keys / 2; ++i) s[i] = capped(p_, s[i]);
    }
  }
  TESSERA_DEVICE void slope(Scores& s, Place at) const {
    const float slope = slope_of_head();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float ahead = static_cast<float>(at.row + 8 * r + offset_ - at.first - at.column);  // of the first key
#pragma unroll
      for (int n = 0; n < S.tile_keys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          s[4 * n + 2 * r + i] =
              fmaf(s[4 * n + 2 * r + i], p_.scale, -rules::alibi(slope, fabsf(ahead - static_cast<float>(8 * n + i))));
    }
  }
  // A bias of -inf beside a product that is NaN makes a NaN here, where the key does not exist: see `may_be_lost`. As
  // matrices of 8 x 8 numbers, whose places in lanes are the products'.
  TESSERA_DEVICE void add_bias(Scores& s, Address tile, float scale) const {
    const int thread = thread_index() & 127, l = thread & 31;
    const int row = (thread / 32 * 16 + (l & 8) + (l & 7)) * p_.bias.query, swizzle = row & 7;
#pragma unroll
    for (int n = 0; n < S.tile_keys / 8; n += 2) {
      const int chunk = (n + l / 16) % 8 ^ swizzle;
      Word m[4];
      load_matrices(m, tile + n / 8 * (64 * 128) + row * 128 + chunk * 16);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float* const two = s + 4 * (n + w / 2) + 2 * (w % 2);
        two[0] = fmaf(two[0], scale, Number<S.dtype>::unpack(m[w] & 0xFFFF));
        two[1] = fmaf(two[1], scale, Number<S.dtype>::unpack(m[w] >> 16));
      }
    }
  }
  TESSERA_DEVICE void keep(Scores& s, Address tile) const {
    const int thread = thread_index() & 127, l = thread & 31;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = (thread / 32 * 16 + l / 4 + 8 * r) * p_.keep.query;
      const int swizzle = S.tile_keys == 128 ? row & 7 : row / 2 & 3;  // of rows of 128 bytes, of 64
#pragma unroll
      for (int n = 0; n < S.tile_keys / 8; ++n) {
        const unsigned kept = load_half(tile + row * S.tile_keys + (n / 2 ^ swizzle) * 16 + n % 2 * 8 + l % 4 * 2);
        if (!(kept & 0xFF)) s[4 * n + 2 * r] = minus_infinity;
        if (!(kept >> 8)) s[4 * n + 2 * r + 1] = minus_infinity;
      }
    }
  }

  static constexpr int words = S.tile_keys / 32;
  // Keys whose bits are 0 do not exist for row r.
  static TESSERA_DEVICE void keep_bits(Scores& s, int r, const Word (&kept)[words], int column) {
#pragma unroll
    for (int w = 0; w < words; ++w)
#pragma unroll
      for (int n = 4 * w; n < 4 * w + 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!(kept[w] >> column >> (n % 4 * 8 + i) & 1)) s[4 * n + 2 * r + i] = minus_infinity;
  }
  TESSERA_DEVICE void drop_excluded(Scores& s, Place at) const {
    Word kept[words];
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const int key = at.first + 32 * w + lane();
      kept[w] = __ballot_sync(0xFFFFFFFFu, key < k_.used && !is_excluded(key));
    }
    keep_bits(s, 0, kept, at.column);
    keep_bits(s, 1, kept, at.column);
  }
  TESSERA_DEVICE int document_of(const int* ids, const rules::Steps& step, const Rows& rows, int row) const {
    return row < rows.used ? ids[rows.plane * step.batch + (Index{rows.first} + row) * step.row] : -1;
  }
  TESSERA_DEVICE void drop_other_documents(Scores& s, Place at) const {
    // Lane n has the document of the warp's row n, and of keys n, 32 + n ...
    const int mine = document_of(p_.documents_q, p_.document_q_step, q_, at.row - lane() / 4 + lane() % 16);
    int of_key[words];
#pragma unroll
    for (int w = 0; w < words; ++w)
      of_key[w] = document_of(p_.documents_k, p_.document_k_step, k_, at.first + 32 * w + lane());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Word kept[words] = {};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int document = __shfl_sync(0xFFFFFFFFu, mine, 8 * r + n);
#pragma unroll
        for (int w = 0; w < words; ++w) {
          const Word same = __ballot_sync(0xFFFFFFFFu, document >= 0 && of_key[w] == document);
          if (lane() / 4 == n) kept[w] = same;
        }
      }
      keep_bits(s, r, kept, at.column);
    }
  }

  const Sm90PairParams& p_;
  const int batch_, head_;
  const Rows &q_, &k_;
  const int offset_;
};

}  // namespace tessera::device
