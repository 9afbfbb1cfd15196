#include "cuda/tensor_map.h"

#include <array>

#include "core/error.h"

namespace tessera::cuda {
namespace {

using core::Operand;
using core::Problem;

constexpr int64_t most_extent = (int64_t{1} << 31) - 1;  // coordinates are 32 bits
constexpr int64_t least_too_far = int64_t{1} << 40;      // bytes
constexpr int order[] = {1, 2, 0};                       // an operand's dimensions after dim, in a map's order

}  // namespace

std::string refuse_map(const Problem& p, int name) {
  const Operand& o = core::operand(p, name);
  const char* const text = core::operand_row(name).text;
  for (const int d : order) {
    if (o.extent[d] > most_extent)
      return fmt::format("{}.extent[{}] is {}; the copy engine counts to {}", text, d, o.extent[d], most_extent);
    if (o.extent[d] <= 1) continue;
    if (o.stride[d] == 0) return fmt::format("{}.stride[{}] is 0; the copy engine repeats no rows", text, d);
    if (o.stride[d] >= least_too_far / core::dtype_bytes(o.dtype))
      return fmt::format("{}.stride[{}] is {}; the copy engine steps less than 2^40 bytes", text, d, o.stride[d]);
  }
  return "";
}

rules::TensorMap tensor_map(const Driver& driver, const Problem& p, const core::Bindings& bound, int name, int rows) {
  const Operand& o = core::operand(p, name);
  rules::TensorMap map = {};
  if (core::elements(o) == 0) return map;
  const int64_t bytes = core::dtype_bytes(o.dtype);
  // A dimension of extent 1 may have any stride, also one that a map cannot have.
  const int64_t any_stride = (o.extent[3] * bytes + 15) / 16 * 16;
  std::array<uint64_t, 4> extents = {static_cast<uint64_t>(o.extent[3])};
  std::array<uint64_t, 3> strides = {};
  for (size_t n = 0; n < 3; ++n) {
    const int d = order[n];
    extents[n + 1] = static_cast<uint64_t>(o.extent[d]);
    strides[n] = static_cast<uint64_t>(o.extent[d] > 1 ? o.stride[d] * bytes : any_stride);
  }
  const std::array<uint32_t, 4> box = {64, static_cast<uint32_t>(rows), 1, 1}, steps = {1, 1, 1, 1};
  const Result result = driver.cuTensorMapEncodeTiled(
      &map, o.dtype == TESSERA_BF16 ? map_bf16 : map_f16, 4, bound.data[name], extents.data(), strides.data(),
      box.data(), steps.data(), map_no_interleave, map_swizzle_128, map_promote_256, map_fill_zeros);
  if (result != 0)
    require_ok(driver, result,
               fmt::format("making a tensor map of {}, extents {} and strides {} in bytes",
                           core::operand_row(name).text, fmt::join(extents, " "), fmt::join(strides, " "))
                   .c_str());
  return map;
}

}  // namespace tessera::cuda
