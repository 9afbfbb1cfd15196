// Refusals, memory, the CPU group, and the checker itself.
#include "cases.h"

namespace tessera::test {
namespace {

TEST(Cases, L08_EveryKernelSaysWhyNot) {
  const tessera_problem p = tools::Line("backward f32 q4 k4 d8 mask=keep").problem();
  const Answer answer = attempt(p, {}, {"cpu.avx512bf16"});
  EXPECT_EQ(answer.code, TESSERA_UNSUPPORTED);
  tools::Choice choice;
  const tools::Plan plan(p, choice);
  std::vector<std::string> kernels = {plan.facts().kernel};
  for (const auto& [kernel, reason] : plan.refused()) {
    EXPECT_FALSE(reason.empty()) << kernel;
    kernels.push_back(kernel);
  }
  EXPECT_GE(kernels.size(), 3u);
  for (const std::string& kernel : kernels)
    EXPECT_NE(answer.message.find("\n  " + kernel + ": "), std::string::npos) << answer.message;
}

// Memory grows with the lengths, never with their product, whatever the options.
TEST(Cases, N06_WorkspaceIsLinear) {
  for (const char* options : {"h8/2 d512", "h8/2 d128 bias=1,h,1,k", "h8/2 d64/512 mask=exclude_keys",
                              "h4 d96 mask=causal softcap=30 sink alibi"})
    for (const char* pass : {"forward bf16", "backward bf16"}) {
      SCOPED_TRACE(fmt::format("{} {}", pass, options));
      const auto workspace = [&](int64_t length) {
        const tessera_problem p = tools::Line(fmt::format("{} {} q{} k{}", pass, options, length, length)).problem();
        tools::Choice choice;
        choice.threads = 16;
        const tools::Plan plan(p, choice);
        int64_t operands = 0;
        for (int name = 0; name < TESSERA_NAMES; ++name)
          if (p.operand[name].dtype != TESSERA_ABSENT) operands += static_cast<int64_t>(span_bytes(p.operand[name]));
        EXPECT_LT(plan.facts().workspace_bytes, operands);
        EXPECT_LT(plan.facts().workspace_bytes, plan.facts().score_bytes_avoided / 100);
        return plan.facts().workspace_bytes;
      };
      const int64_t one = workspace(65536), two = workspace(131072);
      EXPECT_LE(two, 2 * one + 4096);
    }
  // Decode: for one thread the cache does not show in it at all; for more, a line of states for each 1024 keys.
  const auto decode = [](int64_t keys, int threads) {
    tools::Choice choice;
    choice.threads = threads;
    return tools::Plan(tools::Line(fmt::format("forward bf16 b4 h8/2 d128 q1 k{}", keys)).problem(), choice)
        .facts()
        .workspace_bytes;
  };
  EXPECT_EQ(decode(65536, 1), decode(1024, 1));
  const int64_t keys_bytes = int64_t{4} * 65536 * 2 * 2 * 128 * 2;
  EXPECT_LT(decode(65536, 16) - decode(1024, 16), keys_bytes / 64);
}

TEST(Cases, O01_TransposedLastTwoDimensions) {
  for (const char* dtype : {"f32", "bf16"}) {
    const std::string line = fmt::format("forward {} h2 q8 k8 d16", dtype);
    for (const std::string& kernel : kernels())
      if (kernel != "cpu.avx512bf16" || line.find("bf16") != std::string::npos)
        expect_same_bits(line, line + " strides=q[256,1,128,8]k[256,1,128,8]v[256,1,128,8]out[256,1,128,8]", {kernel});
  }
}

TEST(Cases, O03_EmptyShapesOnACpu) {
  on_engines([](const How& how) {
    for (const char* line : {"forward f16 b7 h9 q0 k0 d7 mask=causal", "backward f16 b7 h9 q0 k0 d7 mask=causal"}) {
      Exam c(line);
      run_all(c, how);
      for (const int name : tools::outputs(c.problem())) EXPECT_TRUE(c.values(name).empty());
    }
  });
}

TEST(Cases, O04_MaskOfLastSizeOne) {
  on_engines([](const How& how) {  // kept or not for whole rows; no byte beyond is read
    const Guarded g("forward f32 b2 h1 q5 k70 d4 mask=keep(b,1,q,1)");
    if (!g.given) GTEST_SKIP() << "no address space";
    for (int64_t i = 0; i < 5; ++i) g.set(TESSERA_KEEP, {0, 0, i, 0}, static_cast<double>(i % 2));
    expect_ok(attempt(g.problem, g.bindings, how));
    for (int64_t i = 0; i < 5; ++i) {
      expect_value(g.get(TESSERA_LSE, {0, i, 0, 0}), i % 2 ? std::log(70.0) : -infinity, 1e-5);
      EXPECT_EQ(g.get(TESSERA_LSE, {1, i, 0, 0}), -infinity);
    }
  });
}

TEST(Cases, O08_PaddingAtTheLeft) {
  on_engines([](const How& how) {
    Exam c("backward bf16 b2 h2 q33 k33 d128 mask=causal&exclude_keys");
    c.put(TESSERA_EXCLUDE_KEYS, [](const Index& i) { return i[0] == 1 && i[1] < 27; });
    c.put_unused(nan);
    run_all(c, how);
    for (int64_t i = 0; i < 33; ++i)
      for (int64_t d = 0; d < 128; ++d) {
        const bool empty = i < 27;
        if (empty || i == 27) {
          ASSERT_EQ(c.get(TESSERA_OUT, {1, i, 1, d}), empty ? 0 : c.get(TESSERA_V, {1, 27, 1, d}));
        }
        ASSERT_EQ(c.get(TESSERA_LSE, {1, i, 1, 0}) == -infinity, empty);
        for (const int name : {TESSERA_DQ, TESSERA_DK, TESSERA_DV}) {
          ASSERT_TRUE(std::isfinite(c.get(name, {1, i, 1, d})));
          if (empty) {
            ASSERT_EQ(c.get(name, {1, i, 1, d}), 0);
          }
        }
      }
    expect_right(c, "O08");
  });
}

// The rule is published and the checker ships: it accepts what is as good as the materialised computation, and sees one
// wrong number among many.
TEST(Cases, P01_TheCheckerTellsErrorFromRounding) {
  on_engines([](const How& how) {
    Exam c("forward f16 b4 h8 q10 k10 d64");
    run_all(c, how);
    expect_right(c, "P01");
    for (const double wrong : {c.get(TESSERA_OUT, {3, 9, 7, 63}) + 0.02, nan, infinity}) {
      const double right = c.get(TESSERA_OUT, {3, 9, 7, 63});
      c.set(TESSERA_OUT, {3, 9, 7, 63}, wrong);
      EXPECT_FALSE(tools::judge(c, 0).ok) << wrong;
      c.set(TESSERA_OUT, {3, 9, 7, 63}, right);
    }
    EXPECT_TRUE(tools::judge(c, 0).ok);
    c.set(TESSERA_LSE, {3, 9, 7, 0}, c.get(TESSERA_LSE, {3, 9, 7, 0}) + 1e-3);
    EXPECT_FALSE(tools::judge(c, 0).ok);
  });
}

}  // namespace
}  // namespace tessera::test
