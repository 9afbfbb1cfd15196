// Groups of heads, head dims, sinks.
#include "cases.h"

namespace tessera::test {
namespace {

TEST(Cases, F01_GroupSizes) {
  for (const int64_t group : {5, 6, 7, 12, 16, 71})
    for (const int64_t rows : {1, 3}) {
      on_engines([&](const How& how) {  // out of head h is v of KV head h / group
        Exam c(fmt::format("forward bf16 h{}/2 q{} k37 d8", 2 * group, rows));
        c.put(TESSERA_V, [](const Index& i) { return 1 + i[2]; });
        run_all(c, how);
        for (int64_t h = 0; h < 2 * group; ++h)
          for (int64_t i = 0; i < rows; ++i)
            ASSERT_NEAR(c.get(TESSERA_OUT, {0, i, h, 7}), static_cast<double>(1 + h / group), 0.01) << h;
      });
      expect_line_right(fmt::format("forward bf16 h{}/2 q{} k65 d16 mask=causal", 2 * group, rows));
    }
  for (const int64_t group : {5, 7, 12, 71})
    expect_line_right(fmt::format("backward bf16 h{0}/1 q5 k33 d16 mask=causal", group));
}

TEST(Cases, F06_PackedHeadsBeyondTheFirstRows) {
  on_engines([](const How& how) {
    Exam c("forward f32 h8/2 q300 k300 d32 mask=causal");
    c.average_keys();
    c.put(TESSERA_V, [](const Index& i) { return i[1] + 1000 * i[2]; });
    run_all(c, how);
    for (int64_t i = 0; i < 300; ++i)
      for (int64_t h = 0; h < 8; ++h)
        ASSERT_NEAR(c.get(TESSERA_OUT, {0, i, h, 31}), static_cast<double>(i) / 2 + static_cast<double>(1000 * (h / 4)),
                    2e-3);
  });
}

TEST(Cases, F07_HeadDims) {
  for (const int d :
       {1, 2, 7, 8, 40, 56, 59, 63, 64, 72, 80, 88, 96, 112, 120, 128, 132, 160, 192, 224, 256, 320, 512, 576}) {
    expect_line_right(fmt::format("forward bf16 h2/1 q9 k33 d{} mask=causal", d));
    expect_line_right(fmt::format("backward f32 h2/1 q9 k33 d{} mask=causal", d));
  }
  on_engines([](const How& how) {  // the default scale has the caller's dim: q . k = d
    for (const int d : {1, 7, 59, 132}) {
      Exam c(fmt::format("forward f32 q1 k1 d{}", d));
      c.put(TESSERA_Q, 1);
      c.put(TESSERA_K, 1);
      run_all(c, how);
      EXPECT_NEAR(c.get(TESSERA_LSE, {}), std::sqrt(d), 1e-5);
    }
  });
}

TEST(Cases, F08_DvUnlikeD) {
  for (const char* dims : {"192/128", "64/128", "64/512", "576/512", "128/64", "16/48", "1/129", "129/1"}) {
    expect_line_right(fmt::format("forward bf16 h4/2 q17 k65 d{} mask=causal", dims));
    expect_line_right(fmt::format("backward bf16 h2/1 q9 k33 d{}", dims));
  }
  expect_line_right("forward f16 q129 k769 d64/128 mask=causal");
}

TEST(Cases, M05_LargeSinksAndSinksAlone) {
  on_engines([](const How& how) {
    Exam c("forward f32 h2 q3 k128 d16 sink");
    c.put(TESSERA_Q, 0);
    c.put(TESSERA_V, 1);
    c.put_list(TESSERA_SINKS, {100, -100});
    run_all(c, how);
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(c.get(TESSERA_LSE, {0, i, 0, 0}), 100, 1e-5);
      EXPECT_NEAR(c.get(TESSERA_OUT, {0, i, 0, 0}), 0, 1e-30);
      EXPECT_NEAR(c.get(TESSERA_LSE, {0, i, 1, 0}), std::log(128.0), 1e-5);
      EXPECT_NEAR(c.get(TESSERA_OUT, {0, i, 1, 0}), 1, 1e-6);
    }
    for (const char* line : {"forward f32 h1 q3 k0 d16 sink", "forward f32 h1 q3 k2 d16 sink mask=window(0,-1)"}) {
      Exam empty(line);
      empty.put(TESSERA_SINKS, 0.5);
      run_all(empty, how);
      expect_values(empty, TESSERA_LSE, {0.5, 0.5, 0.5}, 0);
      expect_zero(empty.values(TESSERA_OUT));
    }
  });
}

TEST(Cases, M06_GradientOfSinks) {
  on_engines([](const How& how) {
    for (const char* dims : {"576/512", "64", "7/3"}) {
      Exam c(fmt::format("backward f32 h2/1 q5 k7 d{} sink dlse", dims));
      const auto dv = static_cast<double>(c.problem().dim_v);
      c.put(TESSERA_Q, 0);
      c.put(TESSERA_V, 1);
      c.put(TESSERA_SINKS, 1);
      c.put(TESSERA_DOUT, 1 / dv);
      c.put(TESSERA_DLSE, 0.25);
      run_all(c, how);
      // Each row: delta = out = 7 / (7 + e); dSink = e / (7 + e) (dLSE - delta).
      const double e = std::exp(1.0), share = e / (7 + e), want = 5 * share * (0.25 - (1 - share));
      expect_values(c, TESSERA_DSINKS, {want, want}, 1e-5);
    }
  });
}

TEST(Cases, M07_SinksOfOddGroups) {
  on_engines([](const How& how) {
    const Guarded g("forward bf16 h5/1 q33 k1 d64 sink");
    if (!g.given) GTEST_SKIP() << "no address space";
    for (int64_t h = 0; h < 5; ++h) g.set(TESSERA_SINKS, {0, 0, h, 0}, static_cast<double>(h));
    expect_ok(attempt(g.problem, g.bindings, how));
    for (int64_t h = 0; h < 5; ++h)  // one key of score 0 beside the sink
      for (int64_t i = 0; i < 33; ++i)
        ASSERT_NEAR(g.get(TESSERA_LSE, {0, i, h, 0}), std::log(1 + std::exp(static_cast<double>(h))), 1e-5) << h;
  });
}

TEST(Cases, O05_GroupsOfSixInBfloat16) {
  expect_line_right("forward bf16 h24/4 q1 k300 d256");
}

TEST(Cases, P06_GroupsOfSevenAreAsExact) {
  expect_line_right("forward bf16 h28/4 q1 k256 d128");
}

}  // namespace
}  // namespace tessera::test
