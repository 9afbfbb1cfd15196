// What a GPU kernel is told at a launch. Read by the host's compiler, which fills it, and by the device's.
#pragma once
#include "rules/mask.h"
#include "rules/philox.h"

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

// Bits of the status word: tessera_status.
inline constexpr int unsound_length = 1, unsound_capacity = 2, unsound_page = 4, unsound_position = 8,
                     unsound_target = 16;

// What a partial result of a row is in the workspace: columns of out, not yet divided, then the row's largest score and
// its sum of weights.
TESSERA_RULE Index partial_size(Index dim_v) {
  return dim_v + 2;
}

inline constexpr int most_joined = 8;  // splits of an item that one launch joins

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
  // With `pairs`: (batch, head, query, key 0) in elements, keys one after the other; either may be absent. Scores are
  // pair_scale times the product and the bias, and `scale` is 1.
  const unsigned short* bias;
  const unsigned char* keep;
  Steps bias_step, keep_step;  // `row` is the query's
  float pair_scale;
  bool keep_in_words;  // two bytes of keep lie at an even address, everywhere
};

struct CacheParams {  // tessera_cache and its lists; `is_cache` says whether k and v are one
  const int *lens, *rows, *left_pad, *table;
  Index table_row, table_step;
  int lens_step;
  int page, pages;  // page 0: not paged
  int most_rows, slots;
  bool is_cache, ring, v_in_k;
};

struct alignas(64) TensorMap {  // CUtensorMap: an operand as the copy engine sees it
  unsigned long long word[16];
};
struct GridMap {  // bias or keep: a box has keys of at most 128 bytes, of 64 queries or of the one that there is
  TensorMap map;  // (key, query, head, batch)
  int query, head, batch;  // 1, or 0 where it repeats
  int bytes;               // of 64 queries' share of a tile; 0: absent
};
// What pairs of a query and a key have, each if given.
struct Sm90PairParams {
  GridMap bias, keep;
  int slots;                    // tiles of both that shared memory holds
  float softcap, scale_to_cap;  // scale / softcap
  float cap_terms[5];  // softcap tanh(scale / softcap s), where that is small, is s times these of s^0, s^2 ...
  float scale;         // of products to what bias and slopes add to; 1 with softcap, and where neither is
  const float* slopes;
  const unsigned char* excluded;
  const int *documents_q, *documents_k;
  Steps slope_step, excluded_step, document_q_step, document_k_step;
  Dropout dropout;   // plane is filled by the kernel
  float keep_scale;  // 1 / (1 - p), 1 without dropout
  bool drops;
};
// How many items blocks have taken, in the workspace, where anything may lie before: who comes first writes it and then
// `tag`, which is the launch's own number (62 random bits: it never lay there), and who leaves last takes the tag away.
struct Turns {
  unsigned long long tag;
  int taken;
};
// The maps' dimensions are (dim, row, head, plane); a box is 64 columns of a tile of rows. What else says where q, k,
// v, bias and keep are is read for what is attended twice; the wide band is not read. With `pairs` `scale` is
// that of scores that have all of it.
struct Sm90ForwardParams : ForwardParams {
  TensorMap q_map, k_map, v_map;
  NarrowBand narrow_band;
  bool plain_causal;  // the band is causal and no more
  int items, dim, dim_v;
  Turns* turns;               // whoever is free takes the next item; absent: blocks take items in turns
  unsigned long long launch;  // the launch's number, even
  const float* sinks;         // of each head; may be absent
  Steps sink_step;
  Sm90PairParams pairs;
  CacheParams cache;    // with pages a box of k and v has page_rows, which both a page and a tile are multiples of
  DeviceLengths fresh;  // of new tokens, which the cache holds already
  int page_rows;
  int splits;       // of an item's keys
  bool joins;       // they are a cluster's blocks, at most most_joined, which join their sums; else those go to
  float* partials;  // (planes of q, heads, rows, splits) x partial_size
};

struct BackwardParams {
  const void *q, *k, *v, *out, *dout;
  void *dq, *dk, *dv;       // dk and dv may be absent
  const float *lse, *dlse;  // dlse may be absent
  int* status;              // may be absent
  const int* corner_offsets;
  Steps q_step, k_step, v_step, out_step, dout_step, dq_step, dk_step, dv_step, lse_step, dlse_step;
  DeviceLengths queries, keys;
  BandMask band;
  Corner corner;
  int batch, heads, heads_kv, group;
  int key_tiles, section;  // as ForwardParams
  float scale, scale_log2;
  bool is_f16;
  // In the workspace: of each (plane, head, row) what the row's weights need, and dQ's sums.
  float *row_lse, *row_term, *dq_sums;
  Index sum_rows, sum_rows_in_all;  // of a sequence that is not packed; of all
};

// --------------------------------------------------------------------------------------------- the general kernels

enum class Stored : int { absent, f64, f32, bf16, f16, i32, boolean, e4m3 };  // as tessera_dtype

struct View {  // of an operand of any strides
  void* data;
  Index
      step[4];  // in elements: (batch, row, head, dim), of bias and keep (batch, head, query, key); 0 where it repeats
  Stored dtype;
  bool whole_chunks;  // its rows can be read and written 16 bytes at a time
  TESSERA_RULE bool present() const { return dtype != Stored::absent; }
  TESSERA_RULE Index at(Index a, Index b, Index c, Index d = 0) const {
    return a * step[0] + b * step[1] + c * step[2] + d * step[3];
  }
};

struct RotaryParams {
  View cos, sin;
  int pairs, positions;
  bool interleaved;
};

struct Cut {  // of one task into blocks
  // `pack` query heads share a tile of rows: row r is query r / pack of head first + r % pack.
  int pack = 1, row_tiles = 0, key_tiles = 0, slices = 1, splits = 1;
  Index items = 0;
  // Panels of 128 bytes a row: of q and k, of v and dO; how many of those that come by are in shared memory at once.
  int panels = 0, panels_v = 0, at_once = 0, at_once_v = 0;
  bool flushes = false;      // long sums are kept in parts
  bool sums_slopes = false;  // queries task: of dSlopes, not of dQ
  bool takes_turns = false;  // the two operands that stay in shared memory share one place
};

struct GeneralParams : Cut {
  View q, k, v, out, lse, max_score, dout, dlse, dq, dk, dv;
  View bias, keep, exclude_keys, documents_q, documents_k, slopes, sinks, dbias, dslopes, dsinks;
  View k_new, v_new, k_scale, v_scale;
  int bias_extent[4];    // of dbias
  bool slopes_by_batch;  // dslopes has one for each sequence
  DeviceLengths queries, keys, fresh;
  CacheParams cache;
  RotaryParams rotary;
  const int* corner_offsets;
  int* status;  // may be absent
  BandMask band;
  Corner corner;
  bool hulls_have_gaps;
  bool plain_keys;  // rows of K and V lie one after the other, and all that the bands keep are there
  Dropout dropout;  // plane is filled by the kernel
  bool drops;
  float keep_scale;                       // 1 / (1 - p)
  float scale, softcap, inverse_softcap;  // softcap 0: none
  float score_unit;                       // forward: what a score is a multiple of; scale, or 1 if it was multiplied in
  int batch, heads, heads_kv, group, dim, dim_v;

  // In the workspace.
  float* partials;   // (planes of q, heads, rows, splits) x partial_size
  float* row_lse;    // (planes of q, heads, rows): lse, +inf where the row keeps nothing
  float* row_term;   // (planes of q, heads, rows): dLSE - dO . out
  float* row_slope;  // (planes of q, heads, rows): the row's share of dSlopes
};

}  // namespace tessera::rules
