// Forward attention for Hopper: the copy engine fills rings of tiles, warpgroups multiply them by wgmma.
//
// A block holds a multiprocessor and takes items (a tile of rows of one head), one after the other. Its first
// warpgroup copies: one thread finds the next item, another feeds the rings of K and V, each slot behind a `full` and
// an `empty` barrier. Every other warpgroup attends 64 rows, with scores, weights and sums in registers. Tiles of keys
// are walked last first; while a tile's weights are found, the products of the tile before it with V are still under
// way.
//
// A row decides alone when it is rescaled, so its bits depend on its own keys alone.
#pragma once
#include "device/sm90/copies.h"
#include "device/sm90/rows.h"

namespace tessera::device {

template <Sm90ForwardSpec S>
TESSERA_DEVICE void sm90_forward(const Sm90ForwardParams& p, Sm90Shared<S>& shared) {
  static_assert(sizeof(Sm90Shared<S>) <= rules::shared_bytes(S));
  if (threadIdx.x == 0) {
    prefetch_map(&p.q_map), prefetch_map(&p.k_map), prefetch_map(&p.v_map);
    for (int i = 0; i < S.q_stages; ++i)
      for (int g = 0; g < S.groups; ++g) {
        make_barrier(shared_address(&shared.q_full[i][g]), 1);
        make_barrier(shared_address(&shared.q_empty[i][g]), 4);
      }
    for (int i = 0; i < S.stages; ++i) {
      make_barrier(shared_address(&shared.k_full[i]), 1);
      make_barrier(shared_address(&shared.v_full[i]), 1);
      make_barrier(shared_address(&shared.k_empty[i]), S.groups);
      make_barrier(shared_address(&shared.v_empty[i]), S.groups);
    }
    make_barrier(shared_address(&shared.job_wanted), 1);
    make_barrier(shared_address(&shared.job_found), 1);
    for (int i = 0; i < rules::most_pair_slots; ++i) {
      make_barrier(shared_address(&shared.pairs_full[i]), 1);
      make_barrier(shared_address(&shared.pairs_empty[i]), 4 * S.groups);
    }
    show_barriers();
  }
  __syncthreads();
  // What the block was launched with of registers, shared out anew: 504 a thread of three groups, 512 of four. (More,
  // and the groups that take would wait for ever.)
  constexpr int few = S.groups == 3 ? 32 : S.parts ? 56 : S.pairs ? 40 : 24;
  constexpr int many = S.groups == 3 ? 160 : S.parts ? 224 : S.pairs ? 232 : 240;
  static_assert(few + S.groups * many <= 65536 / rules::threads(S) / 8 * 8 * (S.groups + 1));
  if (threadIdx.x < 128) {
    give_registers<few>();
    if (threadIdx.x < 32) {
      if (is_elected()) Sm90Copies<S>(p, shared).copy_items();
    } else if (threadIdx.x < 64) {
      if (is_elected()) Sm90Finder<S>(p, shared).find_items();
    }
  } else {
    take_registers<many>();
    const int group = uniform(static_cast<int>(threadIdx.x) / 128) - 1;
    Sm90Rows<S>(p, shared, group).attend_items();
  }
}

}  // namespace tessera::device
