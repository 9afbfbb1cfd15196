// 64-bit sizes that cannot wrap: sizes come from problem lines and from files that may lie.
#pragma once

#include <cstdint>
#include <optional>

namespace tessera::tools {

inline std::optional<int64_t> checked_add(std::optional<int64_t> a, std::optional<int64_t> b) {
  int64_t sum;
  if (!a || !b || __builtin_add_overflow(*a, *b, &sum)) return {};
  return sum;
}

inline std::optional<int64_t> checked_mul(std::optional<int64_t> a, std::optional<int64_t> b) {
  int64_t product;
  if (!a || !b || __builtin_mul_overflow(*a, *b, &product)) return {};
  return product;
}

}  // namespace tessera::tools
