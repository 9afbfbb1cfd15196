// tessera.hpp, used as its example says.
#include "tessera/tessera.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <type_traits>
#include <vector>

namespace tessera {
namespace {

Problem causal() {
  return Problem().batch(1).heads(4, 2).lengths(2, 5).dims(8).causal(TESSERA_BOTTOM_RIGHT);
}

void run(Problem problem, Bindings bindings) {
  problem.declare_all(TESSERA_F32).or_throw();
  Plan plan;
  Plan::make(problem, Device::host(), Hints().threads(1), plan).or_throw();
  const int64_t bytes = plan.facts().workspace_bytes;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, static_cast<size_t>(bytes)),
                                                           std::free);
  plan.run(bindings.workspace(memory.get(), bytes)).or_throw();
}

TEST(Hpp, ForwardAndBackward) {
  std::vector<float> q(64), k(80), v(80), out(64), lse(8), dout(64, 1), dq(64, 9), dk(80, 9), dv(80, 9);
  for (size_t j = 0; j < 5; ++j)
    for (size_t n = 0; n < 16; ++n) v[16 * j + n] = static_cast<float>(j);
  Bindings b;
  b.q(q.data()).k(k.data()).v(v.data()).out(out.data()).lse(lse.data());
  run(causal(), b);
  EXPECT_FLOAT_EQ(out.front(), 1.5f);
  EXPECT_FLOAT_EQ(out.back(), 2.0f);
  EXPECT_FLOAT_EQ(lse.back(), std::log(5.0f));
  run(causal().backward(), b.dout(dout.data()).dq(dq.data()).dk(dk.data()).dv(dv.data()));
  EXPECT_FLOAT_EQ(dv.front(), 2 * (0.25f + 0.2f));  // two query heads, two rows
  EXPECT_FLOAT_EQ(dv.back(), 2 * 0.2f);
  for (const float x : dk) EXPECT_EQ(x, 0);
}

TEST(Hpp, StatusSaysWhatIsWrong) {
  Problem p = causal();
  EXPECT_TRUE(p.declare_all(TESSERA_BF16).ok());
  p.heads(4, 3);
  const Status status = p.check();
  EXPECT_EQ(status.code(), TESSERA_INVALID);
  EXPECT_NE(status.message().find("heads_q is 4 and heads_kv is 3"), std::string::npos);
  EXPECT_THROW(status.or_throw(), std::runtime_error);
  Plan plan;
  EXPECT_FALSE(Plan::make(p, Device::host(), plan).ok());
  EXPECT_FALSE(plan);
  EXPECT_EQ(plan.text(), "");
  EXPECT_EQ(plan.facts().workspace_bytes, 0);
  EXPECT_EQ(plan.run(Bindings()).message(), "plan is NULL; it must be given.");
}

TEST(Hpp, ProblemsSpeakLines) {
  Problem p = Problem().batch(2).heads(4).lengths(7, 9).dims(16, 8).corner_at(3).window_left(4).scale(0.5).softcap(30);
  p.dropout(0.1).deterministic().alignment(64);
  p.declare(TESSERA_SINKS, TESSERA_F32).or_throw();
  p.declare_all(TESSERA_F16, TESSERA_BHSD).or_throw();
  const std::string text =
      "forward f16 b2 h4 q7 k9 d16/8 layout=bhsd mask=window(4,unbounded)@at(3) scale=0.5 softcap=30 sink "
      "dropout=0.1 deterministic align=64";
  EXPECT_EQ(p.text(), text);
  EXPECT_EQ(Line(text).problem().text(), text);
  EXPECT_EQ(Problem().window(2, 0).c().mask.window_right_unbounded, 0);
}

TEST(Hpp, CachesSpeakLines) {
  Problem p = Problem().batch(2).heads(4, 2).lengths(1, 30).dims(16).new_tokens(3).pages(8, 12).slots(40);
  p.cache_rows(5).rotary(8, true, 50).corner(TESSERA_BOTTOM_RIGHT);
  for (const tessera_name name : {TESSERA_CACHE_LENS, TESSERA_CACHE_BATCH_IDX, TESSERA_PAGE_TABLE, TESSERA_STATUS})
    p.declare(name, TESSERA_I32).or_throw();
  for (const tessera_name name : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_K_NEW, TESSERA_V_NEW, TESSERA_OUT,
                                  TESSERA_LSE, TESSERA_COS, TESSERA_SIN})
    p.declare(name, TESSERA_F32).or_throw();
  const std::string text =
      "decode f32 b2 h4/2 q1 n3 k30 d16 append page=8 pages=12 slots=40 cache_rows=5 cache_batch_idx "
      "rotary=8:interleaved positions=50 status mask=corner@bottom_right";
  EXPECT_EQ(p.text(), text);
  EXPECT_EQ(Line(text).problem().text(), text);
  EXPECT_EQ(Problem().ring(7).c().cache.ring, 1);
  EXPECT_EQ(Problem().ring(7).c().cache.slots, 7);
  EXPECT_EQ(Problem().v_in_k().c().cache.v_in_k, 1);
  EXPECT_EQ(Problem().packed_new_rows(9).c().rows_new, 9);

  Problem alone = Problem().append_alone().batch(1).heads(2).lengths(0, 9).dims(4).new_tokens(2);
  alone.declare(TESSERA_CACHE_LENS, TESSERA_I32).or_throw();
  alone.declare_all(TESSERA_BF16).or_throw();
  EXPECT_EQ(alone.text(), "append bf16 b1 h2 n2 k9 d4");
}

// Two tokens of ones join a cache of zeros: the mean of what is there.
TEST(Hpp, AppendAndAttend) {
  Problem p = Problem().batch(1).heads(1).lengths(1, 4).dims(4).new_tokens(2);
  p.declare(TESSERA_CACHE_LENS, TESSERA_I32).or_throw();
  p.declare(TESSERA_STATUS, TESSERA_I32).or_throw();
  for (const tessera_name name : {TESSERA_K_NEW, TESSERA_V_NEW}) p.declare(name, TESSERA_F32).or_throw();
  p.declare_all(TESSERA_F32).or_throw();
  std::vector<float> q(4), k(16), v(16), fresh(8, 1), out(4, 9), lse(1);
  int32_t status = 0, length = 2;
  Bindings b;
  b.q(q.data()).k(k.data()).v(v.data()).k_new(fresh.data()).v_new(fresh.data()).cache_lens(&length);
  b.status(&status).out(out.data()).lse(lse.data());
  run(p, b);
  EXPECT_FLOAT_EQ(out[0], 0.5f);
  EXPECT_EQ(v, (std::vector<float>{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(status, TESSERA_STATUS_SOUND);
  length = 3;
  EXPECT_THROW(run(p, b), std::runtime_error);
  EXPECT_EQ(status, TESSERA_STATUS_CAPACITY);
  length = -1;
  EXPECT_THROW(run(p, b), std::runtime_error);
  EXPECT_EQ(status, TESSERA_STATUS_CAPACITY | TESSERA_STATUS_LENGTH) << "bits are added";
}

// A prefix of zeros for both rows, and a key of ones for each.
TEST(Hpp, Cascade) {
  Problem shared = Problem().batch(1).heads(1).lengths(2, 3).dims(4),
          own = Problem().batch(2).heads(1).lengths(1, 1).dims(4);
  shared.declare_all(TESSERA_F32).or_throw();
  own.declare_all(TESSERA_F32).or_throw();
  Plan plan;
  Plan::make_cascade({shared, own}, Device::host(), {}, plan).or_throw();
  EXPECT_NE(plan.text().find("level 0: forward f32 b1 h1 q2 k3 d4"), std::string::npos) << plan.text();
  EXPECT_NE(plan.text().find("merge"), std::string::npos);
  std::vector<float> q(8), zeros(12), ones(8, 1), out(8, 9), lse(2);
  const int64_t bytes = plan.facts().workspace_bytes;
  const std::unique_ptr<void, decltype(&std::free)> memory(
      std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)), std::free);
  Bindings prefix, last;
  prefix.q(q.data()).k(zeros.data()).v(zeros.data());
  last.q(q.data()).k(ones.data()).v(ones.data()).out(out.data()).lse(lse.data());
  EXPECT_EQ(plan.run_cascade({prefix, last}).code(), TESSERA_INVALID) << "no workspace";
  plan.run_cascade({prefix, last.workspace(memory.get(), bytes)}).or_throw();
  for (const float x : out) EXPECT_FLOAT_EQ(x, 0.25f);
  for (const float x : lse) EXPECT_FLOAT_EQ(x, std::log(4.0f));
  EXPECT_NE(plan.run(last).message().find("the plan is a cascade of 2 levels"), std::string::npos);
  const Status tight = Plan::make_cascade({shared, own}, Device::host(), Hints().workspace_limit(64), plan);
  EXPECT_EQ(tight.code(), TESSERA_UNSUPPORTED);
  EXPECT_FALSE(plan);
}

TEST(Hpp, Lines) {
  const Line line("forward d8 varlen=q[2,3]k[1,1] dropout=0.5@seed3");
  EXPECT_EQ(line.values(TESSERA_CU_SEQLENS_Q), (std::vector<int32_t>{0, 2, 5}));
  EXPECT_TRUE(line.values(TESSERA_Q).empty());
  EXPECT_EQ(line.seed(), 3u);
  EXPECT_THROW(Line("sideways"), std::runtime_error);
  Line none;
  EXPECT_EQ(Line::parse("sideways", none).code(), TESSERA_INVALID);
  EXPECT_FALSE(none);
  EXPECT_EQ(none.text(), "");
  EXPECT_EQ(none.problem().c().batch, 0);
}

TEST(Hpp, HintsMayBeMoved) {
  Hints hints = Hints().kernels("reference.oracle");
  const Hints moved = std::move(hints);
  Problem p = causal();
  p.declare_all(TESSERA_F32).or_throw();
  Plan plan;
  Plan::make(p, Device::host(), moved, plan).or_throw();
  EXPECT_STREQ(plan.facts().kernel, "reference.oracle");
  Device device;
  EXPECT_EQ(Device::find("abacus", device).code(), TESSERA_INVALID);
}

static_assert(std::is_move_constructible_v<Plan> && !std::is_copy_constructible_v<Plan>);
static_assert(std::is_copy_constructible_v<Problem> && std::is_move_constructible_v<Line>);

}  // namespace
}  // namespace tessera
