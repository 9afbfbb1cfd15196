// From products to scores, one (query, key) pair at a time: all options of the contract, each asked for at run time.
#pragma once
#include "device/general/products.h"
#include "device/general/sequence.h"
#include "rules/score.h"

namespace tessera::device {

// What is known of a query row before any key is. An absent row keeps nothing.
struct alignas(16) Query {
  Keys near, head;  // that the bands keep
  Index position, bias_at, keep_at;
  int row, head_q;
  float slope;
  int document;
  float lse, term;  // backward: dLSE - dO . out
};

TESSERA_DEVICE Query query_of(const GeneralParams& p, const Sequence& s, Index row, int head) {
  Query f = {};
  f.row = static_cast<int>(row);
  f.head_q = head;
  f.document = -1;
  f.lse = infinity;
  if (row >= s.q.used) return f;
  if (p.row_lse) {
    const Index n = row_number(p, s.q, f.row, head);
    f.lse = p.row_lse[n];
    f.term = p.row_term[n];
    if (f.lse == infinity) return f;  // it keeps nothing
  }
  f.near = keys_of(s.band.near(row));
  f.head = keys_of(s.band.head(row));
  f.position = row + s.band.offset;
  if (p.bias.present()) f.bias_at = p.bias.at(s.batch, head, row);
  if (p.keep.present()) f.keep_at = p.keep.at(s.batch, head, row);
  if (p.slopes.present()) f.slope = read(p.slopes, p.slopes.at(s.batch, 0, head));
  if (p.documents_q.present()) f.document = read_int(p.documents_q, at_row(p.documents_q, s.q, f.row, 0));
  return f;
}

// A key that nobody may see: its memory may hold anything.
TESSERA_DEVICE bool excluded_for_all(const GeneralParams& p, const Sequence& s, int key) {
  return (p.exclude_keys.present() && read_bool(p.exclude_keys, p.exclude_keys.at(s.batch, key, 0))) ||
         (p.hulls_have_gaps && !rules::some_row_sees(s.band, {0, s.q.used}, key));
}

TESSERA_DEVICE bool has_pair_options(const GeneralParams& p) {
  return p.softcap != 0 || p.slopes.present() || p.bias.present() || p.keep.present() || p.documents_q.present();
}

struct Score {
  float value;  // -inf: the pair does not exist
  float slope;  // dt / dz
};
// Of a pair that the bands keep; z is scale times the product.
TESSERA_DEVICE Score score_of(const GeneralParams& p, const Sequence& s, const Query& query, int key, float z) {
  Score x = {z, 1};
  if (p.softcap != 0) {
    const auto capped = rules::softcapped(z, p.softcap, p.inverse_softcap, [](float u) { return tanhf(u); });
    x = {capped.value, capped.slope};
  }
  if (p.slopes.present()) {
    const Index far = query.position - key;
    x.value -= rules::alibi(query.slope, static_cast<float>(far < 0 ? -far : far));
  }
  bool kept = true;
  if (p.keep.present()) kept = read_bool(p.keep, query.keep_at + key * p.keep.step[3]);
  if (p.documents_q.present())
    kept = kept && query.document >= 0 && read_int(p.documents_k, at_row(p.documents_k, s.k, key, 0)) == query.document;
  if (p.bias.present() && kept) {
    const float bias = read_any(p.bias, query.bias_at + key * p.bias.step[3]);
    kept = bias != minus_infinity;
    x.value += bias;
  }
  if (!kept) x.value = minus_infinity;
  return x;
}

// Dropout's words of elements (i, j), (i, j + 8), (i + 8, j), (i + 8, j + 8) around a pair.
TESSERA_DEVICE rules::Words4 dropout_words(const GeneralParams& p, const Sequence& s, int head, int row, int key) {
  rules::Dropout dropout = p.dropout;
  dropout.plane = static_cast<Word>(s.batch) * static_cast<Word>(p.heads) + static_cast<Word>(head);
  return dropout.words(row & ~8, key & ~8);
}
TESSERA_DEVICE bool drops(const GeneralParams& p, const rules::Words4& words, int row, int key) {
  const int n = (row >> 3 & 1) * 2 + (key >> 3 & 1);
  const Word word = n == 0 ? words.at[0] : n == 1 ? words.at[1] : n == 2 ? words.at[2] : words.at[3];
  return word < p.dropout.threshold;
}

// 16-bit results hide the fast exponential's 2^-22; float32 ones do not.
template <Product P>
TESSERA_DEVICE float exponential(float x) {
  if constexpr (Format<P>::halves) return exp2_fast(x * log2_e);
  else return expf(x);
}

}  // namespace tessera::device
