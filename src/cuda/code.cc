#include "cuda/code.h"

#include <fmt/format.h>

#include <array>

namespace tessera::cuda {
namespace {

using rules::GeneralSpec;
using rules::Product;
using rules::Task;

struct Word {
  const char *text, *source;
};
Word word_of(rules::Float x) {
  return x == rules::Float::bf16 ? Word{"bf16", "Float::bf16"} : Word{"f16", "Float::f16"};
}
Word word_of(rules::BackwardPart x) {
  constexpr Word words[] = {
      {"attend", "BackwardPart::attend"}, {"prepare", "BackwardPart::prepare"}, {"convert", "BackwardPart::convert"}};
  return words[static_cast<int>(x)];
}
Word word_of(Task x) {
  constexpr Word words[] = {{"forward", "Task::forward"}, {"combine", "Task::combine"}, {"append", "Task::append"},
                            {"terms", "Task::terms"},     {"keys", "Task::keys"},       {"queries", "Task::queries"},
                            {"bias", "Task::bias"},       {"reduce", "Task::reduce"},   {"clear", "Task::clear"}};
  return words[static_cast<int>(x)];
}
Word word_of(Product x) {
  constexpr Word words[] = {{"any", "Product::any"},
                            {"bf16", "Product::bf16"},
                            {"f16", "Product::f16"},
                            {"f32", "Product::f32"},
                            {"tf32", "Product::tf32"}};
  return words[static_cast<int>(x)];
}

// The fields as words and as C++.
struct Print {
  std::string& words;
  std::string& source;
  void operator()(const char* name, int value) const {
    words += fmt::format(" {}={}", name, value);
    source += fmt::format(".{} = {}, ", name, value);
  }
  template <class Enum>
  void operator()(const char* name, Enum value) const {
    words += fmt::format(" {}={}", name, word_of(value).text);
    source += fmt::format(".{} = tessera::rules::{}, ", name, word_of(value).source);
  }
};

template <class Spec>
Code make(const char* family, const char* file, Spec spec) {
  Code code = {.text = family,
               .source = "{",
               .entry = nullptr,
               .threads = 0,
               .shared_bytes = 0,
               .least_arch = 0,
               .only_arch = false};
  rules::visit_fields(spec, Print{code.text, code.source});
  code.source = fmt::format("#define TESSERA_SPEC {}}}\n#include \"{}\"\n", code.source, file);
  return code;
}

// 32 rows a warp: each key is read from shared memory for two blocks of 16. Larger tiles spill.
// Where results are wide, or biases wait in registers, there is room for 16. Dim 256 has small tiles for devices whose
// shared memory holds no others; where both fit they are slower (0.81 of FlashAttention-2 at 4k on h200 against 0.89).
constexpr rules::ForwardSpec forward_specs[] = {
    {rules::Float::bf16, 128, 128, 64, 4, 2, 0}, {rules::Float::f16, 128, 128, 64, 4, 2, 0},
    {rules::Float::bf16, 64, 128, 64, 4, 2, 0},  {rules::Float::f16, 64, 128, 64, 4, 2, 0},
    {rules::Float::bf16, 256, 128, 64, 8, 2, 0}, {rules::Float::f16, 256, 128, 64, 8, 2, 0},
    {rules::Float::bf16, 256, 64, 32, 4, 2, 0},  {rules::Float::f16, 256, 64, 32, 4, 2, 0},
    {rules::Float::bf16, 128, 64, 64, 4, 2, 1},  {rules::Float::f16, 128, 64, 64, 4, 2, 1},
    {rules::Float::bf16, 64, 64, 64, 4, 2, 1},   {rules::Float::f16, 64, 64, 64, 4, 2, 1},
};

// Each row for both dtypes; the fewest columns come first, since fewer are padded with zeros. Rows are as wide as
// their sums leave registers, and tiles of keys as long as shared memory and the registers of their scores leave room:
// each tile read serves all rows of a block.
constexpr auto sm90_choices = [] {
  constexpr rules::Float any = rules::Float::bf16;
  constexpr Sm90Choice rows[] = {
      // Shares of a matrix product's rate on h200, 2026-12. Three groups hide each other's exponentials: 0.60 against
      // 0.52 at 4k. Two lose less at an item's ends: 0.38 against 0.30 under a causal mask of 1k.
      {{any, 64, 64, 3, 128, 4, 2, 0, 0, 0}, 1024},
      {{any, 64, 64, 2, 128, 4, 2, 1, 0, 0}, 0},
      // The same: 517 TFLOP/s against 492 at 4k, 263 against 295 under a causal mask of 1k; of 72 471 against 368 at
      // 4k.
      {{any, 80, 80, 3, 96, 3, 1, 0, 0, 0}, 2048},
      {{any, 80, 80, 2, 128, 2, 2, 1, 0, 0}, 0},
      // Two slabs of 64 columns a row, as 128 has: its tiles.
      {{any, 96, 96, 2, 128, 2, 2, 1, 0, 0}, 0},
      {{any, 112, 112, 2, 128, 2, 2, 1, 0, 0}, 0},
      // The same: 0.92 against 0.87 at 16k, 0.66 against 0.74 at 1k. Three groups have registers for 80 keys only.
      {{any, 128, 128, 3, 80, 4, 1, 0, 0, 0}, 6144},
      {{any, 128, 128, 2, 128, 2, 2, 1, 0, 0}, 0},
      // Shared memory holds one q beside tiles this long.
      {{any, 192, 128, 2, 128, 2, 1, 1, 0, 0}, 0},
      // Wide results take the registers that longer tiles' scores would need.
      {{any, 160, 160, 2, 96, 2, 1, 0, 0, 0}, 0},
      {{any, 192, 192, 2, 96, 2, 1, 0, 0, 0}, 0},
      // Two stages of wide k and v fill shared memory with these tiles.
      {{any, 256, 256, 2, 80, 2, 1, 0, 0, 0}, 0},
      // Keys in pages, or split among blocks.
      {{any, 64, 64, 2, 128, 4, 2, 1, 0, 1}, 0},
      {{any, 128, 128, 2, 128, 2, 2, 1, 0, 1}, 0},
      {{any, 192, 128, 2, 128, 2, 1, 1, 0, 1}, 0},
      // With what pairs have, tiles of bias and keep; beside long rows one q.
      {{any, 64, 64, 2, 128, 2, 2, 1, 1, 0}, 0},
      {{any, 96, 96, 2, 128, 2, 1, 1, 1, 0}, 0},
      {{any, 128, 128, 2, 128, 2, 1, 1, 1, 0}, 0},
      {{any, 192, 128, 2, 64, 2, 1, 1, 1, 0}, 0},
      {{any, 192, 192, 2, 64, 2, 1, 0, 1, 0}, 0},
      {{any, 256, 256, 2, 64, 2, 1, 0, 1, 0}, 0},
  };
  std::array<Sm90Choice, 2 * std::size(rows)> all = {};
  size_t n = 0;
  for (const rules::Float dtype : {rules::Float::bf16, rules::Float::f16})
    for (const Sm90Choice& row : rows) {
      all[n] = row;
      all[n++].spec.dtype = dtype;
    }
  return all;
}();

constexpr rules::BackwardSpec backward_specs[] = {
    {rules::BackwardPart::attend, rules::Float::bf16, 128, 128, 64, 8},
    {rules::BackwardPart::attend, rules::Float::f16, 128, 128, 64, 8},
    {rules::BackwardPart::attend, rules::Float::bf16, 64, 128, 128, 8},
    {rules::BackwardPart::attend, rules::Float::f16, 64, 128, 128, 8},
    {rules::BackwardPart::prepare, rules::Float::bf16, 128, 0, 0, 4},
    {rules::BackwardPart::prepare, rules::Float::bf16, 64, 0, 0, 4},
    {rules::BackwardPart::convert, rules::Float::bf16, 128, 0, 0, 4},
    {rules::BackwardPart::convert, rules::Float::bf16, 64, 0, 0, 4},
};

// Of each task and product in the order of liking: the last is for devices that hold no more.
constexpr GeneralSpec general_specs[] = {
    {Task::forward, Product::bf16, 128, 64}, {Task::forward, Product::bf16, 64, 64},
    {Task::forward, Product::bf16, 64, 16},  {Task::forward, Product::f16, 128, 64},
    {Task::forward, Product::f16, 64, 64},   {Task::forward, Product::f16, 64, 16},
    {Task::forward, Product::f32, 128, 32},  {Task::forward, Product::f32, 64, 32},
    {Task::forward, Product::f32, 64, 16},   {Task::forward, Product::tf32, 128, 32},
    {Task::keys, Product::bf16, 128, 32},    {Task::keys, Product::bf16, 64, 32},
    {Task::keys, Product::bf16, 64, 16},     {Task::keys, Product::f16, 128, 32},
    {Task::keys, Product::f16, 64, 32},      {Task::keys, Product::f16, 64, 16},
    {Task::keys, Product::f32, 64, 32},      {Task::keys, Product::f32, 64, 16},
    {Task::keys, Product::tf32, 64, 32},     {Task::queries, Product::bf16, 128, 32},
    {Task::queries, Product::bf16, 64, 32},  {Task::queries, Product::bf16, 64, 16},
    {Task::queries, Product::f16, 128, 32},  {Task::queries, Product::f16, 64, 32},
    {Task::queries, Product::f16, 64, 16},   {Task::queries, Product::f32, 64, 32},
    {Task::queries, Product::f32, 64, 16},   {Task::queries, Product::tf32, 64, 32},
    {Task::bias, Product::bf16, 64, 32},     {Task::bias, Product::f16, 64, 32},
    {Task::bias, Product::f32, 64, 32},      {Task::bias, Product::tf32, 64, 32},
    {Task::combine, Product::any, 0, 0},     {Task::append, Product::any, 0, 0},
    {Task::terms, Product::any, 0, 0},       {Task::reduce, Product::any, 0, 0},
    {Task::clear, Product::any, 0, 0},
};

}  // namespace

const char* text_of(Task task) {
  return word_of(task).text;
}
const char* text_of(Product product) {
  return word_of(product).text;
}

Code code_of(const rules::ForwardSpec& spec) {
  Code code = make("forward", "device/portable/forward.cu", spec);
  code.entry = "tessera_forward";
  code.threads = rules::threads(spec);
  code.shared_bytes = rules::shared_bytes(spec);
  code.least_arch = 80;
  return code;
}

Code code_of(const rules::Sm90ForwardSpec& spec) {
  Code code = make("sm90_forward", "device/sm90/forward.cu", spec);
  code.entry = "tessera_sm90_forward";
  code.threads = rules::threads(spec);
  code.shared_bytes = rules::shared_bytes(spec);
  code.least_arch = 90;
  code.only_arch = true;
  return code;
}

Code code_of(const rules::BackwardSpec& spec) {
  Code code = make("backward", "device/portable/backward.cu", spec);
  code.entry = "tessera_backward";
  code.threads = rules::threads(spec);
  code.shared_bytes = rules::shared_bytes(spec);
  code.least_arch = 80;
  return code;
}

Code code_of(const GeneralSpec& spec) {
  Code code = make("general", "device/general/general.cu", spec);
  code.entry = "tessera_general";
  code.threads = 32 * rules::most_warps;
  code.shared_bytes = spec.product == Product::any ? 0 : any_shared;
  code.least_arch = rules::least_arch(spec.product);
  return code;
}

std::span<const rules::ForwardSpec> shipped_forward() {
  return forward_specs;
}
std::span<const Sm90Choice> shipped_sm90_forward() {
  return sm90_choices;
}
std::span<const rules::BackwardSpec> shipped_backward() {
  return backward_specs;
}
std::span<const GeneralSpec> shipped_general() {
  return general_specs;
}
std::vector<Code> shipped() {
  std::vector<Code> all;
  for (const rules::ForwardSpec& spec : forward_specs) all.push_back(code_of(spec));
  for (const Sm90Choice& choice : sm90_choices) all.push_back(code_of(choice.spec));
  for (const rules::BackwardSpec& spec : backward_specs) all.push_back(code_of(spec));
  for (const GeneralSpec& spec : general_specs) all.push_back(code_of(spec));
  return all;
}

}  // namespace tessera::cuda
