// What a block of the general kernels has in shared memory, and how it finds its work.
#pragma once
#include "device/general/scores.h"
#include "device/walk.h"
#include "rules/rotary.h"
#include "rules/softmax.h"

namespace tessera::device {

// By one thread found, by all read.
struct Header {
  Sequence sequence;
  Walk walk;
  Range seen;  // keys task: queries that see the block's keys
  float k_scale[rules::most_keys_at_hand], v_scale[rules::most_keys_at_hand];
  unsigned char there[rules::most_keys_at_hand];  // of the keys at hand: those that may be seen at all
};
static_assert(sizeof(Header) <= rules::general_header_bytes && sizeof(Query) == rules::query_bytes);

// Header, then what is known of each query at hand, then panels.
struct Memory {
  Header* header;
  Query* queries;
  Address panels;
};
TESSERA_DEVICE Memory memory_of(char* memory, int queries) {
  return {reinterpret_cast<Header*>(memory), reinterpret_cast<Query*>(memory + rules::general_header_bytes),
          shared_address(memory) + static_cast<Address>(rules::panels_begin(queries))};
}

TESSERA_DEVICE int warps() {
  return static_cast<int>(blockDim.x) >> 5;
}
// The rows of this lane: of its warp's 16, half 0 or 1.
TESSERA_DEVICE int lane_row(int half) {
  return warp_index() * 16 + half * 8 + (lane_index() >> 2);
}

// Items are handed out in turns, so that a grid of any size answers any number of them.
template <class Block>
TESSERA_DEVICE void run_items(const GeneralParams& p, char* memory) {
  Block block(p, memory);
  for (Index item = blockIdx.x; item < p.items; item += gridDim.x) {
    block.run(item);
    __syncthreads();  // shared memory is free for the next
  }
}

// Rows of keys at hand: K or V of one KV head. Keys outside of two ranges, and those that nobody may see, become zeros.
// Rows of K say which keys are `there`.
template <Product P>
TESSERA_DEVICE void load_keys(const GeneralParams& p, Header& header, const Panels& tile, const View& from,
                              const View& scale, float* scales, int kv, int first_key, Columns columns, Keys near,
                              Keys head) {
  const Sequence& s = header.sequence;
  if (p.plain_keys && from.whole_chunks && from.dtype == Format<P>::stored) {
    const Index at = from.at(s.plane, Index{s.first} + first_key, kv);
    copy_panels<P>(tile, static_cast<const char*>(from.data) + at * Format<P>::bytes, from.step[1] * Format<P>::bytes,
                   columns, near.from(first_key), head.from(first_key));
    return;
  }
  load_panels<P>(tile, from, columns, [&](int row) {
    const int key = first_key + row;
    KeyPlace at = {};
    if ((near.has(key) || head.has(key)) && !excluded_for_all(p, s, key)) at = place_of_key(p, s, key);
    if ((thread_index() & 7) == 0) {
      if (&from == &p.k) header.there[row] = at.there;
      if (scale.present()) scales[row] = at.there ? read(scale, scale.at(at.plane, at.row, kv)) : 1.0f;
    }
    return at.there ? from.at(at.plane, at.row, kv) : -1;
  });
}

}  // namespace tessera::device
