// Groups of heads, head dims, sinks.
#include "caches.h"

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

TEST(Cases, F01_GroupSizesInPages) {
  for (const char* heads : {"28/4", "24/4", "40/8", "12/1", "64/4", "71/1", "128/1", "64/2", "64/1"})
    expect_one_answer(
        {fmt::format("decode bf16 h{} k256 d128 page=16", heads), fmt::format("forward bf16 h{} k256 d128", heads)});
  for (const char* dtype : {"f16", "f32"})
    for (const char* heads : {"10/2", "14/2", "12/1", "71/1"}) {
      const std::string head = fmt::format("{} h{} q2 k37 d16 mask=causal", dtype, heads);
      expect_one_answer({fmt::format("decode {} append page=16", head), "forward " + head});
    }
}

// Groups of 7 under tiles of rows that no 7 divides, and keys that are split: rows are joined one by one.
TEST(Cases, F03_GroupsOfSevenOverSplitKeys) {
  for (const std::string& dtype : dtypes)
    for (const char* place : {"", " page=16"}) {
      const std::string line =
          fmt::format("decode {} h14/2 q3 k5000 d16 append mask=causal batch_invariant{}", dtype, place);
      Exam c = poisoned(line);
      for (const std::string& kernel : kernels_for(line)) {
        run_all(c, {kernel, 1});
        expect_right(c, line);
        const std::vector<std::byte> bits = result_bits(c, 0);
        for (const int threads : {2, 5})
          for (const int rows : {0, 1, 5, 16}) {
            const How how = {kernel, threads, rows};
            if (rows == 0 || rows > 5) {  // else there are tiles enough for all
              EXPECT_TRUE(has_step(tools::Plan(c.problem(), how), "combine"));
            }
            run_all(c, how);
            ASSERT_TRUE(result_bits(c, 0) == bits) << line << " on " << kernel << " " << threads << " " << rows;
          }
      }
    }
}

// Rows of a group of 16 are all stored, by a plan that is run again as by a new one.
TEST(Cases, F04_AllRowsOfAGroup) {
  for (const std::string& dtype : dtypes)
    for (const char* options : {"", " page=16 append mask=causal"}) {
      const std::string line = fmt::format("decode {} h64/4 k{} d128{}", dtype, sanitized ? 70 : 1100, options);
      for (const std::string& kernel : kernels_for(line)) {
        Exam c(line);
        c.put(TESSERA_Q, 0);
        put_keys(c, TESSERA_V, [](int64_t, int64_t, int64_t h, int64_t) { return 1 + h; });
        tools::poison(c);
        tools::Runner runner(c, {kernel, 2});
        for (int turn = 0; turn < 3; ++turn) {
          for (const int name : tools::outputs(c.problem())) c.wipe(name);
          runner.run();
          for (int64_t h = 0; h < 64; ++h)
            for (int64_t d = 0; d < 128; ++d)
              ASSERT_NEAR(c.get(TESSERA_OUT, {0, 0, h, d}), static_cast<double>(1 + h / 16), 1e-5) << turn << " " << h;
        }
        const std::vector<std::byte> bits = result_bits(c, 0);
        run_all(c, {kernel, 1});
        EXPECT_TRUE(result_bits(c, 0) == bits) << line << kernel;
      }
    }
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

TEST(Cases, F07_HeadDimsInPages) {
  for (const int d :
       {1, 2, 7, 8, 40, 56, 59, 63, 64, 72, 80, 88, 96, 112, 120, 128, 132, 160, 192, 224, 256, 320, 512, 576})
    for (const std::string& dtype : dtypes) {
      if (sanitized && d % 3) continue;
      const std::string head = fmt::format("{} h4/2 q2 k37 d{} mask=causal", dtype, d);
      expect_one_answer({fmt::format("decode {} append page=16", head), "forward " + head});
    }
}

TEST(Cases, F08_DvUnlikeD) {
  for (const char* dims : {"192/128", "64/128", "64/512", "576/512", "128/64", "16/48", "1/129", "129/1"}) {
    expect_line_right(fmt::format("forward bf16 h4/2 q17 k65 d{} mask=causal", dims));
    expect_line_right(fmt::format("backward bf16 h2/1 q9 k33 d{}", dims));
  }
  expect_line_right("forward f16 q129 k769 d64/128 mask=causal");
}

TEST(Cases, F08_DvUnlikeDInCaches) {
  for (const std::string& dtype : dtypes) {
    for (const char* dims : {"192/128", "64/128", "64/512", "128/64", "16/48", "1/129", "129/1"}) {
      const std::string head = fmt::format("{} b2 h4/2 q2 k37 d{} mask=causal", dtype, dims);
      expect_one_answer(
          {fmt::format("decode {} append page=16", head), fmt::format("decode {} append", head), "forward " + head});
    }
    // MLA: values are the first numbers of the keys, which one latent head holds.
    for (const char* dims : {"576/512", "48/32", "5/5", "7/3"}) {
      const std::string head = fmt::format("{} b2 h16/1 q2 k70 d{} mask=causal", dtype, dims);
      const std::string latent = fmt::format("decode {} append v_in_k", head);
      expect_one_answer({latent, latent + " page=16", latent + " layout=bhsd",
                         fmt::format("decode {} append page=64", head), "forward " + head});
      expect_one_answer({fmt::format("append {} b2 h1 n3 k70 d{} v_in_k page=16", dtype, dims),
                         fmt::format("append {} b2 h1 n3 k70 d{} v_in_k", dtype, dims)});
    }
  }
  expect_one_answer({"decode f16 q129 k769 d64/128 mask=causal page=16", "forward f16 q129 k769 d64/128 mask=causal"});
  expect_line_right("decode bf16 b2 h16/1 q2 k70 d576/512 v_in_k append page=64 mask=causal cache_lens=[68,9] out=f32");
}

// On a CPU the limit is that of the workspace, not of shared memory: for every dim there are tiles that fit in, or the
// refusal says what is needed and what there is; and what fits answers.
TEST(Cases, F09_LargeDimsInLittleWorkspace) {
  for (const char* dims : {"64", "128", "192/128", "192", "256", "512", "576/512"})
    for (const char* pass :
         {"forward bf16 h2 q70 k200 ", "decode bf16 h4/2 q2 k200 append page=16 ", "backward bf16 h2 q40 k90 "})
      for (const int64_t limit : {48, 64, 99, 100, 163, 227}) {
        const std::string line = fmt::format("{}d{}", pass, dims);
        SCOPED_TRACE(fmt::format("{} within {} KiB", line, limit));
        const tessera_problem p = tools::Line(line).problem();
        tools::Choice choice{"cpu", 1};
        choice.workspace_limit = limit * 1024;
        bool fits = false;
        for (const int tile : {0, 32, 16, 8, 1}) {
          choice.tile_rows = choice.tile_keys = tile;
          try {
            const tools::Plan plan(p, choice);
            ASSERT_LE(plan.facts().workspace_bytes, limit * 1024);
            fits = true;
            break;
          } catch (const tools::Error& error) {
            ASSERT_EQ(error.code, TESSERA_UNSUPPORTED);
            const std::string what = error.what();
            ASSERT_NE(what.find(std::to_string(limit * 1024)), std::string::npos) << what;
            ASSERT_NE(what.find("bytes of workspace"), std::string::npos) << what;
          }
        }
        EXPECT_TRUE(fits || limit < 227 || *pass == 'b') << "no tile";
        if (!fits || (limit != 48 && limit != 227)) continue;
        tools::Case c = make_case(line);
        if (c.problem().pass == TESSERA_BACKWARD) run(c, tools::forward_of(c.problem()), {"cpu", 1});
        run(c, c.problem(), choice);
        expect_right(c, line);
      }
}

// Nothing is left of one run in the next, nor of one thread in another.
TEST(Cases, F11_LargeDimsWithGroups) {
  const std::string head = "f16 h16/2 q17 k129 d512 mask=causal";
  expect_one_answer({"decode " + head + " append page=16", "forward " + head});
  Exam c = poisoned("decode " + head + " append page=16");
  std::optional<std::vector<std::byte>> bits;
  for (int turn = 0; turn < (sanitized ? 3 : 20); ++turn) {
    run_all(c, {"cpu", 1 + turn % 4});
    if (!bits) bits = output_bits(c);
    EXPECT_TRUE(output_bits(c) == *bits) << turn;
  }
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
