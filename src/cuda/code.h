// A kernel as something to compile: family and spec, in words and as source; what it takes of a multiprocessor.
#pragma once
#include <span>
#include <string>

#include "rules/spec.h"

namespace tessera::cuda {

struct Code {
  std::string text;    // "forward dtype=bf16 dim=128 ...": family and spec, the key of everything
  std::string source;  // what NVRTC is given
  const char* entry;   // the kernel's name in it
  int threads, shared_bytes;
};

Code code_of(const rules::ForwardSpec& spec);

// What every build ships, so that nothing is compiled on a user's machine.
std::span<const rules::ForwardSpec> shipped_forward();

}  // namespace tessera::cuda
