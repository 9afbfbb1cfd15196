#include "case.h"

namespace tessera::reference {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// Parts of shape (1, 2, 2, 3) in float64.
struct Merging {
  explicit Merging(size_t parts) : outs(parts), lses(parts), douts(parts), dlses(parts) {
    std::mt19937 random(3);
    const auto fill = [&](std::vector<double>& v, size_t n) {
      for (size_t i = 0; i < n; ++i) v.push_back(static_cast<double>(random()) / 0x1p31 - 1);
    };
    for (size_t n = 0; n < parts; ++n) fill(outs[n], 12), fill(lses[n], 4), douts[n].resize(12), dlses[n].resize(4);
    fill(dout, 12);
    fill(dlse, 4);
    m.parts = static_cast<int64_t>(parts);
    m.batch = 1;
    m.len = m.heads = 2;
    m.dim = 3;
    m.part_out = m.out = m.dout = dense_like({TESSERA_F64, 0, {1, 2, 2, 3}, {}}, TESSERA_F64);
    m.part_lse = m.lse = m.dlse = dense_like({TESSERA_F64, 0, {1, 2, 2, 1}, {}}, TESSERA_F64);
  }
  void run(tessera_pass pass) {
    std::vector<const void*> out_data, lse_data;
    std::vector<void*> dout_data, dlse_data;
    for (size_t n = 0; n < outs.size(); ++n) {
      out_data.push_back(outs[n].data());
      lse_data.push_back(lses[n].data());
      dout_data.push_back(douts[n].data());
      dlse_data.push_back(dlses[n].data());
    }
    m.pass = pass;
    m.part_out_data = out_data.data();
    m.part_lse_data = lse_data.data();
    m.dpart_out_data = dout_data.data();
    m.dpart_lse_data = dlse_data.data();
    m.out_data = out.data();
    m.lse_data = lse.data();
    m.dout_data = dout.data();
    m.dlse_data = dlse.data();
    merge(m);
  }
  double loss() {
    run(TESSERA_FORWARD);
    double sum = 0;
    for (size_t i = 0; i < 12; ++i) sum += dout[i] * out[i];
    for (size_t i = 0; i < 4; ++i)
      if (lse[i] != -infinity) sum += dlse[i] * lse[i];
    return sum;
  }

  tessera_merge m = {};
  std::vector<std::vector<double>> outs, lses, douts, dlses;
  std::vector<double> out = std::vector<double>(12), lse = std::vector<double>(4), dout, dlse;
};

TEST(Merge, TheWorkedExampleInTwoParts) {
  const double scores[] = {1, 2, 3, 0}, v[4][2] = {{10, 0}, {0, 10}, {5, 5}, {9, 1}};
  for (const double shift : {0.0, 1000.0, -1000.0}) {
    Case first("forward f64 k2 d2 bias=1,1,1,k"), second("forward f64 k2 d2 bias=1,1,1,k"), whole("forward f64 d2");
    for (Case* c : {&first, &second}) {
      const int64_t at0 = c == &first ? 0 : 2;
      c->all(TESSERA_Q, 0);
      c->each_is(TESSERA_BIAS, [&](At at) { return scores[at[3] + at0] + shift; });
      c->each_is(TESSERA_V, [&](At at) { return v[at[1] + at0][at[3]]; });
      c->run();
    }
    const void* outs[] = {first.bound.data[TESSERA_OUT], second.bound.data[TESSERA_OUT]};
    const void* lses[] = {first.bound.data[TESSERA_LSE], second.bound.data[TESSERA_LSE]};
    tessera_merge m = {};
    m.parts = 2;
    m.batch = m.len = m.heads = 1;
    m.dim = 2;
    m.part_out = m.out = whole.p.operand[TESSERA_OUT];
    m.part_lse = m.lse = whole.p.operand[TESSERA_LSE];
    m.part_out_data = outs;
    m.part_lse_data = lses;
    m.out_data = whole.bound.data[TESSERA_OUT];
    m.lse_data = whole.bound.data[TESSERA_LSE];
    merge(m);
    EXPECT_NEAR(whole.get(TESSERA_OUT, {0, 0, 0, 0}), 4.379542, 1e-6);
    EXPECT_NEAR(whole.get(TESSERA_OUT, {0, 0, 0, 1}), 5.620458, 1e-6);
  }
}
TEST(Merge, EmptyPartIsTheIdentity) {
  Merging one(1), two(2);
  for (double& x : two.lses[1]) x = -infinity;
  for (double& x : two.outs[1]) x = nan;  // not there, whatever it holds
  one.run(TESSERA_FORWARD);
  two.run(TESSERA_FORWARD);
  EXPECT_EQ(one.out, one.outs[0]);
  EXPECT_EQ(two.out, one.out);
  EXPECT_EQ(two.lse, one.lse);
  two.run(TESSERA_BACKWARD);
  for (const double x : two.douts[1]) EXPECT_EQ(x, 0);
  for (const double x : two.dlses[1]) EXPECT_EQ(x, 0);
  EXPECT_EQ(two.douts[0], two.dout);
}
TEST(Merge, NothingMergedIsEmpty) {
  for (const size_t parts : {size_t{0}, size_t{3}}) {
    Merging all(parts);
    for (auto& lse : all.lses)
      for (double& x : lse) x = -infinity;
    for (double& x : all.dout) x = nan;
    all.run(TESSERA_FORWARD);
    for (const double x : all.out) EXPECT_EQ(x, 0);
    for (const double x : all.lse) EXPECT_EQ(x, -infinity);
    all.run(TESSERA_BACKWARD);
    for (const auto* gradients : {&all.douts, &all.dlses})
      for (const auto& part : *gradients)
        for (const double x : part) EXPECT_EQ(x, 0);
  }
}
TEST(Merge, BackwardIsTheDerivative) {
  Merging m(3);
  m.lses[1][2] = -infinity;
  m.run(TESSERA_BACKWARD);
  const auto slope = [&](double& x) {
    const double kept = x, step = 1e-5;
    x = kept + step;
    const double above = m.loss();
    x = kept - step;
    const double below = m.loss();
    x = kept;
    return (above - below) / (2 * step);
  };
  for (size_t n = 0; n < 3; ++n) {
    for (size_t i = 0; i < 12; ++i) EXPECT_NEAR(m.douts[n][i], slope(m.outs[n][i]), 1e-9);
    for (size_t i = 0; i < 4; ++i) {
      if (m.lses[n][i] == -infinity) continue;
      EXPECT_NEAR(m.dlses[n][i], slope(m.lses[n][i]), 1e-9);
    }
  }
}

}  // namespace
}  // namespace tessera::reference
