// New tokens enter the cache: rotated, quantised if the cache is, each row written to its slot. A slot outside of the
// cache is noted and never written.
#pragma once
#include "device/general/block.h"

namespace tessera::device {

namespace detail {

// One row of k_new or v_new. Lanes share it: pairs that turn, then the rest.
TESSERA_DEVICE void append_row(const GeneralParams& p, const View& from, Index at, const View& to, Index slot,
                               int columns, float scale, int pairs, Index position) {
  const int lane = lane_index();
  const auto put = [&](Index column, float x) { write(to, slot + column * to.step[3], x / scale); };
  for (int n = lane; n < pairs; n += 32) {
    const rules::RotaryPair pair = rules::rotary_pair(n, pairs, p.rotary.interleaved);
    float x = read(from, at + pair.one * from.step[3]), y = read(from, at + pair.two * from.step[3]);
    rules::rotate(x, y, read(p.rotary.cos, p.rotary.cos.at(0, position, 0, n)),
                  read(p.rotary.sin, p.rotary.sin.at(0, position, 0, n)));
    put(pair.one, x);
    put(pair.two, y);
  }
  for (int column = 2 * pairs + lane; column < columns; column += 32)
    put(column, read(from, at + column * from.step[3]));
}

// Is the slot of new token n of sequence s also the slot of another token that comes earlier in the batch? Slots of one
// sequence can meet only on one page that its table names twice; slots of two where their rows or pages are shared.
TESSERA_DEVICE bool meets_another(const GeneralParams& p, const Sequence& s, int key, const KeyPlace& mine) {
  if (!p.cache.rows && !p.cache.page) return false;
  for (int b = 0; b <= s.batch; ++b) {
    const Sequence other = b == s.batch ? s : sequence(p, b);
    if (other.unsound) continue;
    const int end = b == s.batch ? key : other.k.used;
    // Along its new tokens page by page: on a page only one slot can be this one.
    for (int j = other.old_keys(); j < end;) {
      const KeyPlace at = place_of_key(p, other, j);
      const int left = p.cache.page ? p.cache.page - static_cast<int>(at.row) : end - j, count = min(left, end - j);
      const Index ahead = mine.row - at.row;
      const bool wraps = p.cache.ring;
      if (at.there && at.plane == mine.plane) {
        if (!wraps && ahead >= 0 && ahead < count) return true;
        if (wraps)
          for (int n = 0; n < count; ++n)
            if (place_of_key(p, other, j + n).row == mine.row) return true;
      }
      j += count;
    }
  }
  return false;
}

}  // namespace detail

// A warp takes a new token with all its heads.
TESSERA_DEVICE void append(const GeneralParams& p) {
  const Index most = p.fresh.longest, all = Index{p.batch} * most;
  for (Index n = Index{blockIdx.x} * warps() + warp_index(); n < all; n += Index{gridDim.x} * warps()) {
    const Sequence s = sequence(p, static_cast<int>(n / most));
    const int token = static_cast<int>(n % most);
    if (token == 0 && lane_index() == 0) note(p, s.unsound);
    if (s.unsound || token >= s.fresh.used) continue;
    const int key = s.old_keys() + token;
    const KeyPlace slot = place_of_key(p, s, key);
    if (!slot.there) continue;
    if (p.status && lane_index() == 0 && detail::meets_another(p, s, key, slot)) note(p, rules::unsound_target);
    const auto scale = [&](const View& scales, int kv) {
      return scales.present() ? read(scales, scales.at(slot.plane, slot.row, kv)) : 1.0f;
    };
    for (int kv = 0; kv < p.heads_kv; ++kv) {
      detail::append_row(p, p.k_new, at_row(p.k_new, s.fresh, token, kv), p.k, p.k.at(slot.plane, slot.row, kv), p.dim,
                         scale(p.k_scale, kv), p.rotary.pairs, key);
      if (!p.cache.v_in_k)
        detail::append_row(p, p.v_new, at_row(p.v_new, s.fresh, token, kv), p.v, p.v.at(slot.plane, slot.row, kv),
                           p.dim_v, scale(p.v_scale, kv), 0, 0);
    }
  }
}

}  // namespace tessera::device
