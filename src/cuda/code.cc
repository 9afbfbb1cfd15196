#include "cuda/code.h"

#include <fmt/format.h>

namespace tessera::cuda {
namespace {

const char* name_of(rules::Float dtype) {
  return dtype == rules::Float::bf16 ? "bf16" : "f16";
}

// The fields as words and as C++.
struct Print {
  std::string& words;
  std::string& source;
  void operator()(const char* name, int value) const {
    words += fmt::format(" {}={}", name, value);
    source += fmt::format(".{} = {}, ", name, value);
  }
  void operator()(const char* name, rules::Float value) const {
    words += fmt::format(" {}={}", name, name_of(value));
    source += fmt::format(".{} = tessera::rules::Float::{}, ", name, name_of(value));
  }
};

// 32 rows a warp: each key is read from shared memory for two blocks of 16. Larger tiles spill (docs/gpu/RESULTS.md).
constexpr rules::ForwardSpec shipped[] = {
    {rules::Float::bf16, 128, 128, 64, 4, 2},
    {rules::Float::f16, 128, 128, 64, 4, 2},
    {rules::Float::bf16, 64, 128, 64, 4, 2},
    {rules::Float::f16, 64, 128, 64, 4, 2},
};

}  // namespace

Code code_of(const rules::ForwardSpec& spec) {
  Code code = {.text = "forward",
               .source = "{",
               .entry = "tessera_forward",
               .threads = rules::threads(spec),
               .shared_bytes = rules::shared_bytes(spec)};
  rules::ForwardSpec fields = spec;
  rules::visit_fields(fields, Print{code.text, code.source});
  code.source = fmt::format("#define TESSERA_SPEC {}}}\n#include \"device/portable/forward.cu\"\n", code.source);
  return code;
}

std::span<const rules::ForwardSpec> shipped_forward() {
  return shipped;
}

}  // namespace tessera::cuda
