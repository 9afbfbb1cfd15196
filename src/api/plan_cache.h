// Plans that were made before. A plan is a pure function of (problem, device, hints), so an equal question has an equal
// answer, which is shared: to plan again what was planned costs under a microsecond.
#pragma once
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/plan.h"

namespace tessera::api {

struct MadePlan {
  core::Plan plan;
  std::vector<std::string> steps;  // in words
};

class PlanCache {
 public:
  // `make()` is called, without the lock, for what is not there.
  template <class Make>
  std::shared_ptr<const MadePlan> get(const core::Problem& p, const core::Device& device, const core::Hints& hints,
                                      Make&& make) {
    Entry& entry = entries_[hash(p, device, hints) % entries_.size()];
    {
      const std::lock_guard lock(mutex_);
      if (entry.made && entry.is(p, device, hints)) return entry.made;
    }
    std::shared_ptr<const MadePlan> made = make();
    const std::lock_guard lock(mutex_);
    entry = {p, device, hints, hints.kernels ? hints.kernels : "", made};
    return made;
  }

 private:
  struct Entry {
    core::Problem problem;
    core::Device device;
    core::Hints hints;
    std::string kernels;
    std::shared_ptr<const MadePlan> made;

    bool is(const core::Problem& p, const core::Device& d, const core::Hints& h) const {
      if (std::memcmp(&problem, &p, sizeof p) != 0 || std::memcmp(&device, &d, sizeof d) != 0) return false;
      if (!hints.kernels != !h.kernels || (h.kernels && kernels != h.kernels)) return false;
      core::Hints same = h;
      same.kernels = hints.kernels;
      return std::memcmp(&hints, &same, sizeof same) == 0;
    }
  };

  // Of the sizes, the wishes and the operands that are there: multiply and rotate, eight bytes at a time.
  static uint64_t hash(const core::Problem& p, const core::Device& device, const core::Hints& hints) {
    uint64_t h = static_cast<uint64_t>(device.kind + 31 * device.sm_arch + 961 * device.threads);
    const auto mix = [&h](const void* from, size_t bytes) {
      for (size_t n = 0; n + 8 <= bytes; n += 8) {
        uint64_t word;
        std::memcpy(&word, static_cast<const char*>(from) + n, 8);
        h = (h ^ word) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
      }
    };
    mix(&p, offsetof(core::Problem, operand));
    const int64_t wishes[] = {hints.threads, hints.tile_rows, hints.tile_keys, hints.workspace_limit};
    mix(wishes, sizeof wishes);
    for (int name = 0; name < TESSERA_NAMES; ++name)
      if (core::has(p, name)) mix(&p.operand[name], sizeof p.operand[name]);
    return h;
  }

  std::mutex mutex_;
  std::array<Entry, 256> entries_ = {};
};

}  // namespace tessera::api
