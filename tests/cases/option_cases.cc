// Every option changes the result: none is accepted and dropped. And one example by hand.
#include "cases.h"

namespace tessera::test {
namespace {

struct Row {
  const char* base;
  const char* changed;
  int output;  // that must differ
};

// What the lines share; masks need a corner of their own.
constexpr const char* forward = "forward f32 b2 h2/1 d8 q40 k50";
constexpr const char* backward = "backward f32 b2 h2/1 d8 q40 k50";

const Row forward_rows[] = {
    {"", "mask=causal", TESSERA_OUT},
    {"mask=causal", "mask=causal@top_left", TESSERA_OUT},
    {"mask=causal", "mask=causal@at(11)", TESSERA_OUT},
    {"mask=causal@at(11)", "mask=causal@at[11,12]", TESSERA_OUT},
    {"", "mask=window(5,unbounded)", TESSERA_OUT},
    {"", "mask=window(unbounded,5)", TESSERA_OUT},
    {"mask=window(5,5)", "mask=window(6,5)", TESSERA_OUT},
    {"mask=window(5,5)", "mask=window(5,4)", TESSERA_OUT},
    {"mask=window(5,5)", "mask=window(5,5)@top_left", TESSERA_OUT},
    {"mask=window(5,0)", "mask=window(5,0)&first(1)", TESSERA_OUT},
    {"mask=window(5,0)&first(1)", "mask=window(5,0)&first(2)", TESSERA_OUT},
    {"mask=causal", "mask=causal&chunk(20)", TESSERA_OUT},
    {"mask=chunk(20)", "mask=chunk(21)", TESSERA_OUT},
    {"mask=chunk(20)", "mask=chunk(20)@top_left", TESSERA_OUT},
    {"mask=causal", "mask=prefix(20)", TESSERA_OUT},
    {"mask=prefix(20)", "mask=prefix(21)", TESSERA_OUT},
    {"", "mask=keep", TESSERA_OUT},
    {"mask=keep(b,1,1,k)", "mask=keep(b,1,q,1)", TESSERA_OUT},
    {"", "mask=exclude_keys", TESSERA_OUT},
    {"", "mask=documents", TESSERA_OUT},
    {"", "scale=0.3", TESSERA_OUT},
    {"scale=0.3", "scale=-0.3", TESSERA_OUT},
    {"scale=0.3", "scale=0", TESSERA_OUT},
    {"", "softcap=2", TESSERA_OUT},
    {"softcap=2", "softcap=3", TESSERA_OUT},
    {"", "alibi", TESSERA_OUT},
    {"alibi", "alibi mask=corner@top_left", TESSERA_OUT},
    {"", "sink", TESSERA_OUT},
    {"", "sink", TESSERA_LSE},
    {"", "bias=1,h,q,k", TESSERA_OUT},
    {"bias=1,h,q,k", "bias=b,h,q,k", TESSERA_OUT},
    {"", "bias=b,1,1,k", TESSERA_OUT},
    {"", "dropout=0.3", TESSERA_OUT},
    {"dropout=0.3@seed1", "dropout=0.3@seed2", TESSERA_OUT},
    {"dropout=0.3@seed1", "dropout=0.3@seed4294967297", TESSERA_OUT},
    {"dropout=0.3", "dropout=0.4", TESSERA_OUT},
    {"", "seqused=q[40,39]", TESSERA_OUT},
    {"", "seqused=k[50,49]", TESSERA_OUT},
    {"seqused=q[20,40]", "seqused=q[20,40] mask=causal", TESSERA_OUT},
};
const Row backward_rows[] = {
    {"", "dlse", TESSERA_DQ},
    {"", "dlse", TESSERA_DK},
    {"sink", "sink dlse", TESSERA_DSINKS},
    {"alibi", "alibi dlse", TESSERA_DSLOPES},
    {"bias=1,h,q,k", "bias=1,h,q,k dlse", TESSERA_DBIAS},
    {"", "mask=causal", TESSERA_DV},
    {"mask=causal", "mask=causal@top_left", TESSERA_DK},
    {"mask=window(5,0)", "mask=window(5,0)&first(2)", TESSERA_DK},
    {"mask=chunk(20)", "mask=chunk(21)", TESSERA_DQ},
    {"mask=causal", "mask=prefix(20)", TESSERA_DV},
    {"", "mask=keep(b,h,q,k)", TESSERA_DQ},
    {"", "mask=exclude_keys", TESSERA_DK},
    {"", "mask=documents", TESSERA_DQ},
    {"", "scale=0.3", TESSERA_DK},
    {"", "softcap=2", TESSERA_DQ},
    {"", "alibi", TESSERA_DV},
    {"", "sink", TESSERA_DQ},
    {"", "bias=b,h,q,k", TESSERA_DQ},
    {"", "dropout=0.3", TESSERA_DV},
    {"dropout=0.3@seed1", "dropout=0.3@seed2", TESSERA_DQ},
    {"", "seqused=q[40,39]", TESSERA_DK},
    {"", "seqused=k[50,49]", TESSERA_DQ},
};

void expect_all_change(const char* head, std::span<const Row> rows) {
  on_engines([&](const How& how) {
    for (const Row& row : rows) {
      const std::string one = fmt::format("{} {}", head, row.base), other = fmt::format("{} {}", head, row.changed);
      Exam base(one), changed(other);
      for (Exam* c : {&base, &changed}) run_all(*c, how);
      EXPECT_NE(base.values(row.output), changed.values(row.output)) << one << "\n  and\n" << other;
      if (how.kernels == "cpu") expect_right(changed, other);
    }
  });
}
TEST(Cases, L10_EveryOptionChangesForward) {
  expect_all_change(forward, forward_rows);
}
TEST(Cases, L10_EveryOptionChangesBackward) {
  expect_all_change(backward, backward_rows);
}

// What no word of a line says: ids, and the offset of the random stream.
TEST(Cases, L10_EveryValueChangesTheResult) {
  on_engines([](const How& how) {
    const auto changes = [&](const char* line, auto change) {
      SCOPED_TRACE(line);
      Exam c(line);
      run_all(c, how);
      const std::vector<std::byte> before = output_bits(c);
      change(c);
      run_all(c, how);
      EXPECT_FALSE(before == output_bits(c));
      if (how.kernels == "cpu") expect_right(c, line);
    };
    const auto flip = [](int name, Index i, double to) { return [=](Exam& c) { c.set(name, i, to); }; };
    changes("forward f32 q5 k9 d4 mask=documents", [](Exam& c) {
      c.put(TESSERA_DOCUMENTS_Q, 3);
      c.put(TESSERA_DOCUMENTS_K, [](const Index& i) { return i[1] < 4 ? 3 : 2; });
    });
    changes("forward f32 q5 k9 d4 mask=keep", [](Exam& c) {
      c.set(TESSERA_KEEP, {0, 0, 2, 3}, 1 - c.get(TESSERA_KEEP, {0, 0, 2, 3}));
    });
    changes("forward f32 q5 k9 d4 mask=exclude_keys", [](Exam& c) {
      c.set(TESSERA_EXCLUDE_KEYS, {0, 4, 0, 0}, 1 - c.get(TESSERA_EXCLUDE_KEYS, {0, 4, 0, 0}));
    });
    changes("forward f32 q5 k9 d4 alibi", flip(TESSERA_SLOPES, {}, 0.75));
    changes("forward f32 b2 h2 q5 k9 d4 alibi=b,h", flip(TESSERA_SLOPES, {1, 0, 1, 0}, 0.75));
    changes("forward f32 q5 k9 d4 sink", flip(TESSERA_SINKS, {}, 2));
    changes("forward f32 q5 k9 d4 bias=1,1,q,k", flip(TESSERA_BIAS, {0, 0, 4, 8}, 2.5));
    changes("forward f32 b2 q5 k9 d4 mask=causal@at[1,2]", flip(TESSERA_CORNER_OFFSETS, {1, 0, 0, 0}, 5));
    changes("forward f32 d4 varlen=q[2,3]k[4,5] mask=causal", flip(TESSERA_CU_SEQLENS_K, {1, 0, 0, 0}, 5));
    changes("backward f32 q5 k9 d4 dlse", flip(TESSERA_DLSE, {0, 2, 0, 0}, 3));
    changes("backward f32 q5 k9 d4", flip(TESSERA_DOUT, {0, 2, 0, 1}, 3));

    Exam c("forward f32 q20 k20 d4 dropout=0.5");
    run_all(c, how);
    const std::vector<std::byte> before = output_bits(c);
    tessera_bindings bound = c.bindings();
    bound.offset = 1;
    expect_ok(attempt(c.problem(), bound, how));
    EXPECT_FALSE(before == output_bits(c));
  });
}

// Outputs on request: what they hold, by type.
TEST(Cases, L10_OutputsOnRequest) {
  on_engines([](const How& how) {
    Exam narrow("forward bf16 h2 q20 k30 d16"), wide("forward bf16 h2 q20 k30 d16 out=f32 max");
    run_all(narrow, how);
    run_all(wide, how);
    EXPECT_EQ(wide.operand(TESSERA_OUT).dtype, TESSERA_F32);
    EXPECT_NE(narrow.values(TESSERA_OUT), wide.values(TESSERA_OUT));  // not rounded
    expect_values(narrow, TESSERA_OUT, wide.values(TESSERA_OUT), 0.02);
    Exam c("forward f32 q1 k3 d1 scale=1 max sink");
    c.put(TESSERA_Q, 1);
    c.put_list(TESSERA_K, {-1, 4, 2});
    c.put(TESSERA_SINKS, 9);
    run_all(c, how);
    expect_values(c, TESSERA_MAX_SCORE, {4}, 0);  // of keys; a sink is none
    Exam part("backward f32 h2 q9 k9 d4 grads=dv"), all("backward f32 h2 q9 k9 d4");
    run_all(part, how);
    run_all(all, how);
    EXPECT_EQ(part.values(TESSERA_DV), all.values(TESSERA_DV));
  });
}

// Scores [1, 2] then [3, 0], values [[10, 0], [0, 10]] and [[5, 5], [9, 1]]: [4.379542, 5.620458], however they are
// cut and wherever they lie.
TEST(Cases, TheWorkedExample) {
  std::vector<std::string> all = kernels();
  all.push_back("reference.oracle");
  for (const std::string& kernel : all)
    for (const char* dtype : {"f32", "f64", "bf16", "f16"}) {
      if (kernel == "cpu.avx512bf16" && std::string(dtype) != "bf16") continue;
      for (const int tile : {1, 2, 3, 4, 64})
        for (const double shift : {0.0, 1000.0, -1000.0}) {
          SCOPED_TRACE(fmt::format("{} {} tile_keys {} shift {}", kernel, dtype, tile, shift));
          const bool f64 = std::string(dtype) == "f64", whole = f64 || std::string(dtype) == "f32";
          Exam c(fmt::format("forward {} q1 k4 d2 scale=1 out={}", dtype, f64 ? "f64" : "f32"));
          c.put(TESSERA_Q, 1);
          c.put_list(TESSERA_K, {shift, 1, shift, 2, shift, 3, shift, 0});  // exact in every type
          c.put_list(TESSERA_V, {10, 0, 0, 10, 5, 5, 9, 1});
          run_all(c, {kernel, 0, 0, tile});
          // A 16-bit kernel may round P as the materialised computation does.
          const double tolerance = whole ? 2e-6 : 0.04;
          expect_values(c, TESSERA_OUT, {4.379542, 5.620458}, tolerance);
          expect_values(c, TESSERA_LSE, {shift + std::log(std::exp(1) + std::exp(2) + std::exp(3) + 1)},
                        f64 ? 1e-12 : 7e-5);
        }
    }
}

}  // namespace
}  // namespace tessera::test
