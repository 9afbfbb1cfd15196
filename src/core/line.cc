// Words to a problem.
#include "core/line.h"

#include <algorithm>
#include <climits>

#include "core/check.h"
#include "core/error.h"
#include "core/line_words.h"
#include "core/sequence.h"

namespace tessera::core {
namespace {

// Batch, lengths and rows from what is said and what the lists imply.
void build_sizes(Words& w, Line& line) {
  Problem& p = line.problem;
  const auto batch_from = [&](const Lengths& list, const std::string& what) {
    if (!list) return;
    const auto n = static_cast<int64_t>(list->size());
    if (!w.batch) w.batch = n;
    require(*w.batch == n, "{} gives {} sequences and the batch is {}; they must agree.", what, n, *w.batch);
  };
  for (size_t side = 0; side < std::size(sides); ++side) {
    batch_from(w.varlen.values[side], fmt::format("varlen={}", sides[side].letter));
    batch_from(w.seqused.values[side], fmt::format("seqused={}", sides[side].letter));
  }
  batch_from(w.corner_offsets, "@at");
  batch_from(w.cache_batch_idx.values, "cache_batch_idx");
  batch_from(w.left_pad.values, "left_pad");
  const bool one_for_all = w.cache_lens.values && w.cache_lens.values->size() == 1;
  if (!(one_for_all && w.batch)) batch_from(w.cache_lens.values, "cache_lens");
  p.batch = w.batch.value_or(1);
  for (size_t side = 0; side < std::size(sides); ++side) {
    const auto& [letter, cu_seqlens, seqused] = sides[side];
    int64_t longest = 1, sum = 0;
    if (const Lengths& list = w.varlen.values[side]) {
      longest = 0;
      std::vector<int32_t>& cu = line.values[cu_seqlens];
      cu.push_back(0);
      for (const int32_t length : *list) {
        require(length >= 0, "varlen={} has the length {}; lengths are at least 0.", letter, length);
        longest = std::max<int64_t>(longest, length);
        sum += length;
        require(sum <= INT32_MAX, "varlen={} has more than 2^31 - 1 rows; offsets are int32. Split the batch.", letter);
        cu.push_back(static_cast<int32_t>(sum));
      }
    } else if (w.varlen.said[side]) {
      require(w.len[side] && w.rows[side], "varlen={0} has no list; say {0} (the longest length) and rows={0} besides.",
              letter);
    }
    require(!w.rows[side] || w.varlen.said[side], "rows={0} is said but {0} is not packed; say varlen={0}.", letter);
    int64_t& length = side == 0 ? p.len_q : side == 1 ? p.len_k : p.len_new;
    int64_t& rows = side == 0 ? p.rows_q : side == 1 ? p.rows_k : p.rows_new;
    if (side == 2 && !w.varlen.said[2]) longest = w.appends ? p.len_q : 0;  // as many as there are queries
    length = w.len[side].value_or(longest);
    if (w.varlen.said[side]) rows = w.rows[side].value_or(sum);
    if (w.seqused.values[side]) line.values[seqused] = *w.seqused.values[side];
  }
  if (p.pass == TESSERA_APPEND) {
    require(!w.len[0], "q is said; an append has no queries. Say n, the new tokens.");
    p.len_q = 0;
  }
  if (w.corner_offsets) line.values[TESSERA_CORNER_OFFSETS] = *w.corner_offsets;
  const auto keep = [&](const Lists& list, int name) {
    if (list.values) line.values[name] = *list.values;
  };
  keep(w.cache_lens, TESSERA_CACHE_LENS);
  keep(w.cache_batch_idx, TESSERA_CACHE_BATCH_IDX);
  keep(w.left_pad, TESSERA_LEFT_PAD);
  keep(w.page_table, TESSERA_PAGE_TABLE);
  tessera_cache& c = p.cache;
  require(!w.page_table.said || c.page_size, "page_table is said but page is not; say the slots of a page.");
  // Unless said: a page for every slot.
  if (c.page_size && !c.pages && slots_of(p) >= 0 && p.batch >= 0) {
    const int64_t most = INT32_MAX, slots = std::min(slots_of(p), most);
    c.pages = std::min(most, std::min(cache_rows(p), most) * ((slots + c.page_size - 1) / c.page_size));
  }
}

std::array<int64_t, 4> extents(const Problem& p, const Dims& dims) {
  const int64_t full[] = {p.batch, p.heads_q, p.len_q, p.len_k};
  std::array<int64_t, 4> e = {};
  for (size_t d = 0; d < 4; ++d) e[d] = dims[d] == '1' ? 1 : full[d];
  return e;
}

// k, v and what says where their keys lie.
void build_cache(const Words& w, Problem& p) {
  const auto declare_if = [&](bool said, int name, int32_t dtype) {
    if (said) declare(p, name, dtype, w.layout);
  };
  declare_if(w.appends, TESSERA_K_NEW, w.dtype);
  declare_if(w.appends && !p.cache.v_in_k, TESSERA_V_NEW, w.dtype);
  declare_if(w.cache_batch_idx.said, TESSERA_CACHE_BATCH_IDX, TESSERA_I32);
  declare_if(w.left_pad.said, TESSERA_LEFT_PAD, TESSERA_I32);
  declare_if(p.cache.page_size > 0, TESSERA_PAGE_TABLE, TESSERA_I32);
  declare_if(p.cache.rotary_dim > 0, TESSERA_COS, w.angle_dtype.value_or(TESSERA_F32));
  declare_if(p.cache.rotary_dim > 0, TESSERA_SIN, w.angle_dtype.value_or(TESSERA_F32));
  declare_if(w.status, TESSERA_STATUS, TESSERA_I32);
  if (w.cache_lens.said) {
    const bool one_for_all = w.cache_lens.values && w.cache_lens.values->size() == 1;
    declare_extents(p, TESSERA_CACHE_LENS, TESSERA_I32, {one_for_all ? 1 : p.batch, 1, 1, 1});
  }
  declare(p, TESSERA_K, w.kv_dtype.value_or(w.dtype), w.layout);
  declare(p, TESSERA_V, w.kv_dtype.value_or(w.dtype), w.layout);
  for (size_t n = 0; n < 2; ++n) {
    const std::string& shares = w.scales[n];
    if (shares == "none") continue;
    const Operand& of = operand(p, n ? TESSERA_V : TESSERA_K);
    const bool by_token = shares.starts_with("token"), by_head = shares.ends_with("head");
    declare_extents(p, n ? TESSERA_V_SCALE : TESSERA_K_SCALE, w.dtype == TESSERA_F64 ? TESSERA_F64 : TESSERA_F32,
                    {by_token ? of.extent[0] : 1, by_token ? of.extent[1] : 1, by_head ? p.heads_kv : 1, 1});
  }
}

// Everything but strides that are said.
void build_operands(const Words& w, Problem& p) {
  const bool backward = p.pass == TESSERA_BACKWARD;
  const auto declare_if = [&](bool said, int name, int32_t dtype) {
    if (said) declare(p, name, dtype, w.layout);
  };
  for (size_t side = 0; side < std::size(sides); ++side) {
    declare_if(w.varlen.said[side], sides[side].cu_seqlens, TESSERA_I32);
    declare_if(w.seqused.said[side], sides[side].seqused, TESSERA_I32);
  }
  declare_if(w.per_sequence_corner, TESSERA_CORNER_OFFSETS, TESSERA_I32);
  build_cache(w, p);
  if (p.pass == TESSERA_APPEND) return;
  declare(p, TESSERA_Q, w.dtype, w.layout);
  const int32_t accumulation = accumulation_dtype(p);
  declare(p, TESSERA_OUT, w.out_dtype.value_or(w.dtype), w.layout);
  declare_if(w.lse, TESSERA_LSE, accumulation);
  declare_if(w.max_score, TESSERA_MAX_SCORE, accumulation);
  declare_if(w.exclude_keys, TESSERA_EXCLUDE_KEYS, TESSERA_BOOL);
  declare_if(w.documents, TESSERA_DOCUMENTS_Q, TESSERA_I32);
  declare_if(w.documents, TESSERA_DOCUMENTS_K, TESSERA_I32);
  declare_if(w.sink, TESSERA_SINKS, accumulation);
  if (w.alibi) declare_extents(p, TESSERA_SLOPES, accumulation, {w.alibi->empty() ? 1 : p.batch, 1, p.heads_q, 1});
  if (w.bias) declare_extents(p, TESSERA_BIAS, w.bias_dtype.value_or(w.dtype), extents(p, *w.bias));
  if (w.keep) declare_extents(p, TESSERA_KEEP, TESSERA_BOOL, extents(p, *w.keep));
  if (!backward) {
    require(!w.dlse && !w.grads, "dlse and grads belong to backward lines.");
    return;
  }
  declare(p, TESSERA_DOUT, operand(p, TESSERA_OUT).dtype, w.layout);
  declare_if(w.dlse, TESSERA_DLSE, accumulation);
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const OperandRow& row = operand_row(name);
    if (!is_output(row.roles[TESSERA_BACKWARD])) continue;
    const bool wanted = w.grads ? std::count(w.grads->begin(), w.grads->end(), name) > 0 : has(p, row.partner);
    if (!wanted) continue;
    require(has(p, row.partner), "grads has {} but the line has no {}.", row.text, operand_row(row.partner).text);
    declare(p, name, operand(p, row.partner).dtype, w.layout);
    if (row.broadcasts) p.operand[name] = operand(p, row.partner);
  }
}

// Metadata that the line gives is known: whatever a run would refuse is refused here.
void check_lists(const Line& line) {
  constexpr int64_t many = 1 << 20;  // sequences; one length may serve 2^31, and reading a line should not take seconds
  if (line.problem.batch > many) return;
  Bindings bound = {};
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const OperandRow& row = operand_row(name);
    if (!has(line.problem, name) || row.kind != Kind::i32 || name == TESSERA_STATUS || row.axes[1] == Axis::rows_q ||
        row.axes[1] == Axis::rows_k)
      continue;
    const auto found = line.values.find(name);
    if (found == line.values.end()) {
      if (name == TESSERA_CORNER_OFFSETS && !is_cache(line.problem)) continue;  // lengths do not depend on it
      return;                                                                   // it comes at run time
    }
    const int64_t count = elements(operand(line.problem, name));
    require(static_cast<int64_t>(found->second.size()) == count, "{} has {} values; the problem has {}.", row.text,
            found->second.size(), count);
    bound.data[name] = const_cast<int32_t*>(found->second.data());
  }
  check_lengths(line.problem, bound);
}

Line build(Words w) {
  Line line;
  line.problem = w.problem;
  line.seed = w.seed;
  line.offset = w.offset;
  Problem& p = line.problem;
  // Sizes first: full extents are made of them, so they must be sound before anything is multiplied.
  build_sizes(w, line);
  const std::pair<const char*, int64_t> sizes[] = {{"b", p.batch},
                                                   {"h", p.heads_q},
                                                   {"h", p.heads_kv},
                                                   {"q", p.len_q},
                                                   {"k", p.len_k},
                                                   {"d", p.dim},
                                                   {"d", p.dim_v},
                                                   {"rows=q", p.rows_q},
                                                   {"rows=k", p.rows_k},
                                                   {"n", p.len_new},
                                                   {"rows=n", p.rows_new},
                                                   {"page", p.cache.page_size},
                                                   {"pages", p.cache.pages},
                                                   {"slots", slots_of(p)},
                                                   {"cache_rows", p.cache.rows},
                                                   {"rotary", p.cache.rotary_dim},
                                                   {"positions", p.cache.rotary_positions}};
  for (const auto& [word, n] : sizes)
    require(n >= 0 && n <= INT32_MAX, "{} is {}; it must be from 0 to 2^31 - 1.", word, n);
  const double planes = static_cast<double>(std::max({p.batch, p.cache.pages, p.cache.rows, int64_t{1}}));
  const double largest =
      planes *
      static_cast<double>(std::max({p.len_q, p.len_k, p.len_new, p.rows_q, p.rows_k, p.rows_new, slots_of(p),
                                    p.cache.page_size, p.cache.rotary_positions, int64_t{1}})) *
      static_cast<double>(p.heads_q + p.heads_kv) * static_cast<double>(p.dim + p.dim_v);
  require(largest < 0x1p58, "the tensors have {:.3g} elements; they must stay below 2^58. Use smaller sizes.", largest);
  build_operands(w, p);
  if (p.mask.corner == TESSERA_CORNER_UNSET && needs_corner(p)) p.mask.corner = TESSERA_BOTTOM_RIGHT;
  for (const Strides& s : w.strides) {
    require(has(p, s.name), "strides has {} but the line does not.", operand_row(s.name).text);
    std::copy(s.values.begin(), s.values.end(), p.operand[s.name].stride);
  }
  // What is not said of a v that lies in k is k's.
  const auto says_v = [](const Strides& s) { return s.name == TESSERA_V; };
  if (p.cache.v_in_k && has(p, TESSERA_V) && std::none_of(w.strides.begin(), w.strides.end(), says_v))
    std::copy_n(p.operand[TESSERA_K].stride, 4, p.operand[TESSERA_V].stride);
  check(p);
  check_lists(line);
  return line;
}

}  // namespace

Line parse(const std::string& text) {
  return build(read_words(text));
}

}  // namespace tessera::core
