#include <gtest/gtest.h>

#include "reference/view.h"
#include "rules/dtype.h"

namespace tessera::reference {
namespace {

constexpr uint16_t infinity_bits(int32_t dtype) {
  return dtype == TESSERA_BF16 ? 0x7F80 : 0x7C00;
}
double value(int32_t dtype, int bits) {
  return decode16(format(dtype), static_cast<uint16_t>(bits));
}
int bits(int32_t dtype, double x) {
  return encode16(format(dtype), x);
}

class Dtype : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(, Dtype, testing::Values(TESSERA_BF16, TESSERA_F16),
                         [](const auto& i) { return tessera_dtype(i.param) == TESSERA_BF16 ? "bf16" : "f16"; });

TEST_P(Dtype, EveryPatternReturns) {
  const int32_t dtype = GetParam();
  for (int b = 0; b < 0x10000; ++b) {
    const double x = value(dtype, b);
    if (std::isnan(x)) EXPECT_TRUE(std::isnan(value(dtype, bits(dtype, x))));
    else EXPECT_EQ(bits(dtype, x), b);
    EXPECT_EQ(std::isnan(x), (b & 0x7FFF) > infinity_bits(dtype));
  }
}

TEST_P(Dtype, EveryPatternIsTheEnginesToo) {
  for (int b = 0; b < 0x10000; ++b) {
    const auto half = static_cast<rules::Half>(b);
    const float theirs = GetParam() == TESSERA_BF16 ? rules::bf16_to_float(half) : rules::f16_to_float(half);
    const double x = value(GetParam(), b);
    if (!std::isnan(x)) EXPECT_EQ(x, static_cast<double>(theirs)) << b;
    else EXPECT_TRUE(std::isnan(theirs)) << b;
  }
}

// Between every pattern and the next: just below the middle, the middle (ties to even), just above it. The neighbours
// are one ulp of float64 from the middle, so a step through float32 would take them for ties.
TEST_P(Dtype, RoundsOnceToNearestEven) {
  const int32_t dtype = GetParam();
  for (int b = 0; b < infinity_bits(dtype); ++b) {
    const double low = value(dtype, b),
                 high = b + 1 < infinity_bits(dtype) ? value(dtype, b + 1) : low + ulp(dtype, low);
    const double middle = (low + high) / 2;
    EXPECT_EQ(bits(dtype, std::nextafter(middle, 0)), b);
    EXPECT_EQ(bits(dtype, middle), b + (b & 1));
    EXPECT_EQ(bits(dtype, std::nextafter(middle, infinity)), b + 1);
    EXPECT_EQ(bits(dtype, -middle), 0x8000 | (b + (b & 1)));
  }
}

TEST_P(Dtype, Extremes) {
  const int32_t dtype = GetParam();
  const int inf = infinity_bits(dtype);
  EXPECT_EQ(bits(dtype, infinity), inf);
  EXPECT_EQ(bits(dtype, -1e308), 0x8000 | inf);
  EXPECT_EQ(bits(dtype, 5e-324), 0);
  EXPECT_EQ(bits(dtype, -0.0), 0x8000);
  EXPECT_EQ(ulp(dtype, 1), dtype == TESSERA_BF16 ? 0x1p-7 : 0x1p-10);
  EXPECT_EQ(ulp(dtype, 0), value(dtype, 1));
}

TEST(Ulp, Wide) {
  EXPECT_EQ(ulp(TESSERA_F32, 1.5), 0x1p-23);
  EXPECT_EQ(ulp(TESSERA_F32, 0), 0x1p-149);
  EXPECT_EQ(ulp(TESSERA_F64, -4), 0x1p-50);
}

}  // namespace
}  // namespace tessera::reference
