// Every gradient of the oracle against central differences of its forward.
#include "case.h"

namespace tessera::reference {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr struct {
  int input, gradient;
} gradients[] = {{TESSERA_Q, TESSERA_DQ},       {TESSERA_K, TESSERA_DK},           {TESSERA_V, TESSERA_DV},
                 {TESSERA_BIAS, TESSERA_DBIAS}, {TESSERA_SLOPES, TESSERA_DSLOPES}, {TESSERA_SINKS, TESSERA_DSINKS}};

bool used_row(const Case& c, int64_t b, int64_t i) {
  for (int64_t s = 0; s < c.p.batch; ++s) {
    const Rows r = rows_of(c.p, c.bound, query_side(c.p), s);
    if (r.plane == b && i >= r.first && i < r.first + r.used) return true;
  }
  return false;
}

// sum dO . out + dLSE lse, of which backward gives the gradients.
double loss(const Case& c) {
  c.run_forward();
  double sum = 0;
  c.each(TESSERA_LSE, [&](At at) {
    if (!used_row(c, at[0], at[1]) || c.get(TESSERA_LSE, at) == -infinity) return;
    if (core::has(c.p, TESSERA_DLSE)) sum += c.get(TESSERA_DLSE, at) * c.get(TESSERA_LSE, at);
    for (int64_t d = 0; d < c.p.dim_v; ++d) {
      const At e = {at[0], at[1], at[2], d};
      sum += c.get(TESSERA_DOUT, e) * c.get(TESSERA_OUT, e);
    }
  });
  return sum;
}

class Differences : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    , Differences,
    testing::Values(
        "q5 k7 d3/4 h4/2 b2 dlse", "q5 k7 d3/4 h4/2 b2 mask=causal softcap=1.5 alibi sink bias=b,h,q,k dlse",
        "q5 k7 d4/3 h6/2 b2 mask=causal@top_left bias=1,h,q,k alibi=b,h dropout=0.3@seed7",
        "q5 k7 d3 h3/1 b2 mask=window(2,1)&first(1) bias=b,1,1,k softcap=2 dlse sink",
        "q7 k5 d3 h2 b2 mask=causal bias=1,1,q,1 sink alibi dlse",  // empty rows, with a sink
        "q7 k5 d3 h2 b2 mask=causal bias=b,h,1,1 alibi dlse layout=bhsd",
        "q6 k6 d2 h2 b3 mask=chunk(4)@at[-2,0,5] bias=1,1,1,1 softcap=0.7 dropout=0.5@seed3",
        "q4 k6 d2 h4/2 b2 mask=prefix(2) bias=1,h,1,k scale=-0.8 alibi=b,h",
        "q4 k6 d2 h4/1 b2 mask=keep(b,1,q,k)&exclude_keys&documents bias=b,1,q,k sink dlse",
        "q4 k6 d2 h2 b2 mask=keep(1,h,1,k) layout=qkv bias=1,1,q,k",
        "d3/2 h4/2 varlen=q[3,0,4]k[5,2,0] rows=q9k8 mask=causal bias=b,h,q,k alibi=b,h sink dlse",
        "d3/2 h2/1 b3 q6 varlen=k[5,2,4] seqused=q[6,3,0]k[4,2,4] mask=window(1,unbounded) bias=1,1,q,k dropout=0.2",
        "d2 h2 b3 k5 varlen=q[2,5,1] seqused=q[2,3,1]k[0,5,2] alibi bias=1,h,1,1 softcap=1 sink dlse mask=exclude_keys",
        "d1 h1 b1 q40 k3 mask=causal@at(-5) bias=1,1,1,k sink"));  // more rows than one block

TEST_P(Differences, EveryGradient) {
  Case c(std::string("backward f64 ") + GetParam());
  loss(c);
  c.run();
  int checked = 0;
  for (const auto& [input, gradient] : gradients)
    c.each(input, [&, input = input, gradient = gradient](At at) {
      const double x = c.get(input, at), step = 1e-5;
      c.set(input, at, x + step);
      const double above = loss(c);
      c.set(input, at, x - step);
      const double below = loss(c);
      c.set(input, at, x);
      const double expected = (above - below) / (2 * step), found = c.get(gradient, at);
      EXPECT_NEAR(found, expected, 2e-8 * (1 + std::abs(expected)))
          << core::operand_row(gradient).text << fmt::format("{}", fmt::join(at, ","));
      checked += std::abs(expected) > 1e-6;
    });
  EXPECT_GT(checked, 20);
}

// out and lse of a merge over more keys: each part's gradients are its share of the whole's.
TEST(Backward, PartsOfAMergeAddUp) {
  const std::string options = " d3/2 h2 q4 sink dlse";
  Case whole("backward f64 k7" + options), right("backward f64 k4" + options);
  Case left("backward f64 k3 d3/2 h2 q4 dlse");  // the sink belongs to the other part
  whole.run_forward();
  whole.run();
  for (Case* part : {&left, &right}) {
    const int64_t first = part == &left ? 0 : 3;
    for (const int name : {TESSERA_K, TESSERA_V})
      part->each_is(name, [&](At at) { return whole.get(name, {at[0], at[1] + first, at[2], at[3]}); });
    for (const int name : {TESSERA_Q, TESSERA_SINKS, TESSERA_OUT, TESSERA_LSE, TESSERA_DOUT, TESSERA_DLSE})
      part->each_is(name, [&](At at) { return whole.get(name, at); });
    part->run();
    for (const int name : {TESSERA_DK, TESSERA_DV})
      part->each(name, [&](At at) {
        EXPECT_NEAR(part->get(name, at), whole.get(name, {at[0], at[1] + first, at[2], at[3]}), 1e-14);
      });
  }
  whole.each(TESSERA_DQ, [&](At at) {
    EXPECT_NEAR(left.get(TESSERA_DQ, at) + right.get(TESSERA_DQ, at), whole.get(TESSERA_DQ, at), 1e-14);
  });
  EXPECT_NEAR(right.get(TESSERA_DSINKS, {0, 0, 1, 0}), whole.get(TESSERA_DSINKS, {0, 0, 1, 0}), 1e-14);
}

class EmptyRowsUnder : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, EmptyRowsUnder,
                         testing::Values("mask=causal", "mask=causal sink", "mask=causal softcap=1 alibi",
                                         "mask=keep bias=1,1,q,k"));
TEST_P(EmptyRowsUnder, ContributeNothingWhateverDoutHolds) {
  const std::string line = std::string("backward f64 q7 k3 d2 h2 dlse ") + GetParam();
  Case zero(line), bad(line);
  for (Case* c : {&zero, &bad}) {
    if (core::has(c->p, TESSERA_KEEP)) c->each_is(TESSERA_KEEP, [](At at) { return at[2] > 3; });
    c->run_forward();
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 2; ++d) c->set(TESSERA_DOUT, {0, i, h, d}, c == &bad ? nan : 0);
        if (!core::has(c->p, TESSERA_SINKS)) c->set(TESSERA_DLSE, {0, i, h, 0}, c == &bad ? infinity : 0);
      }
    c->run();
  }
  for (const auto& [input, gradient] : gradients) EXPECT_EQ(zero.values(gradient), bad.values(gradient));
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(bad.get(TESSERA_DQ, {0, i, 1, 1}), 0);
}
TEST(EmptyRows, AreThoseWhoseScoresAreAllMinusInfinityToo) {
  for (const char* sink : {"", "sink"}) {
    Case c(fmt::format("backward f64 q2 k2 d1 dlse {}", sink));
    for (const int64_t j : {0, 1}) c.set(TESSERA_K, {0, j, 0, 0}, infinity);
    c.all(TESSERA_Q, -1);
    c.all(TESSERA_DOUT, nan);
    c.run_forward();
    c.run();
    for (const int name : {TESSERA_DQ, TESSERA_DK, TESSERA_DV})
      for (const double x : c.values(name)) EXPECT_EQ(x, 0);
    for (const double x : c.values(TESSERA_DSINKS))
      EXPECT_EQ(x, c.get(TESSERA_DLSE, {0, 0, 0, 0}) + c.get(TESSERA_DLSE, {0, 1, 0, 0}));
  }
}
TEST(EmptyRows, AreThoseOfLseMinusInfinity) {
  Case c("backward f64 q2 k2 d1");
  c.run_forward();
  c.all(TESSERA_LSE, -infinity);
  c.run();
  for (const int name : {TESSERA_DQ, TESSERA_DK, TESSERA_DV})
    for (const double x : c.values(name)) EXPECT_EQ(x, 0);
}
TEST(EmptyRows, GiveDlseToTheSink) {
  Case c("backward f64 q2 k0 d1 sink dlse");
  c.run_forward();
  c.all(TESSERA_DOUT, nan);
  c.run();
  EXPECT_EQ(c.get(TESSERA_DSINKS, {0, 0, 0, 0}), c.get(TESSERA_DLSE, {0, 0, 0, 0}) + c.get(TESSERA_DLSE, {0, 1, 0, 0}));
}
TEST(Backward, InfiniteSinkTakesAll) {
  Case c("backward f64 q1 k2 d1 sink dlse");
  c.all(TESSERA_SINKS, infinity);
  c.run_forward();
  c.run();
  EXPECT_EQ(c.get(TESSERA_DSINKS, {0, 0, 0, 0}), c.get(TESSERA_DLSE, {0, 0, 0, 0}));
  EXPECT_EQ(c.get(TESSERA_DQ, {0, 0, 0, 0}), 0);
}
TEST(Backward, UnusedAndExcludedKeysAreNotRead) {
  Case c("backward f64 b2 q3 k4 d2 seqused=q[3,2]k[2,4] mask=exclude_keys dlse");
  c.each_is(TESSERA_EXCLUDE_KEYS, [](At at) { return at[0] == 1 && at[1] == 0; });
  for (const int name : {TESSERA_K, TESSERA_V})
    for (int64_t d = 0; d < 2; ++d)
      for (const At at : {At{0, 2, 0, d}, At{0, 3, 0, d}, At{1, 0, 0, d}}) c.set(name, at, nan);
  for (const int name : {TESSERA_Q, TESSERA_DOUT})
    for (int64_t d = 0; d < 2; ++d) c.set(name, {1, 2, 0, d}, nan);
  c.run_forward();
  c.run();
  for (const auto& [input, gradient] : gradients)
    for (const double x : c.values(gradient)) EXPECT_TRUE(std::isfinite(x));
  EXPECT_EQ(c.get(TESSERA_DK, {0, 2, 0, 0}), 0);
  EXPECT_EQ(c.get(TESSERA_DQ, {1, 2, 0, 0}), 0);
}
TEST(Backward, OnlyWhatIsDeclared) {
  const std::string line = "backward f64 q3 k4 d2 sink bias=1,1,1,k";
  Case all(line), few(line + " grads=dv,dbias");
  for (Case* c : {&all, &few}) c->run_forward(), c->run();
  EXPECT_EQ(all.values(TESSERA_DV), few.values(TESSERA_DV));
  EXPECT_EQ(all.values(TESSERA_DBIAS), few.values(TESSERA_DBIAS));
}
TEST(Backward, BitsDoNotDependOnThreads) {
  const char* line = "backward bf16 b2 h4/2 q70 k50 d9/5 mask=causal bias=1,1,1,k alibi sink dropout=0.1 dlse";
  Case one(line), three(line);
  one.run_forward();
  three.run_forward();
  one.run({.threads = 1});
  three.run({.threads = 3});
  for (const auto& [input, gradient] : gradients) EXPECT_EQ(one.values(gradient), three.values(gradient));
}
TEST(Backward, ASampleLeavesSumsUntouched) {
  Case c("backward f64 b3 q2 k2 d1 sink bias=1,1,q,k alibi");
  c.run_forward();
  c.run({.sample_pairs = 2});
  for (const int name : {TESSERA_DBIAS, TESSERA_DSLOPES, TESSERA_DSINKS})
    for (const double x : c.values(name)) EXPECT_TRUE(std::isnan(x));
  EXPECT_TRUE(std::isnan(c.get(TESSERA_DK, {1, 0, 0, 0})));
  EXPECT_FALSE(std::isnan(c.get(TESSERA_DK, {2, 0, 0, 0})));
}

}  // namespace
}  // namespace tessera::reference
