#include "core/sequence.h"

#include "core/error.h"

namespace tessera::core {
namespace {

const int32_t* list(const Bindings& bound, int name) {
  return static_cast<const int32_t*>(bound.data[name]);
}

struct Side {
  int cu, used;
  const char* cu_text;
  const char* used_text;
  const char* length_text;
};
constexpr Side query = {TESSERA_CU_SEQLENS_Q, TESSERA_SEQUSED_Q, "cu_seqlens_q", "seqused_q", "len_q"};
constexpr Side key = {TESSERA_CU_SEQLENS_K, TESSERA_SEQUSED_K, "cu_seqlens_k", "seqused_k", "len_k"};

Rows rows_of(const Problem& p, const Bindings& bound, const Side& side, int64_t length, int64_t batch) {
  Rows r = {batch, 0, length, length};
  if (has(p, side.cu)) {
    const int32_t* cu = list(bound, side.cu);
    r.plane = 0;
    r.first = cu[batch];
    r.used = r.stored = cu[batch + 1] - cu[batch];
  }
  if (has(p, side.used)) r.used = list(bound, side.used)[batch];
  return r;
}

void check_side(const Problem& p, const Bindings& bound, const Side& side, int64_t length, int64_t rows) {
  if (has(p, side.cu)) {
    const int32_t* cu = list(bound, side.cu);
    require(cu[0] == 0, "{}[0] is {}; it must be 0.", side.cu_text, cu[0]);
    for (int64_t b = 0; b < p.batch; ++b)
      require(cu[b + 1] >= cu[b], "{0}[{1}] is {2} after {3}; offsets must not decrease.", side.cu_text, b + 1,
              cu[b + 1], cu[b]);
    require(cu[p.batch] <= rows, "{}[{}] is {}; the operand has {} rows. Pass the offsets that belong to it.",
            side.cu_text, p.batch, cu[p.batch], rows);
    for (int64_t b = 0; b < p.batch; ++b)
      require(int64_t{cu[b + 1]} - cu[b] <= length, "{} makes sequence {} {} long; {} promised at most {}. Raise {}.",
              side.cu_text, b, int64_t{cu[b + 1]} - cu[b], side.length_text, length, side.length_text);
  }
  if (!has(p, side.used)) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Rows r = rows_of(p, bound, side, length, b);
    require(r.used >= 0 && r.used <= r.stored, "{}[{}] is {}; it must be from 0 to the sequence's {} rows.",
            side.used_text, b, r.used, r.stored);
  }
}

Rows tail(const Problem& p, const Bindings& bound, const Side& side, int64_t rows) {
  if (!has(p, side.cu)) return {};
  const int64_t end = list(bound, side.cu)[p.batch];
  return {0, end, 0, rows - end};
}

}  // namespace

void check_lengths(const Problem& p, const Bindings& bound) {
  check_side(p, bound, query, p.len_q, p.rows_q);
  check_side(p, bound, key, p.len_k, p.rows_k);
}

Sequence sequence(const Problem& p, const Bindings& bound, int64_t batch) {
  Sequence s = {batch, rows_of(p, bound, query, p.len_q, batch), rows_of(p, bound, key, p.len_k, batch), 0};
  if (p.mask.corner == TESSERA_CORNER_AT)
    s.offset = has(p, TESSERA_CORNER_OFFSETS) ? list(bound, TESSERA_CORNER_OFFSETS)[batch] : p.mask.corner_at;
  else if (p.mask.corner == TESSERA_BOTTOM_RIGHT) s.offset = s.k.used - s.q.used;
  return s;
}

Rows tail_q(const Problem& p, const Bindings& bound) {
  return tail(p, bound, query, p.rows_q);
}
Rows tail_k(const Problem& p, const Bindings& bound) {
  return tail(p, bound, key, p.rows_k);
}

rules::BandMask band_mask(const Problem& p, int64_t keys, int64_t offset) {
  const tessera_mask& m = p.mask;
  rules::BandMask band;
  band.keys = keys;
  band.offset = rules::saturate(offset);
  if (m.has_window) {
    if (!m.window_left_unbounded) band.left = rules::saturate(m.window_left);
    if (!m.window_right_unbounded) band.right = rules::saturate(m.window_right);
    band.first = rules::saturate(m.first);
  }
  band.causal = m.causal || m.has_prefix;
  band.prefix = m.has_prefix ? rules::saturate(m.prefix) : 0;
  band.chunked = m.chunk > 0;
  if (band.chunked) band.chunk = rules::saturate(m.chunk);
  return band;
}

}  // namespace tessera::core
