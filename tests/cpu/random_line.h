// Problems as text, drawn at random over every option that the CPU engine answers.
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
  const std::vector<int> outputs = tools::outputs(parsed.problem());
  std::string text;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const tessera_operand& o = parsed.problem().operand[name];
    const bool lengths = o.dtype == TESSERA_I32 && name != TESSERA_DOCUMENTS_Q && name != TESSERA_DOCUMENTS_K;
    if (o.dtype == TESSERA_ABSENT || lengths || !draw.one_in(4)) continue;
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

inline std::string random_line(Draw& draw, const std::string& pass) {
  const std::string dtype = draw.of<std::string>({"f64", "f32", "f32", "bf16", "bf16", "f16"});
  std::string line = pass + " " + dtype;
  const int64_t batch = draw.of<int64_t>({1, 1, 2, 3, 0});
  line += " h" + draw.of<std::string>({"1", "2", "4/2", "6/2", "5/1", "3"});
  const std::vector<int64_t> dims = {1, 2, 7, 8, 16, 24, 33, 40, 64, 80};
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
  if (draw.one_in(5)) line += " scale=" + draw.of<std::string>({"0.3", "-0.2", "0", "1"});
  if (draw.one_in(4)) line += " softcap=" + draw.of<std::string>({"1", "15", "50"});
  if (draw.one_in(4)) line += draw.of<std::string>({" alibi", " alibi=b,h"});
  if (draw.one_in(4)) line += " sink";
  if (draw.one_in(4))
    line += " bias=" + draw.of<std::string>({"1,h,q,k", "b,h,q,k", "b,1,1,k", "1,1,q,1", "1,1,1,1", "1,1,q,k"}) +
            draw.of<std::string>({"", ":f32"});
  if (draw.one_in(4)) line += fmt::format(" dropout=0.{}@seed{}", 1 + draw.below(8), draw.below(1000));
  if (draw.one_in(5)) line += dtype == "f64" ? " out=f64" : " out=f32";
  if (pass == "forward" && draw.one_in(4)) line += draw.of<std::string>({" max", " nolse"});
  if (pass == "backward" && draw.one_in(2)) line += " dlse";
  if (draw.one_in(4)) line += fmt::format(" align={}", draw.of<int64_t>({8, 64}));
  return draw.one_in(3) ? line + random_strides(draw, line) : line;
}

}  // namespace tessera::test
