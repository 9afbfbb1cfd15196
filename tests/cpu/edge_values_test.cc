// Values at the edge of their types, and what bits may depend on.
#include <cmath>
#include <limits>

#include "engine.h"
#include "tests/cases/cases.h"

namespace tessera::test {
namespace {

constexpr double infinite = std::numeric_limits<double>::infinity();

// Sums that cancel to -0 in one tile must not be told from 0 by the number of empty tiles that follow, which depends on
// how many rows stand in the tile and so on the number of threads.
TEST(EdgeValues, MinusZeroIsZero) {
  std::vector<std::byte> bits;
  for (const int rows : {1, 64, 256, 1000}) {
    Exam c("forward f32 q1000 k1000 d1 mask=causal");
    c.put(TESSERA_Q, 1);
    c.put(TESSERA_K, [](const Index& i) { return i[1] == 512 ? 200 : 0; });
    c.put(TESSERA_V, [](const Index& i) { return i[1] < 512 ? -5.0 : i[1] == 512 ? -0.0 : i[1] < 640 ? -1.0 : 1.0; });
    run_all(c, {"cpu", 1, rows});
    if (bits.empty()) bits = output_bits(c);
    EXPECT_EQ(output_bits(c), bits) << rows;
  }
}

// A weight too small for float32 is still above 0: what it is multiplied with decides, if that is infinite.
TEST(EdgeValues, AnInfiniteValueIsNotLostToASmallWeight) {
  on_engines([](const How& how) {
    for (const bool first : {true, false}) {  // the infinite value before the large score, and after it
      Exam c("forward f32 q1 k130 d1");
      c.put(TESSERA_Q, 1);
      c.put(TESSERA_K, [&](const Index& i) { return i[1] == (first ? 129 : 0) ? 100 : 5; });
      c.put(TESSERA_V, [&](const Index& i) { return i[1] == (first ? 0 : 129) ? infinite : 1; });
      run_all(c, how);
      EXPECT_EQ(c.get(TESSERA_OUT, {0, 0, 0, 0}), infinite) << first;
      expect_right(c, "an infinite value");
    }
  });
}

TEST(EdgeValues, TheLargestScoreMayBeInfiniteOrNoNumber) {
  on_engines([](const How& how) {
    for (const double x : {infinite, std::nan("")}) {
      Exam c("forward f32 q1 k2 d1 max bias=1,1,1,k");
      c.put_list(TESSERA_BIAS, {x, 0});
      run_all(c, how);
      const double most = c.get(TESSERA_MAX_SCORE, {0, 0, 0, 0});
      EXPECT_TRUE(std::isnan(x) ? std::isnan(most) : most == infinite) << most;
      EXPECT_TRUE(std::isnan(c.get(TESSERA_OUT, {0, 0, 0, 0})));
    }
  });
}

TEST(EdgeValues, NumbersThatDoNotFitTheEngineAreRefused) {
  for (const char* line :
       {"forward f32 q4 k4 d4 softcap=1e39", "forward f32 q4 k4 d4 scale=1e39", "forward bf16 q4 k4 d4 softcap=1e-39"})
    EXPECT_THROW(tools::Line{line}, tools::Error) << line;
  EXPECT_NO_THROW(tools::Line{"forward f64 q4 k4 d4 softcap=1e39 scale=1e39"});
}

TEST(EdgeValues, WhatIsWrittenIsNotRead) {
  const tools::Case c = make_case("forward f32 q4 k4 d4");
  tessera_bindings bound = c.bindings();
  bound.data[TESSERA_OUT] = bound.data[TESSERA_V];
  expect_invalid(attempt(c.problem(), bound, {"cpu", 1}), {"out", "v", "one address"});
}

// Extents without memory (stride 0) make huge problems out of nothing; their workspace must not wrap.
TEST(EdgeValues, WorkspaceOfAHugeProblemIsRefusedOrCounted) {
  tessera_problem p = tools::Line("backward f32 h8 d1 varlen=q[1]k[1]").problem();
  p.heads_q = p.heads_kv = p.rows_q = INT32_MAX;
  tessera_error error = tools::fresh_error();
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    tessera_operand& o = p.operand[name];
    if (o.dtype == TESSERA_ABSENT || o.dtype == TESSERA_I32) continue;
    o.extent[1] =
        name == TESSERA_K || name == TESSERA_V || name == TESSERA_DK || name == TESSERA_DV ? o.extent[1] : INT32_MAX;
    o.extent[2] = INT32_MAX;
    for (int64_t& stride : o.stride) stride = 0;
  }
  EXPECT_EQ(tessera_check(&p, &error), TESSERA_INVALID);
  EXPECT_NE(std::string(error.message).find("below 2^56"), std::string::npos) << error.message;
}

}  // namespace
}  // namespace tessera::test
