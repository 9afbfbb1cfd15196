#include "cuda/tensor_map.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "rules/dtype.h"

namespace tessera::cuda {
namespace {

using core::Operand;
using core::Problem;

constexpr int64_t most_extent = (int64_t{1} << 31) - 1;  // coordinates are 32 bits
constexpr int64_t least_too_far = int64_t{1} << 40;      // bytes
constexpr int order[] = {1, 2, 0};                       // an operand's dimensions after dim, in a map's order
constexpr int grid_order[] = {2, 1, 0};                  // and after keys

bool repeats(const Operand& o, int d) {
  return o.extent[d] <= 1 || o.stride[d] == 0;
}
std::string refuse_steps(const Operand& o, const char* text, int d) {
  if (o.extent[d] > most_extent)
    return fmt::format("{}.extent[{}] is {}; the copy engine counts to {}", text, d, o.extent[d], most_extent);
  if (o.extent[d] > 1 && o.stride[d] >= least_too_far / core::dtype_bytes(o.dtype))
    return fmt::format("{}.stride[{}] is {}; the copy engine steps less than 2^40 bytes", text, d, o.stride[d]);
  return "";
}

struct Shape {  // of a map, in its order; strides in bytes of all dimensions but the first
  int type, swizzle;
  std::array<uint64_t, 4> extents;
  std::array<uint64_t, 3> strides;
  std::array<uint32_t, 4> box;
};
rules::TensorMap encode(const Driver& driver, const Shape& s, void* data, const char* text) {
  rules::TensorMap map = {};
  const std::array<uint32_t, 4> steps = {1, 1, 1, 1};
  const Result result =
      driver.cuTensorMapEncodeTiled(&map, s.type, 4, data, s.extents.data(), s.strides.data(), s.box.data(),
                                    steps.data(), map_no_interleave, s.swizzle, map_promote_256, map_fill_zeros);
  if (result != 0)
    require_ok(driver, result,
               fmt::format("making a tensor map of {}, extents {} and strides {} in bytes", text,
                           fmt::join(s.extents, " "), fmt::join(s.strides, " "))
                   .c_str());
  return map;
}

}  // namespace

std::string refuse_map(const Problem& p, int name) {
  const Operand& o = core::operand(p, name);
  const char* const text = core::operand_row(name).text;
  for (const int d : order) {
    if (std::string why = refuse_steps(o, text, d); !why.empty()) return why;
    if (o.extent[d] > 1 && o.stride[d] == 0)
      return fmt::format("{}.stride[{}] is 0; the copy engine repeats no rows", text, d);
  }
  return "";
}

std::string refuse_grid(const Problem& p, int name) {
  if (!core::has(p, name)) return "";
  const Operand& o = core::operand(p, name);
  const char* const text = core::operand_row(name).text;
  if (name == TESSERA_BIAS && o.dtype != core::data_dtype(p))
    return fmt::format("bias is {}, it reads q's dtype", rules::dtype_rows[o.dtype].text);
  if (o.extent[3] != p.len_k || (o.extent[3] > 1 && o.stride[3] != 1))
    return fmt::format("{} has {} keys of stride {}; it reads all keys one after the other", text, o.extent[3],
                       o.stride[3]);
  for (const int d : grid_order)
    if (std::string why = refuse_steps(o, text, d); !why.empty()) return why;
  return "";
}

rules::TensorMap tensor_map(const Driver& driver, const Problem& p, const core::Bindings& bound, int name, int rows) {
  const Operand& o = core::operand(p, name);
  if (core::elements(o) == 0) return {};
  const int64_t bytes = core::dtype_bytes(o.dtype);
  Shape s = {o.dtype == TESSERA_BF16 ? map_bf16 : map_f16,
             map_swizzle_128,
             {static_cast<uint64_t>(o.extent[3])},
             {},
             {64, static_cast<uint32_t>(rows), 1, 1}};
  // A dimension of extent 1 may have any stride, also one that a map cannot have.
  const int64_t any_stride = (o.extent[3] * bytes + 15) / 16 * 16;
  for (size_t n = 0; n < 3; ++n) {
    const int d = order[n];
    s.extents[n + 1] = static_cast<uint64_t>(o.extent[d]);
    s.strides[n] = static_cast<uint64_t>(o.extent[d] > 1 ? o.stride[d] * bytes : any_stride);
  }
  return encode(driver, s, bound.data[name], core::operand_row(name).text);
}

rules::GridMap grid_map(const Driver& driver, const Problem& p, const core::Bindings& bound, int name, int tile_keys) {
  if (!core::has(p, name)) return {};
  const Operand& o = core::operand(p, name);
  if (core::elements(o) == 0) return {};
  const int bytes = static_cast<int>(core::dtype_bytes(o.dtype));
  const auto once = [&](int d) { return repeats(o, d) ? 0 : 1; };
  rules::GridMap grid = {{}, once(2), once(1), once(0), 0};
  const int rows = grid.query ? 64 : 1, keys = std::min(tile_keys, 128 / bytes);
  grid.bytes = rows * tile_keys * bytes;
  Shape s = {bytes == 1                ? map_u8
             : o.dtype == TESSERA_BF16 ? map_bf16
                                       : map_f16,
             keys * bytes == 128 ? map_swizzle_128 : map_swizzle_64,
             {static_cast<uint64_t>(o.extent[3])},
             {},
             {static_cast<uint32_t>(keys), static_cast<uint32_t>(rows), 1, 1}};
  const int64_t any_stride = (o.extent[3] * bytes + 15) / 16 * 16;
  for (size_t n = 0; n < 3; ++n) {
    const int d = grid_order[n];
    s.extents[n + 1] = repeats(o, d) ? 1 : static_cast<uint64_t>(o.extent[d]);
    s.strides[n] = static_cast<uint64_t>(repeats(o, d) ? any_stride : o.stride[d] * bytes);
  }
  grid.map = encode(driver, s, bound.data[name], core::operand_row(name).text);
  return grid;
}

}  // namespace tessera::cuda
