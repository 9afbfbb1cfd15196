// A kernel as something to compile: family and spec, in words and as source; what it takes of a multiprocessor.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "rules/spec.h"

namespace tessera::cuda {

inline constexpr int any_shared = -1;
inline constexpr int oldest_arch = 75;

struct Code {
  std::string text;    // "forward dtype=bf16 dim=128 ...": family and spec, the key of everything
  std::string source;  // what NVRTC is given
  const char* entry;   // the kernel's name in it
  int threads;
  int shared_bytes;  // of a block; any_shared: each launch says, up to what the device has
  int least_arch;    // the oldest chip that has its instructions
  bool only_arch;    // and the only one: they are the chip's own ("sm_90a"), and there is no PTX of it
};

const char* text_of(rules::Task task);
const char* text_of(rules::Product product);

Code code_of(const rules::ForwardSpec& spec);
Code code_of(const rules::Sm90ForwardSpec& spec);
Code code_of(const rules::BackwardSpec& spec);
Code code_of(const rules::GeneralSpec& spec);

// What every build ships, so that nothing is compiled on a user's machine.
std::span<const rules::ForwardSpec> shipped_forward();
struct Sm90Choice {
  rules::Sm90ForwardSpec spec;
  int least_keys;  // that a row sees on average
};
// In order: a problem takes the first of its dtype whose dims hold its own and whose least_keys its rows see.
std::span<const Sm90Choice> shipped_sm90_forward();
std::span<const rules::BackwardSpec> shipped_backward();
std::span<const rules::GeneralSpec> shipped_general();
std::vector<Code> shipped();  // all of them

}  // namespace tessera::cuda
