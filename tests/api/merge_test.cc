// tessera_merge_run: every sentence with which it refuses, and what it must be right about.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tessera/tessera.hpp>

namespace {

constexpr float infinite = std::numeric_limits<float>::infinity();

// Two parts of one row, one head, two dims, with all that either pass can need.
struct Parts {
  float out_a[2] = {1, 2}, out_b[2] = {3, 6}, lse_a[1] = {0}, lse_b[1] = {0};
  float out[2] = {}, lse[1] = {}, dout[2] = {1, -1}, dlse[1] = {0.5f};
  float dout_a[2] = {}, dout_b[2] = {}, dlse_a[1] = {}, dlse_b[1] = {};
  const void* outs[2] = {out_a, out_b};
  const void* lses[2] = {lse_a, lse_b};
  void* douts[2] = {dout_a, dout_b};
  void* dlses[2] = {dlse_a, dlse_b};
  tessera_merge m;

  explicit Parts(tessera_pass pass = TESSERA_FORWARD) {
    tessera_merge_init(&m);
    m.pass = pass;
    m.parts = 2;
    m.batch = m.len = m.heads = 1;
    m.dim = 2;
    m.part_out = m.out = m.dout = {TESSERA_F32, 0, {1, 1, 1, 2}, {2, 2, 2, 1}};
    m.part_lse = m.lse = m.dlse = {TESSERA_F32, 0, {1, 1, 1, 1}, {1, 1, 1, 1}};
    m.part_out_data = outs;
    m.part_lse_data = lses;
    m.out_data = out;
    m.lse_data = lse;
    m.dout_data = dout;
    m.dlse_data = dlse;
    m.dpart_out_data = douts;
    m.dpart_lse_data = dlses;
  }
  tessera::Status run() {
    return tessera::detail::status_of([&](tessera_error* e) { return tessera_merge_run(&m, e); });
  }
};

TEST(Merge, EverySentence) {
  struct Row {
    tessera_pass pass;
    std::function<void(Parts&)> change;
    const char* sentence;
  };
  const Row rows[] = {
      {TESSERA_FORWARD, [](Parts& p) { p.m.pass = 2; }, "pass is 2; it must be forward (0) or backward (1)"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.parts = 0; }, "parts is 0; it must be at least 1"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.threads = 2000; }, "threads is 2000; it must be from 0 (all) to 1024"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.dim = 0; }, "batch, len, heads, dim are 1, 1, 1, 0; they must be at least"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.part_lse.dtype = TESSERA_F16; }, "it must be f32 or f64"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.part_out.dtype = TESSERA_I32; },
       "part_out.dtype is 5; it must be f64, f32, bf16 or f16"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.lse.dtype = TESSERA_F64; }, "lse.dtype is f64; it must be part_lse's, f32"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.out.extent[3] = 3; }, "out.extent[3] is 3; it must be 2"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.out.stride[3] = -1; }, "out.stride[3] is -1"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.out.stride[3] = 0; }, "elements of an output must not share addresses"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.part_out_data = nullptr; },
       "part_out_data or part_lse_data is NULL; bind one pointer a part"},
      {TESSERA_FORWARD, [](Parts& p) { p.lses[1] = nullptr; }, "part 1 is NULL; bind its out and lse"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.out_data = nullptr; }, "out_data is NULL; bind it"},
      {TESSERA_FORWARD, [](Parts& p) { p.m.lse_data = nullptr; }, "lse_data is NULL; bind it or leave lse absent"},
      {TESSERA_BACKWARD, [](Parts& p) { p.m.dout_data = nullptr; },
       "backward needs dout_data, dpart_out_data and dpart_lse_data"},
      {TESSERA_BACKWARD, [](Parts& p) { p.m.dlse_data = nullptr; }, "dlse_data is NULL; bind it or leave dlse absent"},
      {TESSERA_BACKWARD, [](Parts& p) { p.dlses[0] = nullptr; }, "the gradients of part 0 are NULL; bind them"},
  };
  for (const Row& row : rows) {
    Parts p(row.pass);
    row.change(p);
    const tessera::Status got = p.run();
    EXPECT_EQ(got.code(), TESSERA_INVALID) << row.sentence;
    EXPECT_NE(got.message().find(row.sentence), std::string::npos) << got.message() << "\nwanted: " << row.sentence;
  }
}

TEST(Merge, EqualPartsAreAveraged) {
  for (const int threads : {0, 1, 3}) {
    Parts p;
    p.m.threads = threads;
    p.run().or_throw();
    EXPECT_FLOAT_EQ(p.out[0], 2);
    EXPECT_FLOAT_EQ(p.out[1], 4);
    EXPECT_FLOAT_EQ(p.lse[0], std::log(2.0f));
  }
}

TEST(Merge, EmptyPartsAreTheIdentity) {
  Parts p;
  p.lse_b[0] = -infinite;
  p.out_b[0] = p.out_b[1] = NAN;  // nobody looks
  p.run().or_throw();
  EXPECT_EQ(p.out[0], 1);
  EXPECT_EQ(p.lse[0], 0);
  p.lse_a[0] = -infinite;
  p.run().or_throw();
  EXPECT_EQ(p.out[0], 0);
  EXPECT_EQ(p.lse[0], -infinite);
}

TEST(Merge, NaNStays) {
  for (const int at : {0, 1}) {
    Parts p;
    (at ? p.lse_b : p.lse_a)[0] = NAN;
    (at ? p.lse_a : p.lse_b)[0] = -infinite;
    p.run().or_throw();
    EXPECT_TRUE(std::isnan(p.lse[0]) && std::isnan(p.out[0])) << at;
  }
}

TEST(Merge, BackwardOfEqualParts) {
  Parts p(TESSERA_BACKWARD);
  p.run().or_throw();
  EXPECT_FLOAT_EQ(p.dout_a[0], 0.5f);
  EXPECT_FLOAT_EQ(p.dout_b[1], -0.5f);
  // w (dlse + dout . (out_n - out)), out = {2, 4}: part a 0.5 (0.5 + 1 (-1) - 1 (-2)), part b the other way round.
  EXPECT_FLOAT_EQ(p.dlse_a[0], 0.75f);
  EXPECT_FLOAT_EQ(p.dlse_b[0], -0.25f);
}

}  // namespace
