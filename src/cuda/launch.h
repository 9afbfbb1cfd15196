// Where a plan's steps go: the GPU that holds its operands, on the caller's stream.
#pragma once
#include "core/plan.h"
#include "cuda/device.h"

namespace tessera::cuda {

inline constexpr int64_t most_blocks = (int64_t{1} << 31) - 1;  // of a launch

inline constexpr int64_t longest_sequence = int64_t{1} << 30;  // 32 bits count its rows and keys

class Launcher {
 public:
  // `name` is the operand that says which GPU. Throws core::Error: no GPU's memory, or another kind of GPU than the
  // plan's.
  Launcher(const core::Plan& plan, const core::Bindings& bound, int name, void* stream);
  // Queues one step with its parameters. Throws core::Error with what the driver says.
  void launch(const core::Step& step, void* params) const;

 private:
  const Driver& driver_;
  OnDevice here_;
  const core::Device& device_;
  Stream stream_;
};

}  // namespace tessera::cuda
