// A problem to text; what the words say by default is left out.
#include <algorithm>

#include "core/error.h"
#include "core/line_words.h"
#include "rules/dtype.h"

namespace tessera::core {
namespace {

std::string list_text(const std::vector<int32_t>& values) {
  return fmt::format("[{}]", fmt::join(values, ","));
}

std::string dims_text(const Operand& o) {
  std::string text;
  for (int d = 0; d < 4; ++d) text += fmt::format("{}{}", d ? "," : "", o.extent[d] == 1 ? '1' : grid_letters[d]);
  return text;
}

const std::vector<int32_t>* values_of(const Line& line, int name) {
  const auto found = line.values.find(name);
  return found == line.values.end() ? nullptr : &found->second;
}

std::string mask_text(const Line& line) {
  const Problem& p = line.problem;
  const tessera_mask& m = p.mask;
  std::string corner;
  if (m.corner != TESSERA_CORNER_UNSET) corner = std::string("@") + corners[m.corner - TESSERA_BOTTOM_RIGHT];
  if (m.corner == TESSERA_CORNER_AT) {
    const std::vector<int32_t>* offsets = values_of(line, TESSERA_CORNER_OFFSETS);
    if (offsets) corner += list_text(*offsets);
    else if (!has(p, TESSERA_CORNER_OFFSETS)) corner += fmt::format("({})", m.corner_at);
  }
  const auto bound = [](int32_t unbounded, int64_t n) {
    return unbounded ? std::string("unbounded") : std::to_string(n);
  };
  std::vector<std::string> parts;
  const auto positioned = [&](const std::string& part) {
    parts.push_back(part + corner);
    corner.clear();  // said once
  };
  if (m.causal) positioned("causal");
  if (m.has_window)
    positioned(fmt::format("window({},{})", bound(m.window_left_unbounded, m.window_left),
                           bound(m.window_right_unbounded, m.window_right)));
  if (m.chunk) positioned(fmt::format("chunk({})", m.chunk));
  if (m.has_prefix) positioned(fmt::format("prefix({})", m.prefix));
  if (!corner.empty()) positioned("corner");
  if (m.first) parts.push_back(fmt::format("first({})", m.first));
  if (has(p, TESSERA_KEEP)) {
    const std::string dims = dims_text(operand(p, TESSERA_KEEP));
    parts.push_back(dims == "1,1,q,k" ? "keep" : fmt::format("keep({})", dims));
  }
  if (has(p, TESSERA_EXCLUDE_KEYS)) parts.push_back("exclude_keys");
  if (has(p, TESSERA_DOCUMENTS_Q)) parts.push_back("documents");
  return parts.empty() ? "" : fmt::format(" mask={}", fmt::join(parts, "&"));
}

std::string packed_text(const Line& line) {
  const Problem& p = line.problem;
  std::string varlen, seqused, rows;
  for (const auto& [letter, cu_name, used_name] : sides) {
    if (has(p, cu_name)) {
      varlen += letter;
      const std::vector<int32_t>* cu = values_of(line, cu_name);
      if (cu) {
        std::vector<int32_t> lengths;
        for (size_t b = 1; b < cu->size(); ++b) lengths.push_back((*cu)[b] - (*cu)[b - 1]);
        varlen += list_text(lengths);
      }
      const int64_t total = letter == 'q' ? p.rows_q : letter == 'k' ? p.rows_k : p.rows_new;
      if (!cu || cu->back() != total) rows += fmt::format("{}{}", letter, total);
    }
    if (has(p, used_name)) {
      seqused += letter;
      if (const std::vector<int32_t>* used = values_of(line, used_name)) seqused += list_text(*used);
    }
  }
  return (varlen.empty() ? "" : " varlen=" + varlen) + (rows.empty() ? "" : " rows=" + rows) +
         (seqused.empty() ? "" : " seqused=" + seqused);
}

std::string scale_text(const Problem& p, int name) {
  if (!has(p, name)) return "none";
  const Operand& scale = operand(p, name);
  const bool by_token = scale.extent[0] != 1 || scale.extent[1] != 1, by_head = scale.extent[2] != 1;
  return by_token ? (by_head ? "token_head" : "token") : by_head ? "head" : "tensor";
}

std::string cache_text(const Line& line) {
  const Problem& p = line.problem;
  const tessera_cache& c = p.cache;
  std::string text;
  const auto size = [&](const char* word, int64_t n, int64_t by_default) {
    if (n != by_default) text += fmt::format(" {}={}", word, n);
  };
  const auto list = [&](int name, bool implied) {
    if (!has(p, name)) return;
    const std::vector<int32_t>* values = values_of(line, name);
    if (values) text += fmt::format(" {}={}", operand_row(name).text, list_text(*values));
    else if (!implied) text += fmt::format(" {}", operand_row(name).text);
  };
  if (appends(p) && p.pass != TESSERA_APPEND) text += " append";
  size("page", c.page_size, 0);
  if (c.page_size) size("pages", c.pages, cache_rows(p) * full_extent(p, operand_row(TESSERA_PAGE_TABLE), 1));
  size("slots", slots_of(p), p.len_k);
  size("cache_rows", cache_rows(p), p.batch);
  list(TESSERA_CACHE_LENS, true);
  list(TESSERA_CACHE_BATCH_IDX, false);
  list(TESSERA_LEFT_PAD, false);
  list(TESSERA_PAGE_TABLE, true);
  if (c.ring) text += " ring";
  if (c.v_in_k) text += " v_in_k";
  if (c.rotary_dim) {
    text += fmt::format(" rotary={}{}", c.rotary_dim, c.rotary_interleaved ? ":interleaved" : "");
    const int32_t angle = operand(p, TESSERA_COS).dtype;
    if (angle != TESSERA_F32) text += fmt::format(":{}", rules::dtype_rows[angle].text);
    size("positions", operand(p, TESSERA_COS).extent[1], std::max(p.len_q, p.len_k));
  }
  if (operand(p, TESSERA_K).dtype == TESSERA_E4M3) {
    text += " kv=e4m3";
    const std::string of_k = scale_text(p, TESSERA_K_SCALE), of_v = scale_text(p, TESSERA_V_SCALE);
    if (of_k != "none" || of_v != "none") text += ":" + of_k + (of_v == of_k ? "" : "/" + of_v);
  }
  if (has(p, TESSERA_STATUS)) text += " status";
  return text;
}

std::string outputs_text(const Problem& p) {
  if (p.pass == TESSERA_APPEND) return "";
  std::string text;
  if (!has(p, TESSERA_LSE)) text += " nolse";
  if (has(p, TESSERA_MAX_SCORE)) text += " max";
  if (has(p, TESSERA_DLSE)) text += " dlse";
  if (operand(p, TESSERA_OUT).dtype != data_dtype(p))
    text += fmt::format(" out={}", rules::dtype_rows[operand(p, TESSERA_OUT).dtype].text);
  if (p.pass == TESSERA_FORWARD) return text;
  bool all = true;
  std::vector<std::string> names;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const OperandRow& row = operand_row(name);
    if (!is_output(row.roles[TESSERA_BACKWARD])) continue;
    if (has(p, name)) names.push_back(row.text);
    all = all && has(p, name) == has(p, row.partner);
  }
  return all ? text : text + fmt::format(" grads={}", fmt::join(names, ","));
}

// Operands whose strides are not those of `layout`, as "q[...]k[...]".
std::string strides_text(const Problem& p, int layout) {
  std::string text;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    if (!has(p, name)) continue;
    Problem dense = p;
    const Operand& o = operand(p, name);
    if (operand_row(name).broadcasts)
      declare_extents(dense, name, o.dtype, {o.extent[0], o.extent[1], o.extent[2], o.extent[3]});
    else declare(dense, name, o.dtype, layout);
    if (!std::equal(o.stride, o.stride + 4, operand(dense, name).stride))
      text += fmt::format("{}[{}]", operand_row(name).text, fmt::join(o.stride, o.stride + 4, ","));
  }
  return text;
}

std::string layout_text(const Problem& p) {
  std::string shortest = strides_text(p, TESSERA_BSHD);
  int layout = TESSERA_BSHD;
  for (int other = TESSERA_BHSD; other <= TESSERA_KV; ++other) {
    const std::string text = strides_text(p, other);
    if (text.size() < shortest.size()) shortest = text, layout = other;
  }
  return (layout == TESSERA_BSHD ? "" : fmt::format(" layout={}", layouts[layout])) +
         (shortest.empty() ? "" : " strides=" + shortest);
}

}  // namespace

std::string print(const Line& line) {
  const Problem& p = line.problem;
  const auto pair = [](int64_t a, int64_t b) { return a == b ? std::to_string(a) : fmt::format("{}/{}", a, b); };
  const char* const pass = p.pass == TESSERA_BACKWARD   ? "backward"
                           : p.pass == TESSERA_APPEND   ? "append"
                           : has(p, TESSERA_CACHE_LENS) ? "decode"
                                                        : "forward";
  std::string text =
      fmt::format("{} {} b{} h{}", pass, rules::dtype_rows[data_dtype(p)].text, p.batch, pair(p.heads_q, p.heads_kv));
  if (p.pass != TESSERA_APPEND) text += fmt::format(" q{}", p.len_q);
  if (appends(p) && (p.pass == TESSERA_APPEND || p.len_new != p.len_q)) text += fmt::format(" n{}", p.len_new);
  text += fmt::format(" k{} d{}", p.len_k, pair(p.dim, p.dim_v));
  text += layout_text(p) + cache_text(line) + mask_text(line);
  if (p.has_scale) text += fmt::format(" scale={}", p.scale);
  if (p.softcap > 0) text += fmt::format(" softcap={}", p.softcap);
  if (has(p, TESSERA_SLOPES)) text += operand(p, TESSERA_SLOPES).extent[0] == 1 ? " alibi" : " alibi=b,h";
  if (has(p, TESSERA_SINKS)) text += " sink";
  if (has(p, TESSERA_BIAS)) {
    const Operand& bias = operand(p, TESSERA_BIAS);
    text += " bias=" + dims_text(bias);
    if (bias.dtype != data_dtype(p)) text += fmt::format(":{}", rules::dtype_rows[bias.dtype].text);
  }
  if (p.dropout > 0 || line.seed || line.offset) text += fmt::format(" dropout={}", p.dropout);
  if (line.seed) text += fmt::format("@seed{}", line.seed);
  if (line.offset) text += fmt::format("@offset{}", line.offset);
  text += packed_text(line) + outputs_text(p);
  if (p.deterministic) text += " deterministic";
  if (p.batch_invariant) text += " batch_invariant";
  if (p.allow_tf32) text += " allow_tf32";
  if (p.alignment) text += fmt::format(" align={}", p.alignment);
  return text;
}

std::string print(const Problem& problem) {
  Line line;
  line.problem = problem;
  return print(line);
}

}  // namespace tessera::core
