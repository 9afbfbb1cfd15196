#include <gtest/gtest.h>

#include "reference/view.h"
#include "rules/dtype.h"

namespace tessera::reference {
namespace {

constexpr uint16_t infinity_bits(int32_t dtype) {
  return dtype == TESSERA_BF16 ? 0x7F80 : 0x7C00;
}
double value(int32_t dtype, int bits) {
  return decode(format(dtype), bits);
}
int bits(int32_t dtype, double x) {
  return encode(format(dtype), x);
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

TEST(E4m3, EveryPatternByItsDefinition) {
  for (int b = 0; b < 0x100; ++b) {
    const double x = value(TESSERA_E4M3, b);
    if ((b & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(x)) << b;
      EXPECT_EQ(bits(TESSERA_E4M3, x) & 0x7F, 0x7F);
      EXPECT_TRUE(std::isnan(rules::e4m3_to_float(static_cast<rules::Quarter>(b))));
      continue;
    }
    const int exponent = (b >> 3) & 15, fraction = b & 7;
    const double size = exponent ? (1 + fraction / 8.0) * std::pow(2, exponent - 7) : fraction / 8.0 * std::pow(2, -6);
    EXPECT_EQ(x, b & 0x80 ? -size : size) << b;
    EXPECT_EQ(bits(TESSERA_E4M3, x), b);
    EXPECT_EQ(x, static_cast<double>(rules::e4m3_to_float(static_cast<rules::Quarter>(b)))) << b;
  }
}
TEST(E4m3, RoundsOnceToNearestEven) {
  for (int b = 0; b < 0x7E; ++b) {
    const double middle = (value(TESSERA_E4M3, b) + value(TESSERA_E4M3, b + 1)) / 2;
    EXPECT_EQ(bits(TESSERA_E4M3, std::nextafter(middle, 0)), b);
    EXPECT_EQ(bits(TESSERA_E4M3, middle), b + (b & 1));
    EXPECT_EQ(bits(TESSERA_E4M3, std::nextafter(middle, infinity)), b + 1);
    EXPECT_EQ(bits(TESSERA_E4M3, -middle), 0x80 | (b + (b & 1)));
    for (const double x : {middle, std::nextafter(static_cast<float>(middle), 0.0F) + 0.0}) {
      const rules::Quarter theirs = rules::float_to_e4m3(static_cast<float>(x));
      EXPECT_EQ(bits(TESSERA_E4M3, x), theirs) << x;
    }
  }
}
TEST(E4m3, SaturatesAndReturnsThroughMemory) {
  for (const double x : {448.0, 449.0, 464.0, 480.0, 511.0, 512.0, 1e6, 1e300, infinity}) {
    EXPECT_EQ(bits(TESSERA_E4M3, x), 0x7E) << x;
    EXPECT_EQ(bits(TESSERA_E4M3, -x), 0xFE) << x;
    EXPECT_EQ(rounded(TESSERA_E4M3, x), 448);
  }
  EXPECT_EQ(bits(TESSERA_E4M3, 0), 0);
  EXPECT_EQ(bits(TESSERA_E4M3, -0.0), 0x80);
  EXPECT_EQ(bits(TESSERA_E4M3, 0x1p-10), 0);  // half of the smallest
  EXPECT_EQ(ulp(TESSERA_E4M3, 448), 32);
  EXPECT_EQ(ulp(TESSERA_E4M3, 1), 0.125);
  EXPECT_EQ(ulp(TESSERA_E4M3, 0), 0x1p-9);
  std::byte stored[2] = {std::byte{1}, std::byte{1}};
  store(TESSERA_E4M3, stored, -3.3);
  EXPECT_EQ(load(TESSERA_E4M3, stored), -3.25);
  EXPECT_EQ(stored[1], std::byte{1});  // one byte is written
}

TEST(Ulp, Wide) {
  EXPECT_EQ(ulp(TESSERA_F32, 1.5), 0x1p-23);
  EXPECT_EQ(ulp(TESSERA_F32, 0), 0x1p-149);
  EXPECT_EQ(ulp(TESSERA_F64, -4), 0x1p-50);
}

}  // namespace
}  // namespace tessera::reference
