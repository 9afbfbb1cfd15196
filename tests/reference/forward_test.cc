// Forward of the oracle against answers worked out by hand. Ids in names (A03 ...) are those of the failure cases.
#include "case.h"

namespace tessera::reference {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// Row i of the mask of (batch 0, head 0) as "0110": all scores are 0 and v is the identity, so out shows the weights.
std::string kept(Case& c, int64_t i) {
  c.all(TESSERA_Q, 0);
  c.each_is(TESSERA_V, [](At at) { return at[1] == at[3]; });
  c.run();
  std::string row;
  for (int64_t j = 0; j < c.p.len_k; ++j) row += c.get(TESSERA_OUT, {0, i, 0, j}) > 0 ? '1' : '0';
  return row;
}
std::string kept(const std::string& line, int64_t i) {
  Case c(line);
  return kept(c, i);
}

TEST(Philox, KnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  constexpr uint32_t ones = 0xFFFFFFFF;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({ones, ones, ones, ones}, {ones, ones}), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Dropout, OneWordForEachOfFourPlaces) {
  // Rows 0 and 8, keys 0 and 8 share the zero counter: words 0 to 3 of the known answer, 0x66.. 0xe1.. 0xbc.. 0x9b..
  EXPECT_FALSE(dropout_keeps(0.5, 0, 0, 0, 0, 0));
  EXPECT_TRUE(dropout_keeps(0.5, 0, 0, 0, 0, 8));
  EXPECT_TRUE(dropout_keeps(0.7, 0, 0, 0, 8, 0));   // 0xbc / 256 = 0.734
  EXPECT_FALSE(dropout_keeps(0.7, 0, 0, 0, 8, 8));  // 0x9b / 256 = 0.605
  EXPECT_TRUE(dropout_keeps(0.6, 0, 0, 0, 8, 8));
}
TEST(Dropout, KeyAndCounter) {
  const auto expected = philox({2 * 8 + 5, 1 * 8 + 3, 77, 0x9ABCDEF0}, {0x89ABCDEF, 0x01234567 ^ 0x12345678});
  const uint32_t word = expected[1];  // i = 37: bit 3 is 0; j = 27: bit 3 is 1
  const double at = static_cast<double>(word) * 0x1p-32;
  EXPECT_TRUE(dropout_keeps(at, 0x0123456789ABCDEF, 0x123456789ABCDEF0, 77, 37, 27));
  EXPECT_FALSE(dropout_keeps(at + 0x1p-32, 0x0123456789ABCDEF, 0x123456789ABCDEF0, 77, 37, 27));
}
TEST(Dropout, WeightsAreKeptOrGoneAndLseIsUntouched) {
  Case c("forward f64 q40 k40 d1/40 dropout=0.25@seed7"), plain("forward f64 q40 k40 d1/40");
  for (Case* each : {&c, &plain}) each->each_is(TESSERA_V, [](At at) { return at[1] == at[3]; }), each->run();
  int gone = 0;
  for (int64_t i = 0; i < 40; ++i)
    for (int64_t j = 0; j < 40; ++j) {
      const double x = c.get(TESSERA_OUT, {0, i, 0, j}), full = plain.get(TESSERA_OUT, {0, i, 0, j}) / 0.75;
      if (x == 0) ++gone;
      else EXPECT_NEAR(x, full, 1e-12);
    }
  EXPECT_NEAR(gone / 1600.0, 0.25, 0.04);
  EXPECT_EQ(c.values(TESSERA_LSE), plain.values(TESSERA_LSE));
}

TEST(Worked, TwoStepsForAnyShift) {
  const double scores[] = {1, 2, 3, 0}, v[4][2] = {{10, 0}, {0, 10}, {5, 5}, {9, 1}};
  for (const double shift : {0.0, 1000.0, -1000.0}) {
    Case c("forward f64 k4 d2 bias=1,1,1,k");
    c.all(TESSERA_Q, 0);
    c.each_is(TESSERA_BIAS, [&](At at) { return scores[at[3]] + shift; });
    c.each_is(TESSERA_V, [&](At at) { return v[at[1]][at[3]]; });
    c.run();
    EXPECT_NEAR(c.get(TESSERA_OUT, {0, 0, 0, 0}), 4.379542, 1e-6);
    EXPECT_NEAR(c.get(TESSERA_OUT, {0, 0, 0, 1}), 5.620458, 1e-6);
    EXPECT_NEAR(c.get(TESSERA_LSE, {0, 0, 0, 0}), shift + std::log(std::exp(1) + std::exp(2) + std::exp(3) + 1), 1e-9);
  }
}

TEST(Mask, Parts) {
  EXPECT_EQ(kept("forward f64 q2 k5 d1/5 mask=causal", 0), "11110");
  EXPECT_EQ(kept("forward f64 q2 k5 d1/5 mask=causal@top_left", 1), "11000");
  EXPECT_EQ(kept("forward f64 q2 k5 d1/5 mask=causal@at(1)", 1), "11100");
  EXPECT_EQ(kept("forward f64 q2 k5 d1/5 mask=causal@at(-1)", 0), "00000");
  EXPECT_EQ(kept("forward f64 b1 q2 k5 d1/5 mask=causal@at[2]", 0), "11100");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=window(1,2)", 2), "011110");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=window(-1,2)", 2), "000110");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=window(3,-2)", 4), "011000");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=window(-2,1)", 2), "000000");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=window(unbounded,0)", 2), "111000");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=window(0,unbounded)", 4), "000011");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=window(1,0)&first(2)", 4), "110110");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=causal&window(1,1)&first(3)", 1), "110000");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=chunk(4)", 5), "000011");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=chunk(4)&causal", 2), "111000");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=chunk(4)@at(-2)", 1), "000000");  // p = -1 is in chunk -1, not 0
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=chunk(4)@at(-2)", 2), "111100");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=prefix(3)", 0), "111000");
  EXPECT_EQ(kept("forward f64 q6 k6 d1/6 mask=prefix(3)", 4), "111110");
}
TEST(Mask, BoundsNeverWrap) {
  for (const char* most : {"9223372036854775807", "9000000000000000000"}) {
    const std::string n = most;
    EXPECT_EQ(kept("forward f64 q3 k3 d1/3 mask=window(" + n + "," + n + ")", 1), "111");
    EXPECT_EQ(kept("forward f64 q3 k3 d1/3 mask=window(-" + n + "," + n + ")", 1), "000");
    EXPECT_EQ(kept("forward f64 q3 k3 d1/3 mask=window(0,-" + n + ")", 1), "000");
    EXPECT_EQ(kept("forward f64 q3 k3 d1/3 mask=chunk(" + n + ")", 1), "111");
    EXPECT_EQ(kept("forward f64 q3 k3 d1/3 mask=prefix(" + n + ")", 1), "111");
    EXPECT_EQ(kept("forward f64 q3 k3 d1/3 mask=window(" + n + ",0)@at(2147483647)", 1), "111");
    EXPECT_EQ(kept("forward f64 q3 k3 d1/3 mask=window(" + n + ",-2147483647)@at(2147483647)", 1), "110");
  }
}
TEST(Mask, FarCorners) {
  EXPECT_EQ(kept("forward f64 q3 k3 d1/3 mask=causal@at(2147483647)", 1), "111");
  EXPECT_EQ(kept("forward f64 q3 k3 d1/3 mask=causal@at(-2147483648)", 1), "000");
  EXPECT_EQ(kept("forward f64 q3 k3 d1/3 mask=window(2147483647,0)@at(2147483647)", 1), "011");
}
TEST(Mask, Operands) {
  Case c("forward f64 b1 q2 k4 d1/4 mask=keep&exclude_keys&documents");
  c.all(TESSERA_KEEP, 1);
  c.set(TESSERA_KEEP, {0, 0, 1, 0}, 0);
  c.all(TESSERA_EXCLUDE_KEYS, 0);
  c.set(TESSERA_EXCLUDE_KEYS, {0, 3, 0, 0}, 1);
  c.all(TESSERA_DOCUMENTS_Q, 5);
  c.all(TESSERA_DOCUMENTS_K, 5);
  c.set(TESSERA_DOCUMENTS_K, {0, 1, 0, 0}, 6);
  EXPECT_EQ(kept(c, 0), "1010");
  EXPECT_EQ(kept(c, 1), "0010");
  c.all(TESSERA_DOCUMENTS_Q, -1);
  c.all(TESSERA_DOCUMENTS_K, -1);
  EXPECT_EQ(kept(c, 0), "0000");
}

TEST(Case, A03TopLeftAgainstBottomRight) {
  const auto rows = [](const std::string& mask) {
    Case c("forward f64 q2 k5 d8/1 " + mask);
    c.all(TESSERA_Q, 0);
    c.all(TESSERA_K, 0);
    c.each_is(TESSERA_V, [](At at) { return static_cast<double>(at[1]); });
    c.run();
    return c.values(TESSERA_OUT);
  };
  EXPECT_EQ(rows("mask=causal"), (std::vector<double>{1.5, 2}));
  EXPECT_EQ(rows("mask=causal@top_left"), (std::vector<double>{0, 0.5}));
  EXPECT_EQ(kept("forward f64 q1 k8 d8 mask=causal", 0), "11111111");
}
TEST(Case, A04WindowLeavesEmptyRows) {
  Case c("forward f64 q129 k32 d64 mask=window(32,64)");
  c.run();
  for (int64_t i = 0; i < 129; ++i) {
    const bool empty = i < 33;
    EXPECT_EQ(c.get(TESSERA_LSE, {0, i, 0, 0}) == -infinity, empty) << i;
    EXPECT_EQ(c.get(TESSERA_OUT, {0, i, 0, 0}) == 0, empty) << i;
  }
  EXPECT_EQ(kept("forward f64 q129 k32 d64/32 mask=window(32,64)", 33), std::string("1") + std::string(31, '0'));
  EXPECT_EQ(kept("forward f64 q129 k32 d64/32 mask=window(32,64)", 128), std::string(32, '1'));
}
TEST(Case, A06WindowIsInclusive) {
  const auto last = [](const std::string& mask) {
    Case c("forward f64 q6 k6 d1 " + mask);
    c.all(TESSERA_Q, 0);
    c.each_is(TESSERA_V, [](At at) { return static_cast<double>(at[1]); });
    c.run();
    return c.get(TESSERA_OUT, {0, 5, 0, 0});
  };
  EXPECT_DOUBLE_EQ(last("mask=causal&window(2,0)"), 4.0);
  EXPECT_DOUBLE_EQ(last("mask=causal&window(3,0)"), 3.5);
}
TEST(Case, A07WideWindowIsCausal) {
  const auto out = [](const std::string& mask) {
    Case c("forward f64 h2 q37 k37 d5 " + mask);
    c.run();
    return c.values(TESSERA_OUT);
  };
  const auto causal = out("mask=causal");
  for (const char* mask : {"mask=window(36,0)", "mask=window(37,0)", "mask=window(unbounded,0)"})
    EXPECT_EQ(out(mask), causal);
  EXPECT_NE(out("mask=window(35,0)"), causal);
}
TEST(Case, A09DecodeWindow) {
  const std::string row = kept("forward f64 q1 k256 d1/256 mask=window(128,0)", 0);
  EXPECT_EQ(row, std::string(127, '0') + std::string(129, '1'));
}
TEST(Case, A10MaskAfterSoftcap) {
  Case c("forward f64 q2 k2 d1 mask=causal softcap=1");
  c.all(TESSERA_Q, 0);
  c.all(TESSERA_K, 0);
  c.each_is(TESSERA_V, [](At at) { return at[1] ? 100.0 : 1.0; });
  c.run();
  EXPECT_EQ(c.values(TESSERA_OUT), (std::vector<double>{1, 50.5}));
}
TEST(Case, B05NoFiniteStandInForMinusInfinity) {
  Case c("forward f64 q2 k2 d1 scale=1 mask=keep");
  c.each_is(TESSERA_Q, [](At at) { return at[1] ? 0.0 : -20000.0; });
  c.each_is(TESSERA_K, [](At at) { return at[1] ? 0.0 : 1.0; });
  c.each_is(TESSERA_V, [](At at) { return at[1] ? 100.0 : 1.0; });
  c.each_is(TESSERA_KEEP, [](At at) { return at[3] == 0; });
  c.run();
  EXPECT_EQ(c.get(TESSERA_OUT, {0, 0, 0, 0}), 1);
  EXPECT_EQ(c.get(TESSERA_LSE, {0, 0, 0, 0}), -20000);
}
TEST(Case, B09ManyExcludedKeysFirst) {
  Case c("forward f64 q640 k640 d4 bias=1,1,q,k");
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V}) c.all(name, 1);
  c.each_is(TESSERA_BIAS, [](At at) { return at[3] <= at[2] && at[3] > at[2] - 10 ? 0 : -infinity; });
  c.run();
  for (const double x : c.values(TESSERA_OUT)) EXPECT_NEAR(x, 1, 1e-14);
}
TEST(Case, B10ScoresBeyondF16) {
  Case c("forward f16 k2 d128 max");
  c.all(TESSERA_Q, 256);
  c.each_is(TESSERA_K, [](At at) { return at[1] ? 255.5 : 256.0; });
  c.run();
  for (int64_t d = 0; d < 128; ++d) EXPECT_EQ(c.get(TESSERA_OUT, {0, 0, 0, d}), c.get(TESSERA_V, {0, 0, 0, d}));
  EXPECT_NEAR(c.get(TESSERA_MAX_SCORE, {0, 0, 0, 0}), 741455.2, 0.1);
}
TEST(Case, M05LargeSinkAndSinkAlone) {
  Case c("forward f64 k128 d1 sink");
  c.all(TESSERA_Q, 0);
  c.all(TESSERA_SINKS, 100);
  c.run();
  EXPECT_DOUBLE_EQ(c.get(TESSERA_LSE, {0, 0, 0, 0}), 100);
  EXPECT_NEAR(c.get(TESSERA_OUT, {0, 0, 0, 0}), 0, 1e-40);
  Case none("forward f64 k0 d1 sink");
  none.all(TESSERA_SINKS, 0.5);
  none.run();
  EXPECT_EQ(none.get(TESSERA_LSE, {0, 0, 0, 0}), 0.5);
  EXPECT_EQ(none.get(TESSERA_OUT, {0, 0, 0, 0}), 0);
}
TEST(Case, G14LengthAlwaysBounds) {
  for (const int64_t length : {16, 64, 255, 257}) {
    Case c(fmt::format("forward f64 k512 d4 seqused=k[{}]", length));
    c.all(TESSERA_Q, 0);
    c.each_is(TESSERA_V, [&](At at) { return at[1] < length ? 1 : nan; });
    c.run();
    EXPECT_NEAR(c.get(TESSERA_OUT, {0, 0, 0, 0}), 1, 1e-14);
    EXPECT_NEAR(c.get(TESSERA_LSE, {0, 0, 0, 0}), std::log(static_cast<double>(length)), 1e-14);
  }
}

TEST(Special, OneVeryLowKey) {
  Case c("forward f64 d1 bias=1,1,1,1");
  c.all(TESSERA_BIAS, -5e5);
  c.run();
  EXPECT_EQ(c.values(TESSERA_OUT), c.values(TESSERA_V));
}
TEST(Special, FiniteBiasIsNoMask) {
  Case c("forward f64 k2 d1 bias=1,1,1,k");
  c.all(TESSERA_BIAS, -3e38);
  c.all(TESSERA_Q, 0);
  c.run();
  EXPECT_DOUBLE_EQ(c.get(TESSERA_OUT, {0, 0, 0, 0}),
                   (c.get(TESSERA_V, {0, 0, 0, 0}) + c.get(TESSERA_V, {0, 1, 0, 0})) / 2);
}
TEST(Special, NonFiniteAtExcludedKeysStaysOut) {
  for (const double bad : {nan, infinity, -infinity}) {
    Case c("forward f64 q3 k3 d2 mask=causal"), clean("forward f64 q3 k3 d2 mask=causal");
    for (int64_t d = 0; d < 2; ++d) c.set(TESSERA_K, {0, 2, 0, d}, bad), c.set(TESSERA_V, {0, 2, 0, d}, bad);
    c.run();
    clean.run();
    for (int64_t i = 0; i < 2; ++i)
      for (int64_t d = 0; d < 2; ++d) EXPECT_EQ(c.get(TESSERA_OUT, {0, i, 0, d}), clean.get(TESSERA_OUT, {0, i, 0, d}));
    EXPECT_FALSE(std::isfinite(c.get(TESSERA_OUT, {0, 2, 0, 0})));
  }
}
TEST(Special, InfiniteScores) {
  const auto row = [](double first, double second, const char* options = "") {
    Case c(fmt::format("forward f64 k2 d1 scale=1 max {}", options));
    c.all(TESSERA_Q, 1);
    c.set(TESSERA_K, {0, 0, 0, 0}, first);
    c.set(TESSERA_K, {0, 1, 0, 0}, second);
    if (core::has(c.p, TESSERA_SINKS)) c.all(TESSERA_SINKS, infinity);
    c.all(TESSERA_V, 3);
    c.run();
    return std::array{c.get(TESSERA_OUT, {0, 0, 0, 0}), c.get(TESSERA_LSE, {0, 0, 0, 0}),
                      c.get(TESSERA_MAX_SCORE, {0, 0, 0, 0})};
  };
  using Result = std::array<double, 3>;
  EXPECT_EQ(row(-infinity, 1), (Result{3, 1, 1}));
  EXPECT_EQ(row(-infinity, -infinity), (Result{0, -infinity, -infinity}));
  EXPECT_EQ(row(0, 1, "sink"), (Result{0, infinity, 1}));
  EXPECT_TRUE(std::isnan(row(infinity, 1)[0]) && std::isnan(row(infinity, 1)[1]));
  EXPECT_TRUE(std::isnan(row(nan, 1)[0]) && std::isnan(row(nan, 1)[1]) && std::isnan(row(nan, 1)[2]));
  EXPECT_TRUE(std::isnan(row(infinity, 1, "sink")[1]));
}

TEST(Layout, QueryHeadsReadConsecutiveGroups) {
  Case c("forward f64 h6/2 d1");
  c.each_is(TESSERA_V, [](At at) { return static_cast<double>(at[2]); });
  c.run();
  EXPECT_EQ(c.values(TESSERA_OUT), (std::vector<double>{0, 0, 0, 1, 1, 1}));
}
TEST(Layout, StridesDoNotChangeTheAnswer) {
  Case plain("forward f64 b2 h4/2 q3 k5 d3/2 mask=causal"), joint("forward f64 b2 h4/2 q5 k5 d3/2 layout=qkv");
  Case heads("forward f64 b2 h4/2 q3 k5 d3/2 mask=causal layout=bhsd");
  Case wide("forward f64 b2 h4/2 q3 k5 d3/2 mask=causal strides=k[100,20,10,3]out[60,20,5,2]");
  plain.run();
  for (Case* c : {&heads, &wide}) {
    c->run();
    EXPECT_EQ(c->values(TESSERA_OUT), plain.values(TESSERA_OUT));
  }
  Case dense("forward f64 b2 h4/2 q5 k5 d3/2");
  for (Case* c : {&joint, &dense}) c->run();
  EXPECT_EQ(joint.values(TESSERA_OUT), dense.values(TESSERA_OUT));
}
TEST(Layout, ExpandedKeysAreReadAgain) {
  Case c("forward f64 h2 q2 k3 d2 strides=k[0,2,0,1]v[0,2,0,1]"), plain("forward f64 h2/1 q2 k3 d2");
  c.run();
  plain.each_is(TESSERA_K, [&](At at) { return c.get(TESSERA_K, at); });
  plain.each_is(TESSERA_V, [&](At at) { return c.get(TESSERA_V, at); });
  plain.run();
  EXPECT_EQ(c.values(TESSERA_OUT), plain.values(TESSERA_OUT));
}
TEST(Layout, PackedSequencesAreTheSeparateOnes) {
  Case packed("forward f64 h2 d3 varlen=q[2,0,3]k[4,1,0] rows=q7k6 seqused=k[3,1,0] mask=causal max");
  packed.run();
  Case first("forward f64 h2 q2 k3 d3 mask=causal");
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V})
    first.each_is(name, [&](At at) { return packed.get(name, at); });
  first.run();
  first.each(TESSERA_OUT, [&](At at) { EXPECT_EQ(packed.get(TESSERA_OUT, at), first.get(TESSERA_OUT, at)); });
  for (int64_t i = 2; i < 7; ++i) {  // rows without keys, then rows of no sequence
    EXPECT_EQ(packed.get(TESSERA_OUT, {0, i, 1, 2}), 0);
    EXPECT_EQ(packed.get(TESSERA_LSE, {0, i, 1, 0}), -infinity);
    EXPECT_EQ(packed.get(TESSERA_MAX_SCORE, {0, i, 1, 0}), -infinity);
  }
}
TEST(Layout, UnusedRowsOfADenseBatch) {
  Case c("forward f64 b2 q3 k2 d1 seqused=q[1,3]");
  c.run();
  EXPECT_EQ(c.get(TESSERA_OUT, {0, 1, 0, 0}), 0);
  EXPECT_EQ(c.get(TESSERA_LSE, {0, 2, 0, 0}), -infinity);
  EXPECT_GT(c.get(TESSERA_LSE, {1, 2, 0, 0}), -infinity);
}
TEST(Layout, EmptyProblems) {
  for (const char* size : {"b0 q3 k3", "b2 q0 k3", "b2 q3 k0"}) {
    Case c(fmt::format("backward f64 {} h2 d2 mask=causal bias=b,h,q,k alibi sink", size));
    c.run_forward();
    c.run();
    for (const int name : {TESSERA_DQ, TESSERA_DK, TESSERA_DV, TESSERA_DBIAS, TESSERA_DSLOPES, TESSERA_DSINKS})
      for (const double x : c.values(name)) EXPECT_EQ(x, 0);
  }
}

TEST(Alibi, TakesSlopeTimesDistanceOff) {
  Case c("forward f64 q1 k3 d1/3 alibi");
  c.all(TESSERA_SLOPES, std::log(2));
  c.all(TESSERA_Q, 0);
  c.each_is(TESSERA_V, [](At at) { return at[1] == at[3]; });
  c.run();
  for (int64_t j = 0; j < 3; ++j)
    EXPECT_NEAR(c.get(TESSERA_OUT, {0, 0, 0, j}), std::exp2(static_cast<double>(j)) / 7, 1e-15);
}

TEST(Sampling, PairsAreEvenlySpread) {
  const auto at = [](int64_t n) {
    std::vector<int64_t> all;
    for (const Pair& pair : sampled_pairs(3, 4, n)) all.push_back(pair.batch * 4 + pair.head_kv);
    return all;
  };
  EXPECT_EQ(at(2), (std::vector<int64_t>{0, 11}));
  EXPECT_EQ(at(3), (std::vector<int64_t>{0, 5, 11}));
  EXPECT_EQ(at(0).size(), 12u);
  EXPECT_EQ(at(99).size(), 12u);
  EXPECT_TRUE(sampled_pairs(0, 4, 5).empty());
}
TEST(Sampling, LeavesTheRestUntouched) {
  Case c("forward f64 b3 h2/1 q3 k2 d1 seqused=q[2,2,2]");
  c.run({.sample_pairs = 2});
  for (const int64_t b : {0, 2})
    for (int64_t i = 0; i < 3; ++i) EXPECT_FALSE(std::isnan(c.get(TESSERA_OUT, {b, i, 1, 0})));
  for (int64_t i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(c.get(TESSERA_OUT, {1, i, 0, 0})));
}

}  // namespace
}  // namespace tessera::reference
