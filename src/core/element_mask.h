// The whole mask, one pair at a time: bands, and the parts that are operands. Engines test tiles by their bands and
// come here where an operand decides.
#pragma once
#include "core/number.h"
#include "core/sequence.h"

namespace tessera::core {

// First byte of element (a, b, c, d).
inline const char* element(const Problem& p, const Bindings& bound, int name, int64_t a, int64_t b, int64_t c,
                           int64_t d) {
  const Operand& o = operand(p, name);
  return static_cast<const char*>(bound.data[name]) + offset_of(o, a, b, c, d) * bytes_of(o.dtype);
}
inline int32_t read_i32(const char* at) {
  int32_t x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

inline bool has_element_mask(const Problem& p) {
  return has(p, TESSERA_KEEP) || has(p, TESSERA_EXCLUDE_KEYS) || has(p, TESSERA_DOCUMENTS_Q);
}
// A key that nobody may see: its memory may hold anything.
inline bool excluded_for_all(const Problem& p, const Bindings& bound, const Sequence& s, int64_t key) {
  return has(p, TESSERA_EXCLUDE_KEYS) && *element(p, bound, TESSERA_EXCLUDE_KEYS, s.batch, key, 0, 0) != 0;
}
// May row i of query head h see key j? A bias of -inf counts as a part of the mask where it is bound.
inline bool keeps(const Problem& p, const Bindings& bound, const Sequence& s, const rules::BandMask& band, int64_t h,
                  int64_t i, int64_t j) {
  if (!band.keeps(i, j) || excluded_for_all(p, bound, s, j)) return false;
  if (has(p, TESSERA_KEEP) && *element(p, bound, TESSERA_KEEP, s.batch, h, i, j) == 0) return false;
  if (has(p, TESSERA_DOCUMENTS_Q)) {
    const int32_t mine = read_i32(element(p, bound, TESSERA_DOCUMENTS_Q, s.q.plane, s.q.first + i, 0, 0));
    const int32_t other = read_i32(element(p, bound, TESSERA_DOCUMENTS_K, s.k.plane, s.k.first + j, 0, 0));
    if (mine != other || mine < 0) return false;
  }
  if (!has(p, TESSERA_BIAS) || !bound.data[TESSERA_BIAS]) return true;
  return read<double>(element(p, bound, TESSERA_BIAS, s.batch, h, i, j), operand(p, TESSERA_BIAS).dtype) !=
         -__builtin_huge_val();
}

}  // namespace tessera::core
