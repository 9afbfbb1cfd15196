// Splits and merges, lse, scale, and backward.
#include "caches.h"

namespace tessera::test {
namespace {

// Forward merge of cases with one query row a head.
void merge(const std::vector<const Exam*>& parts, Exam& into) {
  const tessera_problem& p = into.problem();
  std::vector<const void*> outs, lses;
  for (const Exam* part : parts) {
    outs.push_back(part->bindings().data[TESSERA_OUT]);
    lses.push_back(part->bindings().data[TESSERA_LSE]);
  }
  tessera_merge m;
  tessera_merge_init(&m);
  m.parts = static_cast<int64_t>(parts.size());
  m.batch = p.batch;
  m.len = p.len_q;
  m.heads = p.heads_q;
  m.dim = p.dim_v;
  m.part_out = parts[0]->operand(TESSERA_OUT);
  m.part_lse = parts[0]->operand(TESSERA_LSE);
  m.out = into.operand(TESSERA_OUT);
  m.lse = into.operand(TESSERA_LSE);
  m.part_out_data = outs.data();
  m.part_lse_data = lses.data();
  m.out_data = into.bindings().data[TESSERA_OUT];
  m.lse_data = into.bindings().data[TESSERA_LSE];
  tessera_error error = tools::fresh_error();
  tools::call(tessera_merge_run(&m, &error), error);
}

TEST(Cases, H01_OneBaseForEveryLse) {
  on_engines([](const How& how) {
    Exam prefix("forward f32 q1 k3072 d4"), suffix("forward f32 q1 k64 d4"), whole("forward f32 q1 k1 d4");
    for (Exam* c : {&prefix, &suffix}) {
      c->put(TESSERA_Q, 0);
      c->put(TESSERA_V, c == &suffix ? 1 : 0);
      run_all(*c, how);
    }
    merge({&prefix, &suffix}, whole);
    const double weight = 64.0 / 3136;  // 0.0204; in a wrong base 0.0037
    expect_values(whole, TESSERA_OUT, {weight, weight, weight, weight}, 1e-6);
    expect_values(whole, TESSERA_LSE, {std::log(3136.0)}, 1e-5);
  });
}

// A prefix and a suffix in pages, split between threads or not.
TEST(Cases, H01_PartsInPagesMerge) {
  for (const std::string& kernel : kernels_for("decode f32 d4"))
    for (const int threads : {1, 3}) {
      Exam prefix("decode f32 k3072 d4 page=16"), suffix("decode f32 k64 d4 page=16 append"),
          whole("forward f32 q1 k1 d4");
      for (Exam* c : {&prefix, &suffix}) {
        c->put(TESSERA_Q, 0);
        put_keys(*c, TESSERA_V, [&](int64_t, int64_t, int64_t, int64_t) { return c == &suffix ? 1 : 0; });
        tools::poison(*c);
        run_all(*c, {kernel, threads});
      }
      merge({&prefix, &suffix}, whole);
      const double weight = 64.0 / 3136;
      expect_values(whole, TESSERA_OUT, {weight, weight, weight, weight}, 1e-6);
      expect_values(whole, TESSERA_LSE, {std::log(3136.0)}, 1e-5);
    }
}

// Parts of any sizes, one of them without a key, merge to the whole.
TEST(Cases, H02_PartsMergeToTheWhole) {
  on_engines([](const How& how) {
    Exam whole("forward f32 h4/2 q3 k100 d16"), into("forward f32 h4/2 q3 k1 d16");
    run_all(whole, how);
    std::vector<Exam> parts;
    std::vector<const Exam*> all;
    const int64_t cuts[] = {0, 1, 1, 65, 100};
    for (int n = 0; n < 4; ++n) {
      parts.emplace_back(fmt::format("forward f32 h4/2 q3 k{} d16", cuts[n + 1] - cuts[n]));
      for (const int name : {TESSERA_K, TESSERA_V})
        parts.back().put(name, [&](const Index& i) { return whole.get(name, {0, cuts[n] + i[1], i[2], i[3]}); });
      run_all(parts.back(), how);
    }
    for (const Exam& part : parts) all.push_back(&part);
    merge(all, into);
    expect_values(into, TESSERA_OUT, whole.values(TESSERA_OUT), 1e-6);
    expect_values(into, TESSERA_LSE, whole.values(TESSERA_LSE), 1e-5);
  });
}

TEST(Cases, H03_LseOfAPackedBatchIsPacked) {
  std::string lengths = "[32768";
  for (int n = 0; n < 255; ++n) lengths += ",16";
  const tools::Line line("forward bf16 h32 d64 varlen=q" + lengths + "]k" + lengths + "] mask=causal");
  EXPECT_EQ(span_bytes(line.problem().operand[TESSERA_LSE]), size_t{4} * 32 * (32768 + 255 * 16));
  const tools::Line decode("decode bf16 h32 d64 varlen=q" + lengths + "] k65536 page=16 mask=causal");
  EXPECT_EQ(span_bytes(decode.problem().operand[TESSERA_LSE]), size_t{4} * 32 * (32768 + 255 * 16));
}

TEST(Cases, H04_LseOfEveryRow) {
  on_engines([](const How& how) {
    Exam c("forward f32 b3 h2 q7 k6 d8 seqused=q[5,1,7]");
    c.put(TESSERA_Q, 0);
    run_all(c, how);
    const int64_t used[] = {5, 1, 7};
    for (int64_t b = 0; b < 3; ++b)
      for (int64_t i = 0; i < 7; ++i)
        for (int64_t h = 0; h < 2; ++h) {
          expect_value(c.get(TESSERA_LSE, {b, i, h, 0}), i < used[b] ? std::log(6.0) : -infinity, 1e-6);
          EXPECT_EQ(c.get(TESSERA_OUT, {b, i, h, 3}) == 0, i >= used[b]);
        }
    Exam packed("forward f32 h2 d8 varlen=q[5,1]k[6,6] rows=q9");
    packed.put(TESSERA_Q, 0);
    run_all(packed, how);
    for (int64_t i = 0; i < 9; ++i)
      expect_value(packed.get(TESSERA_LSE, {0, i, 1, 0}), i < 6 ? std::log(6.0) : -infinity, 1e-6);
  });
}

TEST(Cases, H05_ScaleIsANumberOfTheRun) {
  on_engines([](const How& how) {
    for (const double scale : {1 / std::sqrt(128.0), 3 / std::sqrt(128.0), 1.0, 0.0, -0.25}) {
      Exam c(fmt::format("forward f32 q1 k2 d128 scale={}", scale));
      c.put(TESSERA_Q, 0.125);
      c.put(TESSERA_K, [](const Index& i) { return i[1]; });  // q . k is 0 and 16
      c.put(TESSERA_V, [](const Index& i) { return i[1]; });
      run_all(c, how);
      EXPECT_NEAR(c.get(TESSERA_OUT, {}), 1 / (1 + std::exp(-16 * scale)), 1e-6) << scale;
      EXPECT_NEAR(c.get(TESSERA_LSE, {}), std::log(1 + std::exp(16 * scale)), 2e-5) << scale;
    }
  });
}

// Asked for beforehand, with lse in it; less is refused, with both numbers, before anything is written.
TEST(Cases, H07_WorkspaceIsKnownBeforehand) {
  for (const char* line :
       {"forward bf16 h64/8 q64 k64 d16 mask=causal", "backward f32 h4/2 q33 k33 d16 bias=1,h,q,k sink alibi"}) {
    Exam c(line);
    tools::Choice choice;
    choice.kernels = "cpu";
    const int64_t bytes = tools::Plan(c.problem(), choice).facts().workspace_bytes;
    for (const int name : tools::outputs(c.problem())) c.wipe(name);
    const std::vector<std::byte> before = output_bits(c);
    expect_invalid(attempt(c.problem(), c.bindings(), {}, 0xFF, 1),
                   {"workspace", std::to_string(bytes).c_str(), std::to_string(bytes - 1).c_str()});
    EXPECT_TRUE(output_bits(c) == before);
    choice.workspace_limit = 63;
    try {
      const tools::Plan plan(c.problem(), choice);
      ADD_FAILURE() << "a plan over the limit";
    } catch (const tools::Error& error) {
      EXPECT_EQ(error.code, TESSERA_UNSUPPORTED);
      EXPECT_NE(std::string(error.what()).find("63"), std::string::npos) << error.what();
    }
  }
  const tools::Plan plan(tools::Line("forward bf16 h64 q16384 k16384 d128").problem(), {});
  EXPECT_GT(plan.facts().workspace_bytes, 0);
}

// delta = dO . out of alternating +-100.5 x 100.5 but for one 101 is 50.25; products in bfloat16 make it 64.
TEST(Cases, H09_RowSumsOfDoutOutAreExact) {
  on_engines([](const How& how) {
    Exam c("backward bf16 q1 k1 d1/128 scale=1");
    c.put(TESSERA_Q, 0);
    c.put(TESSERA_K, 1);
    c.put(TESSERA_V, 0);
    c.put(TESSERA_LSE, 0);
    c.put(TESSERA_OUT, [](const Index& i) { return i[3] == 0 ? 101 : 100.5; });
    c.put(TESSERA_DOUT, [](const Index& i) { return i[3] % 2 ? -100.5 : 100.5; });
    expect_ok(attempt(c.problem(), c.bindings(), how));
    expect_values(c, TESSERA_DQ, {-50.25}, 0);
    expect_values(c, TESSERA_DK, {0}, 0);
  });
}

TEST(Cases, I01_OneEmptyRowPoisonsNothing) {
  on_engines([](const How& how) {
    const std::string mask = " mask=exclude_keys&window(0,0)@top_left dlse";
    Exam c("backward f32 b2 h1 q4 k4 d1" + mask), without("backward f32 b2 h1 q4 k4 d1 seqused=q[4,2]" + mask);
    for (Exam* one : {&c, &without}) one->put_list(TESSERA_EXCLUDE_KEYS, {0, 0, 0, 0, 0, 0, 1, 1});
    for (const int64_t row : {2, 3})  // these see nothing
      for (const int name : {TESSERA_DOUT, TESSERA_DLSE, TESSERA_Q}) c.set(name, {1, row, 0, 0}, nan);
    run_all(c, how);
    run_all(without, how);
    for (const int name : {TESSERA_DQ, TESSERA_DK, TESSERA_DV}) {
      expect_all_finite(c, name);
      expect_values(c, name, without.values(name), 1e-6);
    }
    EXPECT_EQ(c.get(TESSERA_DQ, {1, 2, 0, 0}), 0);
  });
}

TEST(Cases, I03_SoftcapInBackward) {
  on_engines([](const How& how) {
    for (const double cap : {0.5, 10.0, 15.0}) {
      Exam c(fmt::format("backward f64 q1 k2 d1 scale=2 softcap={}", cap));
      c.put(TESSERA_Q, 1.5);
      c.put_list(TESSERA_K, {1, -0.5});
      c.put_list(TESSERA_V, {1, 0});
      c.put(TESSERA_DOUT, 1);
      run_all(c, how);
      const double u0 = std::tanh(3 / cap), u1 = std::tanh(-1.5 / cap), p = 1 / (1 + std::exp(cap * (u1 - u0)));
      const double dz0 = p * (1 - p) * (1 - u0 * u0), dz1 = -p * (1 - p) * (1 - u1 * u1);
      expect_values(c, TESSERA_OUT, {p}, 1e-14);
      expect_values(c, TESSERA_DQ, {2 * (dz0 - 0.5 * dz1)}, 1e-14);
      expect_values(c, TESSERA_DK, {3 * dz0, 3 * dz1}, 1e-14);
      expect_values(c, TESSERA_DV, {p, 1 - p}, 1e-14);
    }
  });
  expect_line_right("backward bf16 b1 h2 q129 k129 d128 mask=causal softcap=10");
  expect_line_right("backward bf16 h2 d64 varlen=q[128,40]k[217,40] mask=causal softcap=15");
}

// The gradient of a bias that broadcasts is that of the full one, summed; never a silent zero.
TEST(Cases, I04_GradientOfEveryBias) {
  on_engines([](const How& how) {
    for (const char* dims : {"1,h,q,k", "b,1,q,k", "1,1,1,k", "b,h,q,k", "1,1,q,1", "b,1,1,k", "1,1,1,1"}) {
      SCOPED_TRACE(dims);
      const std::string line = "backward f64 b3 h4/2 q13 k33 d5 mask=causal dlse bias=";
      Exam small(line + dims), full(line + "b,h,q,k");
      const auto narrow = [&](Index i) {
        for (size_t d = 0; d < 4; ++d) i[d] = std::min(i[d], small.operand(TESSERA_BIAS).extent[d] - 1);
        return i;
      };
      full.put(TESSERA_BIAS, [&](const Index& i) { return small.get(TESSERA_BIAS, narrow(i)); });
      run_all(small, how);
      run_all(full, how);
      const std::vector<double> got = small.values(TESSERA_DBIAS);
      small.put(TESSERA_DBIAS, 0);
      tools::for_each_index(tools::extents(full.operand(TESSERA_DBIAS)), [&](const Index& i) {
        small.set(TESSERA_DBIAS, narrow(i), small.get(TESSERA_DBIAS, narrow(i)) + full.get(TESSERA_DBIAS, i));
      });
      expect_values(small, TESSERA_DBIAS, got, 1e-12);
      EXPECT_NE(full.get(TESSERA_DBIAS, {2, 3, 12, 30}), 0);
    }
  });
  expect_line_right("backward f32 b16 h2 q33 k33 d8 bias=1,h,q,k");
}

TEST(Cases, I05_OnePackedSequenceIsADenseOne) {
  on_engines([](const How& how) {
    Exam packed("backward bf16 h4 d32 varlen=q[256]k[256]"), dense("backward f32 h4 q256 k256 d32");
    for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_DOUT})
      dense.put(name, [&](const Index& i) { return packed.get(name, i); });
    run_all(packed, how);
    run_all(dense, how);
    for (const int name : {TESSERA_DQ, TESSERA_DK, TESSERA_DV}) {
      const std::vector<double> got = packed.values(name), want = dense.values(name);
      double largest = 0;
      for (const double x : want) largest = std::max(largest, std::abs(x));
      for (size_t n = 0; n < want.size(); ++n) ASSERT_NEAR(got[n], want[n], 0.02 * largest) << tessera_name_text(name);
    }
  });
}

// float32 means float32: 1 + 2^-12 does not survive a TF32 product.
TEST(Cases, M09_Float32IsFloat32) {
  on_engines([](const How& how) {
    Exam c("forward f32 q1 k1 d1 scale=1");
    c.put(TESSERA_Q, 1 + 0x1p-12);
    c.put(TESSERA_K, 1);
    c.put(TESSERA_V, 1 + 0x1p-20);
    run_all(c, how);
    expect_values(c, TESSERA_LSE, {1 + 0x1p-12}, 0);
    expect_values(c, TESSERA_OUT, {1 + 0x1p-20}, 0);
  });
  expect_line_right("backward f32 h1 q128 k128 d32 mask=causal");
}

}  // namespace
}  // namespace tessera::test
