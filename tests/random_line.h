// Problems as text, drawn at random over every option of the contract.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tools/tessera/case.h"

namespace tessera::test {

class Draw {
 public:
  explicit Draw(uint64_t seed) : generator_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(generator_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class T>
  T of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(below(static_cast<int64_t>(choices.size())))];
  }

 private:
  std::mt19937_64 generator_;  // its outputs are fixed by the standard
};

inline std::string list_of(Draw& draw, int64_t n, const std::vector<int64_t>& choices) {
  std::string text = "[";
  for (int64_t i = 0; i < n; ++i) text += fmt::format("{}{}", i ? "," : "", draw.of(choices));
  return text + "]";
}

inline std::string random_mask(Draw& draw) {
  std::vector<std::string> parts;
  const std::string corner =
      draw.of<std::string>({"", "@bottom_right", "@top_left", fmt::format("@at({})", draw.below(300) - 100), "@at"});
  const auto side = [&] { return draw.one_in(5) ? std::string("unbounded") : std::to_string(draw.below(90) - 8); };
  if (draw.one_in(2)) parts.push_back("causal");
  else if (draw.one_in(6)) parts.push_back(fmt::format("prefix({})", draw.below(40)));
  if (draw.one_in(3)) parts.push_back(fmt::format("window({},{})", side(), side()));
  const bool window = !parts.empty() && parts.back().starts_with("window");
  if (draw.one_in(6)) parts.push_back(fmt::format("chunk({})", 1 + draw.below(70)));
  if (!parts.empty()) parts.front() += corner;
  if (window && draw.one_in(2)) parts.push_back(fmt::format("first({})", 1 + draw.below(70)));
  if (draw.one_in(6))
    parts.push_back(draw.of<std::string>({"keep", "keep(b,h,q,k)", "keep(1,h,1,k)", "keep(b,1,q,1)"}));
  if (draw.one_in(5)) parts.push_back("exclude_keys");
  if (draw.one_in(8)) parts.push_back("documents");
  return parts.empty() ? "" : fmt::format(" mask={}", fmt::join(parts, "&"));
}

// Lengths around the tile sizes 64 and 128, odd and prime ones, 0 and 1.
inline const std::vector<int64_t>& lengths() {
  static const std::vector<int64_t> all = {0, 1, 2, 7, 16, 17, 31, 61, 63, 64, 65, 97, 127, 128, 129, 191};
  return all;
}

// Strides in any order of dimensions with gaps between them, or a stride of 0 for an input: of some operands of the
// line.
inline std::string random_strides(Draw& draw, const std::string& line) {
  const tools::Line parsed(line);
  std::vector<int> outputs = tools::outputs(parsed.problem());
  for (const int name : tools::updates(parsed.problem())) outputs.push_back(name);
  std::string text;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const tessera_operand& o = parsed.problem().operand[name];
    const bool fixed = parsed.problem().cache.v_in_k && (name == TESSERA_K || name == TESSERA_V);
    const bool lengths = o.dtype == TESSERA_I32 && name != TESSERA_DOCUMENTS_Q && name != TESSERA_DOCUMENTS_K;
    if (o.dtype == TESSERA_ABSENT || lengths || fixed || !draw.one_in(4)) continue;
    std::vector<int> order = {0, 1, 2, 3};  // fastest last
    for (size_t i = 3; i > 0; --i)
      std::swap(order[i], order[static_cast<size_t>(draw.below(static_cast<int64_t>(i) + 1))]);
    int64_t strides[4], step = 1 + draw.below(3);
    for (size_t i = 4; i-- > 0;) {
      strides[order[i]] = step;
      step = step * std::max<int64_t>(1, o.extent[order[i]]) + draw.below(5);
    }
    const bool output = std::find(outputs.begin(), outputs.end(), name) != outputs.end();
    const bool made = name == TESSERA_OUT || name == TESSERA_LSE;  // by a forward run, if not by this one
    if (!output && !made && draw.one_in(4)) strides[draw.below(4)] = 0;
    text += fmt::format("{}[{}]", tessera_name_text(name), fmt::join(strides, ","));
  }
  return text.empty() ? "" : " strides=" + text;
}

inline std::string random_score(Draw& draw) {
  std::string line;
  if (draw.one_in(5)) line += " scale=" + draw.of<std::string>({"0.3", "-0.2", "0", "1"});
  if (draw.one_in(4)) line += " softcap=" + draw.of<std::string>({"1", "15", "50"});
  if (draw.one_in(4)) line += draw.of<std::string>({" alibi", " alibi=b,h"});
  if (draw.one_in(4)) line += " sink";
  if (draw.one_in(4))
    line += " bias=" + draw.of<std::string>({"1,h,q,k", "b,h,q,k", "b,1,1,k", "1,1,q,1", "1,1,1,1", "1,1,q,k"}) +
            draw.of<std::string>({"", ":f32"});
  if (draw.one_in(4)) line += fmt::format(" dropout=0.{}@seed{}", 1 + draw.below(8), draw.below(1000));
  return line;
}

inline const std::vector<int64_t>& small_dims() {
  static const std::vector<int64_t> all = {1, 2, 7, 8, 16, 24, 33, 40, 64, 80};
  return all;
}

inline std::string random_line(Draw& draw, const std::string& pass, const std::vector<int64_t>& dims = small_dims()) {
  const std::string dtype = draw.of<std::string>({"f64", "f32", "f32", "bf16", "bf16", "f16"});
  std::string line = pass + " " + dtype;
  const int64_t batch = draw.of<int64_t>({1, 1, 2, 3, 0});
  line += " h" + draw.of<std::string>({"1", "2", "4/2", "6/2", "5/1", "3"});
  line += fmt::format(" d{}", draw.of(dims));
  if (draw.one_in(3)) line += fmt::format("/{}", draw.of(dims));
  const bool packed_q = draw.one_in(3), packed_k = packed_q ? !draw.one_in(4) : draw.one_in(6);
  if (batch > 0 && (packed_q || packed_k)) {
    line += " varlen=";
    if (packed_q) line += "q" + list_of(draw, batch, lengths());
    if (packed_k) line += "k" + list_of(draw, batch, lengths());
    if (draw.one_in(2)) line += std::string(" rows=") + (packed_q ? "q700" : "") + (packed_k ? "k700" : "");
    if (!packed_q) line += fmt::format(" q{}", draw.of(lengths()));
    else if (draw.one_in(4)) line += " q200";  // a looser bound
    if (!packed_k) line += fmt::format(" k{}", draw.of(lengths()));
  } else {
    line += fmt::format(" b{} q{} k{}", batch, draw.of(lengths()), draw.of(lengths()));
    if (draw.one_in(3)) line += " layout=" + draw.of<std::string>({"bhsd", "qkv", "kv"});
  }
  if (draw.one_in(5)) line += " seqused=" + draw.of<std::string>({"q", "k", "qk"});
  line += random_mask(draw);
  line += random_score(draw);
  if (draw.one_in(5)) line += dtype == "f64" ? " out=f64" : " out=f32";
  if (pass == "forward" && draw.one_in(4)) line += draw.of<std::string>({" max", " nolse"});
  if (pass == "backward" && draw.one_in(2)) line += " dlse";
  if (draw.one_in(4)) line += fmt::format(" align={}", draw.of<int64_t>({8, 64}));
  return draw.one_in(3) ? line + random_strides(draw, line) : line;
}

inline std::string text_of(const std::vector<int64_t>& values) {
  return fmt::format("[{}]", fmt::join(values, ","));
}

// Decoding and appending: every kind of cache with every option that may stand beside it.
inline std::string random_cache_line(Draw& draw) {
  const bool alone = draw.one_in(8);
  const std::string dtype = draw.of<std::string>({"f64", "f32", "f32", "bf16", "bf16", "f16"});
  const int64_t batch = draw.of<int64_t>({1, 1, 2, 3, 4});
  const int64_t len_k = draw.of<int64_t>({1, 5, 16, 33, 64, 100, 191, 700, 1100});
  const int64_t len_q = draw.of<int64_t>({1, 1, 1, 2, 4, 7, 20});
  const bool appends = alone || !draw.one_in(3);
  const int64_t len_new = appends ? std::min(len_k, draw.one_in(3) ? draw.below(9) : len_q) : 0;
  const bool in_k = draw.one_in(6), packed_new = appends && draw.one_in(4), packed_q = !alone && draw.one_in(4);
  const int64_t dim = draw.of<int64_t>({2, 7, 8, 16, 24, 40, 64});
  const int64_t dim_v = in_k ? 1 + draw.below(dim) : draw.one_in(3) ? draw.of<int64_t>({1, 8, 33}) : dim;
  const bool ring = draw.one_in(5);
  const int64_t left = draw.below(40);
  const int64_t slots = ring ? std::max(left + (alone ? 0 : len_q) + draw.below(9), std::max<int64_t>(1, len_new))
                             : len_k + (draw.one_in(2) ? 0 : draw.below(20));
  const bool rotary = draw.one_in(3);

  // A length of keys that the cache can hold for each sequence.
  std::vector<int64_t> q, fresh, lens, pads, rows;
  const bool padded = draw.one_in(3);
  const int64_t cache_rows = batch + draw.below(3);
  for (int64_t b = 0; b < batch; ++b) {
    q.push_back(packed_q ? draw.below(len_q + 1) : len_q);
    fresh.push_back(packed_new ? draw.below(len_new + 1) : len_new);
    int64_t before = draw.one_in(3) ? len_k - fresh.back() : draw.below(len_k - fresh.back() + 1);
    // Rotated queries need positions from 0 on.
    if (rotary) before = std::max(before, std::min(q.back() - fresh.back(), len_k - fresh.back()));
    const int64_t room = ring ? 5 : slots - before - fresh.back() + 1;
    pads.push_back(padded ? draw.below(room) : 0);
    lens.push_back(before + pads.back());
    rows.push_back((b * 2 + 1) % cache_rows);
  }
  std::sort(rows.begin(), rows.end());
  const bool distinct = std::adjacent_find(rows.begin(), rows.end()) == rows.end();
  const bool turned = rotary && len_k >= len_q && !in_k;

  std::string line = fmt::format("{} {} b{} d{}/{} k{}", alone ? "append" : "decode", dtype, batch, dim, dim_v, len_k);
  line +=
      " h" + (alone ? draw.of<std::string>({"1", "3"}) : draw.of<std::string>({"1", "2", "4/2", "6/2", "7/1", "3"}));
  if (!alone) line += fmt::format(" q{}", len_q);
  if (appends) line += fmt::format(" n{}{}", len_new, alone ? "" : " append");
  if (packed_q || packed_new)
    line += " varlen=" + (packed_q ? "q" + text_of(q) : "") + (packed_new ? "n" + text_of(fresh) : "");
  line += " cache_lens=" + text_of(lens);
  if (padded) line += " left_pad=" + text_of(pads);
  if (distinct && draw.one_in(3)) line += fmt::format(" cache_rows={} cache_batch_idx={}", cache_rows, text_of(rows));
  if (draw.one_in(2)) line += fmt::format(" page={}", draw.of<int64_t>({1, 2, 3, 5, 16, 17, 64}));
  if (slots != len_k) line += fmt::format(" slots={}", slots);
  if (in_k) line += " v_in_k";
  else if (draw.one_in(3)) line += " layout=" + draw.of<std::string>({"bhsd", "kv"});
  if (draw.one_in(4))
    line += " kv=e4m3" + draw.of<std::string>({"", ":tensor", ":head", ":token", ":token_head/head", ":none/token"});
  if (turned)
    line += fmt::format(" rotary={}{}{}", 2 * (1 + draw.below(dim / 2)), draw.one_in(2) ? ":interleaved" : "",
                        draw.one_in(3) ? ":" + dtype : "");
  if (draw.one_in(4)) line += " status";
  if (ring) line += fmt::format(" ring{}", alone ? "" : fmt::format(" mask=window({},{})", left, draw.below(3)));
  else if (!alone && turned) line += draw.of<std::string>({"", " mask=causal", " mask=window(20,3)&causal&first(3)"});
  else if (!alone) line += random_mask(draw);
  if (alone) return draw.one_in(3) ? line + random_strides(draw, line) : line;
  line += random_score(draw);
  if (draw.one_in(5)) line += dtype == "f64" ? " out=f64" : " out=f32";
  if (draw.one_in(4)) line += draw.of<std::string>({" max", " nolse"});
  return draw.one_in(3) ? line + random_strides(draw, line) : line;
}

}  // namespace tessera::test
