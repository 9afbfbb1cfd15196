// How one task of the general kernels is cut into blocks that the device's shared memory holds. Pure arithmetic.
#pragma once
#include <optional>
#include <vector>

#include "core/plan.h"
#include "rules/params.h"
#include "rules/spec.h"

namespace tessera::cuda {

struct Shape {
  rules::GeneralSpec spec;
  rules::Cut cut;
  int warps, shared_bytes;
  int rows() const { return 16 * warps; }
};

// What there is to do. A result of few numbers sums so much that cancels that tensor cores' digits would show: it is
// computed in float32.
struct Job {
  rules::Task task;
  rules::Product product;
  bool sums_slopes = false;
};
std::vector<Job> jobs_of(const core::Problem& p, const core::Device& device);

// What multiplies: the problem's dtype decides, and whether float32 may be rounded to TF32.
rules::Product product_of(const core::Problem& p, const core::Device& device);

// The first of what ships that fits; nothing: none does. `least_bytes`, if given, becomes what the smallest takes.
std::optional<Shape> shape_of(const core::Problem& p, const core::Device& device, const Job& job,
                              int64_t* least_bytes = nullptr);

}  // namespace tessera::cuda
