// 16-bit formats against an independent computation: what a pattern means from its bits, rounding by search in a table.
#include "rules/dtype.h"
#include "tessera/tessera.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace tessera::rules {
namespace {

struct Format {
  const char* text;
  int exponent_bits, fraction_bits;
  float (*decode)(Half);
  Half (*encode)(float);

  int infinity() const { return ((1 << exponent_bits) - 1) << fraction_bits; }

  // The number that a positive pattern means; infinity's pattern as the power of two that would stand there.
  double magnitude(int pattern) const {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = pattern >> fraction_bits, fraction = pattern & ((1 << fraction_bits) - 1);
    if (exponent == 0) return std::ldexp(fraction, 1 - bias - fraction_bits);
    return std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
  }
};
const Format formats[] = {
    {"f16", 5, 10, [](Half x) { return f16_to_float(x); }, [](float x) { return float_to_f16(x); }},
    {"bf16", 8, 7, [](Half x) { return bf16_to_float(x); }, [](float x) { return float_to_bf16(x); }}};

class Halves : public testing::TestWithParam<Format> {
 protected:
  void SetUp() override {
    for (int pattern = 0; pattern <= GetParam().infinity(); ++pattern) table_.push_back(GetParam().magnitude(pattern));
  }
  // To nearest, ties to even; at half a step past the largest number, infinity.
  int rounded(double magnitude) const {
    const auto above = std::lower_bound(table_.begin(), table_.end(), magnitude);
    if (above == table_.end()) return GetParam().infinity();
    const auto n = static_cast<int>(above - table_.begin());
    if (*above == magnitude) return n;
    const double up = *above - magnitude, down = magnitude - above[-1];
    if (up == down) return n % 2 == 0 ? n : n - 1;
    return up < down ? n : n - 1;
  }
  void expect_rounded(float x) {
    const int sign = std::signbit(x) ? 0x8000 : 0;
    const int got = GetParam().encode(x);
    if (got != (rounded(std::abs(static_cast<double>(x))) | sign) && ++failures_ < 10)
      ADD_FAILURE() << GetParam().text << " of " << x << " is " << std::hex << got;
  }
  std::vector<double> table_;
  int failures_ = 0;
};

TEST_P(Halves, EveryPatternMeansItsNumber) {
  const Format& f = GetParam();
  for (int pattern = 0; pattern < 0x10000; ++pattern) {
    const float got = f.decode(static_cast<Half>(pattern));
    const int magnitude = pattern & 0x7FFF;
    EXPECT_EQ(std::signbit(got), (pattern & 0x8000) != 0);
    if (magnitude > f.infinity()) {
      EXPECT_TRUE(std::isnan(got)) << std::hex << pattern;
      EXPECT_TRUE(std::isnan(f.decode(f.encode(got)))) << std::hex << pattern;
    } else {
      const double want = magnitude == f.infinity() ? INFINITY : f.magnitude(magnitude);
      EXPECT_EQ(std::abs(static_cast<double>(got)), want) << std::hex << pattern;
      EXPECT_EQ(f.encode(got), pattern) << "there and back";
    }
  }
}

TEST_P(Halves, RoundsToNearestWithTiesToEven) {
  for (size_t n = 1; n < table_.size(); ++n) {
    const auto middle = static_cast<float>(0.5 * table_[n - 1] + 0.5 * table_[n]);  // exact in float32
    for (const float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY)}) {
      expect_rounded(x);
      expect_rounded(-x);
    }
  }
}

TEST_P(Halves, RoundsAnyFloat) {
  std::mt19937 random(1);
  for (int n = 0; n < 2000000; ++n) {
    const auto bits = static_cast<Word>(random());
    const float x = float_of_bits(bits);
    if (!std::isnan(x)) expect_rounded(x);
  }
}

TEST_P(Halves, Ends) {
  const Format& f = GetParam();
  const float largest = f.decode(static_cast<Half>(f.infinity() - 1));
  EXPECT_EQ(f.encode(INFINITY), f.infinity());
  EXPECT_EQ(f.encode(-INFINITY), f.infinity() | 0x8000);
  EXPECT_EQ(f.encode(std::numeric_limits<float>::max()), f.infinity());
  EXPECT_EQ(f.encode(largest), f.infinity() - 1);
  EXPECT_EQ(f.encode(0.0f), 0);
  EXPECT_EQ(f.encode(-0.0f), 0x8000);
  // A NaN whose payload lies only in the bits that are cut off stays a NaN.
  EXPECT_TRUE(std::isnan(f.decode(f.encode(float_of_bits(0x7F800001u)))));
  EXPECT_TRUE(std::isnan(f.decode(f.encode(float_of_bits(0xFFFFFFFFu)))));
}

INSTANTIATE_TEST_SUITE_P(Formats, Halves, testing::ValuesIn(formats), [](const auto& p) { return p.param.text; });

TEST(Dtype, RowsStandAtTheirNames) {
  EXPECT_STREQ(dtype_rows[TESSERA_F64].text, "f64");
  EXPECT_STREQ(dtype_rows[TESSERA_F16].text, "f16");
  EXPECT_STREQ(dtype_rows[TESSERA_BOOL].text, "bool");
  EXPECT_EQ(dtype_rows[TESSERA_BOOL].bytes, 1);
}

static_assert(f16_to_float(float_to_f16(0.333251953125f)) == 0.333251953125f);

}  // namespace
}  // namespace tessera::rules
