// What the warpgroups of Hopper's forward kernel share: the item at hand, rings of tiles, their barriers.
#pragma once
#include "device/forward_item.h"
#include "device/sm90/pairs.h"
#include "device/walk.h"

namespace tessera::device {

using rules::Sm90ForwardParams;

struct Sm90Job {  // an item, as warpgroups are told
  Item item;
  Rows q, k;
  int first_row, offset;  // of its rows, of the band
  Walk walk;
  Keys steps;  // its share of the walk
  Keys clean;  // steps whose tiles every row keeps whole
  int split;
  bool last;  // there is no item, and none will come
};
TESSERA_DEVICE void note(const Sm90ForwardParams& p, int unsound) {
  if (p.status) atomicOr(p.status, unsound);
}
TESSERA_DEVICE rules::NarrowBand band_of(const Sm90ForwardParams& p, const Rows& k, int offset) {
  rules::NarrowBand band = p.narrow_band;
  band.keys = k.used;
  band.offset = offset;
  return band;
}
// Keys that some row of the sequence sees; what V has at others must not be multiplied, even by zero.
struct SeenKeys {
  Keys near, head;
  TESSERA_DEVICE bool has(int key) const { return near.has(key) || head.has(key); }
};
TESSERA_DEVICE SeenKeys seen_keys(const Sm90ForwardParams& p, const Sm90Job& job) {
  const auto whole = rules::visit_of<int>(band_of(p, job.k, job.offset), {0, job.q.used});
  return {keys_of(whole.near), keys_of(whole.head)};
}

template <Sm90ForwardSpec S>
struct Sm90Shared {
  static constexpr int slabs = rules::slabs_of(S.dim), slabs_v = rules::slabs_of(S.dim_v);
  static constexpr int q_bytes = slabs * 64 * 128, k_bytes = slabs * S.tile_keys * 128;
  static constexpr int v_bytes = slabs_v * S.tile_keys * 128;
  char q[S.q_stages][S.groups][q_bytes], k[S.stages][k_bytes], v[S.stages][v_bytes];
  char pairs[rules::pair_bytes(S) + 16];
  int pages[rules::page_bytes(S) / 4 + 4];
  Sm90Job jobs[4];  // one is written while a slow group may still store the one before the last
  Barrier q_full[S.q_stages][S.groups], q_empty[S.q_stages][S.groups];
  Barrier k_full[S.stages], k_empty[S.stages], v_full[S.stages], v_empty[S.stages];
  Barrier pairs_full[rules::most_pair_slots], pairs_empty[rules::most_pair_slots];
  Barrier job_wanted, job_found;
};

// Where a walk through a ring is whose length is known at run time.
class TurningRing {
 public:
  TESSERA_DEVICE unsigned stage() const { return at_ / 2; }
  TESSERA_DEVICE unsigned parity() const { return at_ & 1; }
  TESSERA_DEVICE void advance(unsigned stages) { at_ = at_ + 2 < 2 * stages ? at_ + 2 : parity() ^ 1; }

 private:
  unsigned at_ = 0;  // both in one register
};
// Of the n-th tile that goes through a ring.
template <int stages>
struct Ring {
  static TESSERA_DEVICE unsigned stage(unsigned n) { return n % stages; }
  static TESSERA_DEVICE unsigned parity(unsigned n) { return n / stages & 1; }
};

}  // namespace tessera::device
