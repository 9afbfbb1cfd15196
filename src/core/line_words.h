// A line's words, read one by one, before they become a problem.
#pragma once
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "core/line.h"

namespace tessera::core {

inline constexpr const char* layouts[] = {"bshd", "bhsd", "qkv", "kv"};
inline constexpr const char* corners[] = {"bottom_right", "top_left", "at"};  // from TESSERA_BOTTOM_RIGHT on
inline constexpr char grid_letters[] = "bhqk";

using Lengths = std::optional<std::vector<int32_t>>;
using Dims = std::array<char, 4>;

// The three kinds of rows: queries, keys, new tokens.
struct SideRow {
  char letter;
  int cu_seqlens, seqused;
};
inline constexpr SideRow sides[] = {{'q', TESSERA_CU_SEQLENS_Q, TESSERA_SEQUSED_Q},
                                    {'k', TESSERA_CU_SEQLENS_K, TESSERA_SEQUSED_K},
                                    {'n', TESSERA_CU_SEQLENS_NEW, TESSERA_SEQUSED_NEW}};
struct Sides {
  bool said[3] = {false, false, false};
  Lengths values[3];
};
struct Lists {  // an int32 operand, with its values or without
  bool said = false;
  Lengths values;
};
struct Strides {
  int name;
  std::vector<int64_t> values;
};

// The line's words before they become a problem.
struct Words {
  Problem problem = {};
  int32_t dtype = TESSERA_F32;
  int layout = TESSERA_BSHD;
  std::optional<int64_t> batch, len[3], rows[3];
  Sides varlen, seqused;
  Lengths corner_offsets;
  Lists cache_lens, cache_batch_idx, left_pad, page_table;
  bool appends = false, status = false;
  std::optional<int32_t> kv_dtype, angle_dtype;
  std::string scales[2] = {"none", "none"};  // of k, v: what shares one
  bool per_sequence_corner = false, exclude_keys = false, documents = false, sink = false;
  std::optional<Dims> bias, keep;
  std::optional<int32_t> bias_dtype, out_dtype;
  std::optional<std::string> alibi;
  bool lse = true, max_score = false, dlse = false;
  std::optional<std::vector<int>> grads;
  std::vector<Strides> strides;
  uint64_t seed = 0, offset = 0;
  bool has_dim = false;
};

Words read_words(const std::string& text);

}  // namespace tessera::core
