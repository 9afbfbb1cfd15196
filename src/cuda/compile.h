// NVRTC, opened at run time: source to machine code or PTX. The only file that knows its symbols.
#pragma once
#include <optional>
#include <string>

#include "cuda/code.h"

namespace tessera::cuda {

// What code is made for. Machine code of sm_80 runs on every sm_8x from it on; PTX on every later chip.
struct Target {
  int arch;  // 80, 90, 100, 120
  bool ptx;
  bool operator==(const Target&) const = default;
};
std::string text(const Target& target);  // "sm_80", "compute_80"
std::optional<Target> parse_target(const std::string& word);
bool compiles_for(const Code& code, const Target& target);

struct Image {
  Target target;
  std::string bytes;
  int registers = 0, spill_bytes = 0;  // as the assembler says; 0 of PTX
  std::string warnings;                // of the hot path: what the compiler says it did not do
  size_t unpacked_bytes = 0;           // if not 0, `bytes` is as a pack keeps it: compressed from so many
};

class Compiler {
 public:
  int version = 0;  // 13000 for 13.0
  // What must be equal for two results to be: version and options.
  std::string key() const;
  Image compile(const Code& code, const Target& target) const;  // throws Error(TESSERA_FAILED) with the log

  struct Functions;
  const Functions* nvrtc = nullptr;
};

// The library at `path`, or if empty the first that is found: none newer than the driver understands, if that is known.
struct OpenedCompiler {
  const Compiler* compiler;  // nullptr: none
  std::string why;
};
OpenedCompiler open_compiler(const std::string& path, int driver_version);

}  // namespace tessera::cuda
