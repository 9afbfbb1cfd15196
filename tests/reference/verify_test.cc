// naive within its yardstick, and a judge that finds what is wrong.
#include "case.h"
#include "core/error.h"

namespace tessera::reference {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

void answer(Case& c, void (*engine)(const Problem&, const Bindings&, const Task&) = naive) {
  if (c.p.pass == TESSERA_BACKWARD) engine(Case::forward_of(c.p), c.bound, {});
  engine(c.p, c.bound, {});
}
tessera_verdict verdict(const Case& c, int name, int64_t sample_pairs = 0) {
  for (const tessera_verdict& v : verify(c.p, c.bound, sample_pairs))
    if (v.name == name) return v;
  ADD_FAILURE() << core::operand_row(name).text << " was not judged";
  return {};
}
bool is_right(const Case& c, int64_t sample_pairs = 0) {
  bool right = true;
  for (const tessera_verdict& v : verify(c.p, c.bound, sample_pairs)) {
    right = right && v.ok;
    EXPECT_LE(v.naive_max, 0.1) << core::operand_row(v.name).text;
  }
  return right;
}

class NaiveOn : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    , NaiveOn,
    testing::Values("forward f32 b2 h4/2 q33 k70 d40/24 mask=causal sink alibi max",
                    "forward bf16 b2 h4/2 q33 k70 d40/24 mask=window(9,3) bias=1,h,q,k:f32 softcap=3",
                    "forward f16 h2 d64 varlen=q[5,0,60]k[9,3,40] rows=q70 mask=causal dropout=0.2@seed5",
                    "forward f64 h2 q20 k30 d8 mask=chunk(7) sink", "forward bf16 q1 k1 d4 out=f32",
                    "backward f32 b2 h4/2 q33 k70 d40/24 mask=causal sink alibi dlse bias=1,1,q,k",
                    "backward bf16 b2 h4/2 q33 k70 d40/24 mask=causal sink alibi=b,h dlse bias=b,1,1,k softcap=3",
                    "backward f16 h2/1 d64 varlen=q[5,0,60]k[9,3,40] rows=k60 seqused=k[9,1,30] dropout=0.2@seed5",
                    "backward f64 h2 q20 k30 d8 mask=chunk(7) sink bias=1,h,q,k:bf16", "backward f32 q1 k1 d5"));
TEST_P(NaiveOn, IsRight) {
  Case c(GetParam());
  answer(c);
  EXPECT_TRUE(is_right(c));
  const bool sums = core::has(c.p, TESSERA_DBIAS) || core::has(c.p, TESSERA_DSINKS) || core::has(c.p, TESSERA_DSLOPES);
  EXPECT_TRUE(sums || is_right(c, 1));
}

TEST(Naive, RoundsAsAFusedKernelMust) {
  Case half("forward bf16 q64 k64 d64"), full("forward bf16 q64 k64 d64 out=f32");
  answer(full);
  double most = 0;
  Case exact("forward bf16 q64 k64 d64 out=f32");
  exact.run();
  full.each(TESSERA_OUT,
            [&](At at) { most = std::max(most, std::abs(full.get(TESSERA_OUT, at) - exact.get(TESSERA_OUT, at))); });
  EXPECT_GT(most, 1e-5);  // P is rounded to bf16, not kept in float32
  EXPECT_LT(most, 2e-3);
  answer(half, oracle);
  EXPECT_TRUE(is_right(half));
}

TEST(Verify, FindsOneWrongElement) {
  for (const char* line : {"forward f32 q20 k30 d8", "forward bf16 q20 k30 d8", "forward f64 q20 k30 d8"}) {
    Case c(line);
    answer(c, oracle);
    ASSERT_TRUE(is_right(c));
    const double x = c.get(TESSERA_OUT, {0, 7, 0, 3});
    const double bound = verdict(c, TESSERA_OUT).bound;
    c.set(TESSERA_OUT, {0, 7, 0, 3}, x + 4 * bound);
    EXPECT_FALSE(verdict(c, TESSERA_OUT).ok) << line;
    EXPECT_TRUE(verdict(c, TESSERA_LSE).ok);
    for (const double bad : {nan, infinity}) {
      c.set(TESSERA_OUT, {0, 7, 0, 3}, bad);
      EXPECT_FALSE(verdict(c, TESSERA_OUT).nonfinite_equal);
      EXPECT_FALSE(verdict(c, TESSERA_OUT).ok);
    }
  }
}
TEST(Verify, FindsTheWrongScaleEverywhere) {
  Case c("backward bf16 h2 q80 k90 d32 mask=causal dlse");
  answer(c);
  ASSERT_TRUE(is_right(c));
  c.each_is(TESSERA_DQ, [&](At at) { return 1.02 * c.get(TESSERA_DQ, at); });
  EXPECT_FALSE(verdict(c, TESSERA_DQ).ok);
  EXPECT_TRUE(verdict(c, TESSERA_DK).ok);
}
TEST(Verify, FindsNoiseByItsRms) {
  Case c("forward bf16 h4 q64 k64 d32");
  answer(c);
  const tessera_verdict before = verdict(c, TESSERA_OUT);
  ASSERT_TRUE(before.ok);
  ASSERT_GT(before.bound_rms, 0);
  std::mt19937 random(5);
  c.each_is(TESSERA_OUT, [&](At at) { return c.get(TESSERA_OUT, at) + (random() & 1 ? 0.4 : -0.4) * before.bound; });
  const tessera_verdict after = verdict(c, TESSERA_OUT);
  EXPECT_LE(after.max, after.bound);
  EXPECT_FALSE(after.ok);
}
TEST(Verify, LseInItsOwnBound) {
  Case c("forward bf16 q20 k30 d8 max");
  answer(c);
  const double x = c.get(TESSERA_LSE, {0, 3, 0, 0});
  c.set(TESSERA_LSE, {0, 3, 0, 0}, x + 8e-6);
  EXPECT_TRUE(verdict(c, TESSERA_LSE).ok);
  c.set(TESSERA_LSE, {0, 3, 0, 0}, x + 3e-5);
  const tessera_verdict v = verdict(c, TESSERA_LSE);
  EXPECT_FALSE(v.ok);
  EXPECT_GT(v.bound, 1e-5);
  EXPECT_LT(v.bound, 2e-5);
}
TEST(Verify, UnusedAndEmptyRowsAreExact) {
  Case c("backward f32 q6 k3 d2 seqused=q[5] mask=causal dlse");
  answer(c);
  ASSERT_TRUE(is_right(c));
  for (const int64_t row : {0, 5}) {  // empty, unused
    c.set(TESSERA_DQ, {0, row, 0, 0}, 1e-30);
    EXPECT_FALSE(verdict(c, TESSERA_DQ).ok);
    c.set(TESSERA_DQ, {0, row, 0, 0}, -0.0);
    EXPECT_TRUE(verdict(c, TESSERA_DQ).ok);
  }
  Case f("forward f32 q6 k3 d2 seqused=q[5] mask=causal");
  answer(f);
  ASSERT_TRUE(is_right(f));
  f.set(TESSERA_LSE, {0, 5, 0, 0}, -1e30);
  EXPECT_FALSE(verdict(f, TESSERA_LSE).ok);
  f.set(TESSERA_OUT, {0, 0, 0, 0}, 1e-30);
  EXPECT_FALSE(verdict(f, TESSERA_OUT).ok);
}
TEST(Verify, OverflowOfTheStoredTypeIsInfinity) {
  Case c("backward f16 q1 k2 d1");
  c.set(TESSERA_V, {0, 0, 0, 0}, 60000);
  c.set(TESSERA_V, {0, 1, 0, 0}, -60000);
  c.set(TESSERA_K, {0, 0, 0, 0}, 30);
  c.set(TESSERA_K, {0, 1, 0, 0}, -30);
  c.all(TESSERA_Q, 0);
  c.all(TESSERA_DOUT, 1);
  answer(c);
  ASSERT_EQ(c.get(TESSERA_DQ, {0, 0, 0, 0}), infinity);
  EXPECT_TRUE(verdict(c, TESSERA_DQ).ok);
  c.set(TESSERA_DQ, {0, 0, 0, 0}, -infinity);
  EXPECT_FALSE(verdict(c, TESSERA_DQ).ok);
  c.set(TESSERA_DQ, {0, 0, 0, 0}, 65504);
  EXPECT_FALSE(verdict(c, TESSERA_DQ).ok);
}
TEST(Verify, GradientsThatCancelMayLeaveRounding) {
  Case c("backward f32 q1 k1 d5");
  answer(c);
  c.all(TESSERA_DQ, 1e-8);  // naive finds 0
  EXPECT_TRUE(verdict(c, TESSERA_DQ).ok);
  c.all(TESSERA_DQ, 1e-5);
  EXPECT_FALSE(verdict(c, TESSERA_DQ).ok);
}
TEST(Verify, SubnormalsMayBeFlushed) {
  Case c("forward f32 k8 d2 sink");
  c.all(TESSERA_Q, 0);
  c.all(TESSERA_SINKS, 100);
  answer(c);
  c.all(TESSERA_OUT, 0);
  EXPECT_TRUE(verdict(c, TESSERA_OUT).ok);
}
TEST(Verify, LseFarFromZeroIsAsFineAsItsDtype) {
  Case c("forward f32 k2 d1 bias=1,1,1,1");
  c.all(TESSERA_BIAS, 1e6);
  answer(c);
  const double x = c.get(TESSERA_LSE, {0, 0, 0, 0});
  c.all(TESSERA_LSE, x + 0.0625);
  EXPECT_TRUE(verdict(c, TESSERA_LSE).ok);
  c.all(TESSERA_LSE, x + 1);
  EXPECT_FALSE(verdict(c, TESSERA_LSE).ok);
}
TEST(Verify, JudgesOnlyTheSample) {
  Case c("backward f32 b3 q4 k4 d2 bias=1,1,q,k grads=dq,dk,dv");
  answer(c);
  c.set(TESSERA_DK, {1, 0, 0, 0}, nan);
  EXPECT_FALSE(is_right(c));
  EXPECT_TRUE(is_right(c, 2));
  Case summed("backward f32 b3 q4 k4 d2 bias=1,1,q,k");
  answer(summed);
  EXPECT_THROW(verify(summed.p, summed.bound, 2), core::Error);  // a sample cannot judge dbias
  EXPECT_EQ(verdict(c, TESSERA_DK, 2).elements, 2 * 4 * 2);
}
TEST(Verify, RefusesBadLengths) {
  Case c("forward f32 d2 varlen=q[2,3]k[2,3]");
  c.set(TESSERA_CU_SEQLENS_Q, {1, 0, 0, 0}, 9);
  EXPECT_THROW(verify(c.p, c.bound, 0), core::Error);
}

TEST(Kernels, RunOnTheHostOnlyAndOnlyIfNamed) {
  core::Hints hints = {};
  hints.kernels = "reference.oracle";
  Case c("forward f32 q3 k4 d2"), again("forward f32 q3 k4 d2");
  const core::Plan plan = core::choose(kernels(), c.p, {}, hints);
  plan.kernel->run(plan, c.bound, nullptr);
  again.run();
  EXPECT_EQ(c.values(TESSERA_OUT), again.values(TESSERA_OUT));
  EXPECT_EQ(plan.workspace_bytes, 0);
  EXPECT_THROW(core::choose(kernels(), c.p, {}, {}), core::Error);
  core::Device gpu = {};
  gpu.kind = TESSERA_GPU;
  std::strcpy(gpu.name, "h200");
  EXPECT_EQ(kernels()[0]->refuse(c.p, gpu), "device h200 is a GPU; the reference engine runs on the host's memory");
}

}  // namespace
}  // namespace tessera::reference
