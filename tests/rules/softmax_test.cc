#include "rules/softmax.h"

#include <gtest/gtest.h>

#include <cmath>

#include "rules/score.h"

namespace tessera::rules {
namespace {

constexpr double infinity = INFINITY;
double exponential(double x) {
  return std::exp(x);
}

TEST(Softmax, EmptyStatesWeighNothing) {
  EXPECT_EQ(reference_score(-infinity), 0);
  EXPECT_EQ(reference_score(-3.0), -3.0);
  EXPECT_EQ(weight(-infinity, -infinity, exponential), 0);
  EXPECT_EQ(weight(-infinity, 5.0, exponential), 0);
}

TEST(Softmax, EqualScoresWeighOneWithoutADifference) {
  EXPECT_EQ(weight(infinity, infinity, exponential), 1);
  EXPECT_EQ(weight(-5e5, -5e5, exponential), 1);
  EXPECT_EQ(weight(1.0, 2.0, exponential), std::exp(-1.0));
  EXPECT_TRUE(std::isnan(weight(std::nan(""), 1.0, exponential)));
}

TEST(Score, SoftcapAndItsSlope) {
  const double cap = 30, z = 12;
  const auto tangent = [](double x) { return std::tanh(x); };
  const Capped<double> got = softcapped(z, cap, 1 / cap, tangent);
  EXPECT_NEAR(got.value, cap * std::tanh(z / cap), 1e-14);
  EXPECT_NEAR(got.slope, 1 - std::pow(std::tanh(z / cap), 2), 1e-14);
  EXPECT_EQ(softcapped(1e300, cap, 1 / cap, tangent).value, cap);
}

}  // namespace
}  // namespace tessera::rules
