// The GPU as a caller uses it: memory, copies, time. What the library itself does with it is the library's.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "case.h"

namespace tessera::tools {

inline bool is_gpu(const std::string& device) {
  return device == "cuda" || device.starts_with("cuda:");
}

// A case's operands in the memory of a GPU, each between guards and at an address no better aligned than promised.
class GpuCase {
 public:
  // For a run of `problem`, the case's own or the forward of it. Makes the device's primary context current; throws
  // Error.
  GpuCase(const Case& c, const tessera_problem& problem, const std::string& device);
  ~GpuCase();
  GpuCase(const GpuCase&) = delete;
  GpuCase& operator=(const GpuCase&) = delete;

  void upload();
  // Results, and what a run appends to, back to the case. Throws if a guard was written to.
  void download();
  void wait();
  // Seconds that the device takes for what `work` queues on the default stream.
  template <class Work>
  double time(Work&& work) {
    mark(0);
    work();
    mark(1);
    return between();
  }
  const tessera_bindings& bindings() const { return bindings_; }
  std::byte* workspace(int64_t bytes);

 private:
  void mark(size_t event);
  double between();
  unsigned long long allocate(size_t bytes);

  const Case& case_;
  const tessera_problem problem_;
  tessera_bindings bindings_;
  std::vector<unsigned long long> memory_;
  std::array<void*, 2> events_ = {};
};

}  // namespace tessera::tools
