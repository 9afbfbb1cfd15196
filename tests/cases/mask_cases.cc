// Masks, corners, empty rows.
#include "cases.h"

namespace tessera::test {
namespace {

std::vector<uint8_t> grid(const tools::Case& c) {
  std::vector<uint8_t> all(static_cast<size_t>(c.problem().len_q * c.problem().len_k));
  tessera_error error = tools::fresh_error();
  tools::call(tessera_mask_grid(&c.problem(), &c.bindings(), 0, 0, all.data(), &error), error);
  return all;
}

std::vector<double> averages(const std::string& text, const How& how) {
  Exam c(text);
  c.average_keys();
  run_all(c, how);
  std::vector<double> rows;
  for (int64_t i = 0; i < c.problem().len_q; ++i) rows.push_back(c.get(TESSERA_OUT, {0, i, 0, 0}));
  return rows;
}

TEST(Cases, A01_CausalWithMoreQueriesThanKeys) {
  on_engines([](const How& how) {
    Exam c("backward f16 h1 d32 varlen=q[76,34,146]k[1,1,1] mask=causal dlse");
    for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V})
      c.put(name, [&](const Index& i) { return 3 * c.get(name, i); });
    c.put(TESSERA_DOUT, 1);
    c.put(TESSERA_DLSE, 0);
    const std::vector<int64_t> last = {75, 109, 255};
    const auto empty = [&](int64_t row) { return std::find(last.begin(), last.end(), row) == last.end(); };
    for (int64_t row = 0; row < 256; ++row)
      if (empty(row)) {  // whatever these hold
        c.set(TESSERA_DLSE, {0, row, 0, 0}, nan);
        for (int64_t d = 0; d < 32; ++d) c.set(TESSERA_DOUT, {0, row, 0, d}, nan);
      }
    run_all(c, how);
    const auto lse_of = [&](int64_t row, int64_t key) {  // one key: its score
      double sum = 0;
      for (int64_t d = 0; d < 32; ++d) sum += c.get(TESSERA_Q, {0, row, 0, d}) * c.get(TESSERA_K, {0, key, 0, d});
      return sum / std::sqrt(32.0);
    };
    for (int64_t row = 0; row < 256; ++row)
      for (int64_t d = 0; d < 32; ++d) {
        const int64_t key = static_cast<int64_t>(std::lower_bound(last.begin(), last.end(), row) - last.begin());
        const double want = empty(row) ? 0 : c.get(TESSERA_V, {0, key, 0, d});
        ASSERT_EQ(c.get(TESSERA_OUT, {0, row, 0, d}), want) << row;
        if (d == 0) expect_value(c.get(TESSERA_LSE, {0, row, 0, 0}), empty(row) ? -infinity : lse_of(row, key), 1e-4);
        ASSERT_NEAR(c.get(TESSERA_DQ, {0, row, 0, d}), 0, empty(row) ? 0 : 0.1) << row;
      }
    expect_values(c, TESSERA_DV, std::vector<double>(96, 1), 0);
    expect_all_finite(c, TESSERA_DK);
  });
}

// An empty row that said a large negative number instead of -inf would have a weight in a merge.
TEST(Cases, A02_EmptyCausalRowsHaveLseMinusInfinity) {
  on_engines([](const How& how) {
    Exam c("forward f16 h1 q4 k2 d64 mask=causal"), other("forward f16 h1 q4 k2 d64");
    other.put(TESSERA_K, [](const Index&) { return -200; });
    other.put(TESSERA_Q, 100);  // scores of -160000 or so: lower than any stand-in for -inf in 16 bits
    run_all(c, how);
    run_all(other, how);
    for (const int64_t row : {0, 1}) {
      EXPECT_EQ(c.get(TESSERA_LSE, {0, row, 0, 0}), -infinity);
      for (int64_t d = 0; d < 64; ++d) EXPECT_EQ(c.get(TESSERA_OUT, {0, row, 0, d}), 0);
    }
    Exam merged("forward f16 h1 q4 k2 d64");
    const void* outs[] = {c.bindings().data[TESSERA_OUT], other.bindings().data[TESSERA_OUT]};
    const void* lses[] = {c.bindings().data[TESSERA_LSE], other.bindings().data[TESSERA_LSE]};
    tessera_merge m;
    tessera_merge_init(&m);
    m.parts = 2;
    m.batch = m.heads = 1;
    m.len = 4;
    m.dim = 64;
    m.part_out = m.out = c.operand(TESSERA_OUT);
    m.part_lse = m.lse = c.operand(TESSERA_LSE);
    m.part_out_data = outs;
    m.part_lse_data = lses;
    m.out_data = merged.bindings().data[TESSERA_OUT];
    m.lse_data = merged.bindings().data[TESSERA_LSE];
    tessera_error error = tools::fresh_error();
    tools::call(tessera_merge_run(&m, &error), error);
    for (const int64_t row : {0, 1})
      for (int64_t d = 0; d < 64; ++d)
        EXPECT_EQ(merged.get(TESSERA_OUT, {0, row, 0, d}), other.get(TESSERA_OUT, {0, row, 0, d}));
  });
}

TEST(Cases, A03_TopLeftVersusBottomRight) {
  on_engines([](const How& how) {
    EXPECT_EQ(averages("forward f32 h1 q2 k5 d8 mask=causal", how), (std::vector<double>{1.5, 2.0}));
    EXPECT_EQ(averages("forward f32 h1 q2 k5 d8 mask=causal@top_left", how), (std::vector<double>{0.0, 0.5}));
    EXPECT_EQ(averages("forward f32 h1 q2 k5 d8 mask=causal@at(1)", how), (std::vector<double>{0.5, 1.0}));
    EXPECT_EQ(averages("forward f32 h1 q1 k8 d8 mask=causal", how), (std::vector<double>{3.5}));
    EXPECT_EQ(averages("forward f32 h1 q1 k8 d8 mask=causal@top_left", how), (std::vector<double>{0.0}));
  });
}

// In C the corner is never implied.
TEST(Cases, A03_TheCornerMustBeSaid) {
  tessera_problem p = tools::Line("forward f32 h1 q4 k4 d8 mask=causal").problem();
  p.mask.corner = TESSERA_CORNER_UNSET;
  tessera_error error = tools::fresh_error();
  EXPECT_EQ(tessera_check(&p, &error), TESSERA_INVALID);
  EXPECT_NE(std::string(error.message).find("corner"), std::string::npos) << error.message;
}

TEST(Cases, A04_WindowWithMoreQueriesThanKeys) {
  on_engines([](const How& how) {
    Exam c("forward f16 h1 q129 k32 d64 mask=window(32,64)");
    c.average_keys();
    run_all(c, how);
    for (int64_t i = 0; i < 129; ++i) {
      const int64_t p = i + 32 - 129, seen = std::min<int64_t>(31, p + 64) - std::max<int64_t>(0, p - 32) + 1;
      const double lse = c.get(TESSERA_LSE, {0, i, 0, 0});
      expect_value(lse, seen > 0 ? std::log(static_cast<double>(seen)) : -infinity, 1e-5, fmt::format("row {}", i));
      if (seen <= 0) {
        EXPECT_EQ(c.get(TESSERA_OUT, {0, i, 0, 0}), 0);
      }
    }
    const auto lse = [&](int64_t row) { return c.get(TESSERA_LSE, {0, row, 0, 0}); };
    EXPECT_EQ(lse(32), -infinity);  // 33 empty rows, this the last of them
    EXPECT_EQ(lse(33), 0);
    EXPECT_NEAR(lse(128), std::log(32.0), 1e-5);
  });
}

TEST(Cases, A06_WindowIsInclusive) {
  on_engines([](const How& how) {
    EXPECT_EQ(averages("forward f32 h1 q6 k6 d8 mask=causal&window(2,0)", how).back(), 4.0);
    EXPECT_EQ(averages("forward f32 h1 q6 k6 d8 mask=causal&window(3,0)", how).back(), 3.5);
  });
}

TEST(Cases, A07_CausalSaidAsAWindow) {
  const std::string line = "forward f16 h2 q300 k300 d32 mask=";
  const std::vector<uint8_t> causal = grid(make_case(line + "causal"));
  for (const char* window : {"window(unbounded,0)", "window(300,0)", "window(299,0)", "prefix(0)"}) {
    EXPECT_EQ(grid(make_case(line + window)), causal) << window;
    on_engines([&](const How& how) {
      Exam one(line + "causal"), other(line + window);
      run_all(one, how);
      run_all(other, how);
      expect_values(other, TESSERA_OUT, one.values(TESSERA_OUT), 2e-3);
      expect_values(other, TESSERA_LSE, one.values(TESSERA_LSE), 2e-5);
    });
  }
  EXPECT_NE(grid(make_case(line + "window(298,0)")), causal);
}

// Dropping keys 0..126 is right; a pull request elsewhere calls it the bug.
TEST(Cases, A09_WindowInDecode) {
  on_engines([](const How& how) {
    EXPECT_NEAR(averages("forward f32 h1 q1 k256 d8 mask=window(128,0)", how)[0], (127.0 + 255.0) / 2, 1e-4);
    EXPECT_EQ(averages("forward f32 h1 q1 k256 d8 mask=window(128,0)@top_left", how)[0], 0);
  });
}

TEST(Cases, A10_SoftcapBeforeTheMask) {
  on_engines([](const How& how) {
    Exam c("forward f32 h1 q2 k2 d1 mask=causal softcap=1");
    c.average_keys();
    c.put_list(TESSERA_V, {1, 100});
    run_all(c, how);
    expect_values(c, TESSERA_OUT, {1, 50.5}, 1e-5);
  });
}

TEST(Cases, A12_NeighbouringBlocksWithoutKeys) {
  on_engines([](const How& how) {
    Exam c("forward f16 h1 q1024 k1024 d8 mask=documents");
    c.put(TESSERA_DOCUMENTS_K, [](const Index& i) { return i[1] / 128; });
    c.put(TESSERA_DOCUMENTS_Q, [](const Index& i) { return i[1] / 128 == 3 || i[1] / 128 == 4 ? -1 : i[1] / 128; });
    c.put(TESSERA_Q, 0);
    c.put(TESSERA_V, [](const Index& i) { return i[1] / 128; });
    run_all(c, how);
    for (int64_t i = 0; i < 1024; ++i) {
      const int64_t block = i / 128;
      const bool empty = block == 3 || block == 4;
      ASSERT_NEAR(c.get(TESSERA_OUT, {0, i, 0, 0}), empty ? 0 : static_cast<double>(block), empty ? 0 : 0.005) << i;
      expect_value(c.get(TESSERA_LSE, {0, i, 0, 0}), empty ? -infinity : std::log(128.0), 1e-5);
    }
  });
}

// A plan is made once and for all: what its maker does with the problem afterwards is nothing to it.
TEST(Cases, A14_PlansAreImmutable) {
  Exam c("forward f32 h1 q4 k4 d1 mask=keep");
  c.average_keys();
  c.put(TESSERA_KEEP, [](const Index& i) { return i[3] == 3; });
  on_engines([&](const How& how) {
    tools::Choice choice;
    choice.kernels = how.kernels;
    tessera_problem problem = c.problem();
    tools::Runner with_keep(c, problem, choice);
    problem.operand[TESSERA_KEEP] = {};
    problem.mask.corner = TESSERA_BOTTOM_RIGHT;
    problem.mask.causal = 1;
    tools::Runner causal(c, problem, choice);
    problem = {};
    for (int turn = 0; turn < 2; ++turn) {
      with_keep.run();
      expect_values(c, TESSERA_OUT, {3, 3, 3, 3}, 0);
      causal.run();
      expect_values(c, TESSERA_OUT, {0, 0.5, 1, 1.5}, 1e-6);
    }
  });
}

// Both sizes stand in the refusal.
TEST(Cases, A16_MaskMadeForAnotherLength) {
  tessera_problem p = tools::Line("forward bf16 h1 q1200 k1200 d16 mask=keep").problem();
  tessera_operand& keep = p.operand[TESSERA_KEEP];
  keep.extent[2] = keep.extent[3] = keep.stride[2] = 1280;
  expect_invalid(attempt(p, {}), {"keep", "1280", "1200"});

  tessera_problem q = tools::Line("forward bf16 b2 h1 q3 k17 d16 mask=exclude_keys").problem();
  q.operand[TESSERA_EXCLUDE_KEYS].extent[1] = q.operand[TESSERA_EXCLUDE_KEYS].stride[0] = 20;
  expect_invalid(attempt(q, {}), {"exclude_keys", "20", "17"});
}

}  // namespace
}  // namespace tessera::test
