// What a GPU kernel is told at a launch. Read by the host's compiler, which fills it, and by the device's.
#pragma once
#include "rules/mask.h"

namespace tessera::rules {

struct Steps {  // strides, in elements
  Index batch, row, head;
};

// Lengths that lie on the device; each list may be absent (nullptr).
struct DeviceLengths {
  const int* cu;    // B + 1: the operand is packed
  const int* used;  // B
  Index rows;       // the packed operand's rows, or 0
  int longest;      // upper bound of a sequence, or its length
};

inline constexpr int unsound_length = 1;  // TESSERA_STATUS_LENGTH

enum class Corner : int { fixed, bottom_right, per_sequence };

struct ForwardParams {
  const void *q, *k, *v;
  void* out;
  float* lse;   // may be absent
  int* status;  // may be absent
  const int* corner_offsets;
  Steps q_step, k_step, v_step, out_step, lse_step;
  DeviceLengths queries, keys;
  BandMask band;  // keys and offset are the sequence's, filled by the kernel; offset is that of Corner::fixed
  Corner corner;
  int batch, heads, group;  // query heads, and how many of them share a KV head
  int row_tiles;            // of the longest sequence
  int section;              // heads that run side by side, so that their K and V stay in the L2 cache
  float scale, scale_log2;  // > 0; scale * log2(e)
  float slack;              // how far a weight may grow, as a power of 2, before sums are rescaled
  int out_is_f32;
};

}  // namespace tessera::rules
