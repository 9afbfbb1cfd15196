// Kernels as the driver runs them: taken from the pack, else from the disk cache, else compiled. In memory they are
// keyed by (family, spec) and device alone.
#pragma once
#include <array>
#include <atomic>
#include <optional>
#include <string>

#include "cuda/code.h"
#include "cuda/driver.h"
#include "cuda/pack.h"

namespace tessera::cuda {

// The pack beside this library, or why there is none.
struct FoundPack {
  std::optional<Pack> pack;
  std::string path, why;
};
const FoundPack& shipped_pack();

inline constexpr int most_devices = 64;

class Loaded {
 public:
  // One for each kernel, made at the first asking and never freed.
  static const Loaded& of(Code code);
  template <class Spec>
  static const Loaded& of(const Spec& spec) {
    return of(code_of(spec));
  }

  const Code& code() const { return code_; }
  // Loads it if need be: within a capture from the pack or the cache, but nothing is compiled there.
  Function on(Ordinal device, int arch, Stream stream) const {
    const Function ready = functions_[static_cast<size_t>(device)].load(std::memory_order_acquire);
    return ready ? ready : load(device, arch, stream);
  }

 private:
  explicit Loaded(Code code) : code_(std::move(code)) {}
  Function load(Ordinal device, int arch, Stream stream) const;

  Code code_;
  mutable std::array<std::atomic<Function>, most_devices> functions_ = {};
};

}  // namespace tessera::cuda
