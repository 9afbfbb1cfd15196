#include "core/number.h"

#include <gtest/gtest.h>

namespace tessera::core {
namespace {

rules::Half rounded(double x, int32_t dtype) {
  rules::Half half = 0;
  write(reinterpret_cast<char*>(&half), dtype, x);
  return half;
}

// By way of float32, 1 + 2^-8 + 2^-40 would become a tie and then 1.
TEST(Number, SixteenBitsAreRoundedOnce) {
  EXPECT_EQ(rounded(1 + 0x1p-8 + 0x1p-40, TESSERA_BF16), rules::float_to_bf16(1 + 0x1p-7f));
  EXPECT_EQ(rounded(1 + 0x1p-8 - 0x1p-40, TESSERA_BF16), rules::float_to_bf16(1));
  EXPECT_EQ(rounded(-1 - 0x1p-11 - 0x1p-40, TESSERA_F16), rules::float_to_f16(-1 - 0x1p-10f));
  EXPECT_EQ(rounded(0x1p-25 + 0x1p-60, TESSERA_F16), 1);
  EXPECT_EQ(rounded(1e300, TESSERA_F16), 0x7C00);
  EXPECT_EQ(rounded(-1e300, TESSERA_BF16), 0xFF80);
}

TEST(Number, FiniteStaysFinite) {
  const double large = -1e300;
  EXPECT_EQ(read<float>(reinterpret_cast<const char*>(&large), TESSERA_F64), -__FLT_MAX__);
  const double none = -__builtin_huge_val();
  EXPECT_EQ(read<float>(reinterpret_cast<const char*>(&none), TESSERA_F64), -__builtin_huge_valf());
}

}  // namespace
}  // namespace tessera::core
