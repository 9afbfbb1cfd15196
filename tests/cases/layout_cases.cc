// Far addresses, strides of every kind, and shapes that broadcast.
#include "cases.h"

namespace tessera::test {
namespace {

// Puts `name` of a small case at other strides in reserved address space; true if the machine has the space.
struct Moved {
  Moved(Exam& from, std::initializer_list<std::pair<int, Index>> strides)
      : c(from), problem(from.problem()), bindings(from.bindings()) {
    pages.reserve(strides.size());
    for (const auto& [which, stride] : strides) {
      const int name = which;  // clang 14 cannot capture a binding
      tessera_operand& o = problem.operand[name];
      std::copy(stride.begin(), stride.end(), o.stride);
      pages.emplace_back(span_bytes(o));
      bindings.data[name] = pages.back().data();
      given = given && bindings.data[name];
      if (given)
        tools::for_each_index(tools::extents(o),
                              [&](const Index& i) { std::memcpy(at(name, i), c.at(name, i), size(name)); });
    }
    problem.alignment = 1;
  }
  size_t size(int name) const { return tessera_dtype_bytes(problem.operand[name].dtype); }
  std::byte* at(int name, const Index& i) const {
    return static_cast<std::byte*>(bindings.data[name]) +
           tools::offset_of(problem.operand[name], i) * static_cast<int64_t>(size(name));
  }
  // The answer at these strides has the bits of the small one.
  void expect_same(const How& how) const {
    if (!given) GTEST_SKIP() << "no address space";
    run_all(c, how);
    const std::vector<std::byte> want = output_bits(c);
    if (problem.pass == TESSERA_BACKWARD) expect_ok(attempt(tools::forward_of(problem), bindings, how));
    expect_ok(attempt(problem, bindings, how));
    std::vector<std::byte> got;
    for (const int name : tools::outputs(problem))
      tools::for_each_index(tools::extents(problem.operand[name]),
                            [&](const Index& i) { got.insert(got.end(), at(name, i), at(name, i) + size(name)); });
    EXPECT_TRUE(got == want);
  }

  Exam& c;
  tessera_problem problem;
  tessera_bindings bindings;
  std::vector<Pages> pages;
  bool given = true;
};

constexpr int64_t two31 = int64_t{1} << 31, two32 = int64_t{1} << 32;

TEST(Cases, A15_MaskBeyond32Bits) {
  on_engines([](const How& how) {
    Exam c("forward f32 h2 q3 k70 d4 mask=keep(1,h,q,k)");
    Moved(c, {{TESSERA_KEEP, {0, 3 * two32, two32 + 7, 1}}}).expect_same(how);
  });
}

TEST(Cases, D03_ManyRowsOfAMaskFarApart) {
  on_engines([](const How& how) {
    Exam c("forward f32 h1 q4097 k5 d4 mask=keep");
    Moved(c, {{TESSERA_KEEP, {0, 0, int64_t{1} << 20, 1}}}).expect_same(how);
  });
}

TEST(Cases, D04_MaskInBackwardBeyond32Bits) {
  on_engines([](const How& how) {
    Exam c("backward f32 h3 q33 k9 d4 mask=keep(1,h,q,k)");
    Moved(c, {{TESSERA_KEEP, {0, two32 + 5, int64_t{1} << 26, 1}}}).expect_same(how);
  });
}

TEST(Cases, D05_BiasBatchStride) {
  on_engines([](const How& how) {
    Exam c("backward f16 b3 h2 q5 k9 d4 bias=b,h,q,k");
    Moved(c, {{TESSERA_BIAS, {two31, 45, 9, 1}}, {TESSERA_DBIAS, {two31 + 2, 45, 9, 1}}}).expect_same(how);
    // Of one batch the stride is nothing at all.
    expect_same_bits("forward f32 h2 q17 k19 d8 bias=1,h,q,k strides=bias[4611686018427387904,323,19,1]",
                     "forward f32 h2 q17 k19 d8 bias=1,h,q,k", how);
  });
}

TEST(Cases, D09_BatchStridesNear32Bits) {
  on_engines([](const How& how) {
    constexpr int64_t far = int64_t{1} << 29;
    Exam c("backward bf16 b5 h4/2 q3 k9 d8 mask=causal");
    Moved(c, {{TESSERA_K, {far, 16, 8, 1}},
              {TESSERA_V, {far + 1, 16, 8, 1}},
              {TESSERA_DK, {far + 2, 16, 8, 1}},
              {TESSERA_Q, {far, 32, 8, 1}},
              {TESSERA_OUT, {far, 32, 8, 1}},
              {TESSERA_DQ, {far + 3, 32, 8, 1}},
              {TESSERA_DOUT, {far, 32, 8, 1}},
              {TESSERA_LSE, {far, 4, 1, 1}}})
        .expect_same(how);
  });
}

TEST(Cases, D11_HeadAndDimStridesBeyond32Bits) {
  on_engines([](const How& how) {
    Exam c("backward f32 h3 q4 k5 d3");
    Moved(c, {{TESSERA_Q, {0, 1, two31, 9}},
              {TESSERA_K, {0, 3, 1, two31}},
              {TESSERA_V, {0, two31, 3, 1}},
              {TESSERA_DV, {0, two31 + 1, 3, 1}}})
        .expect_same(how);
  });
}

// 4096 sequences of 4097 tokens at a stride of 128: the last begin beyond 2^31 elements.
TEST(Cases, D14_PackedRowsBeyond32Bits) {
  on_engines([](const How& how) {
    Guarded g("forward bf16 h1 d2 b4096 q1 varlen=k k4097 rows=k16781312 seqused=k strides=k[0,128,2,1]v[0,129,2,1]");
    if (!g.given) GTEST_SKIP() << "no address space";
    auto* const cu = reinterpret_cast<int32_t*>(g.bindings.data[TESSERA_CU_SEQLENS_K]);
    auto* const used = reinterpret_cast<int32_t*>(g.bindings.data[TESSERA_SEQUSED_K]);
    for (int32_t b = 0; b <= 4096; ++b) cu[b] = b * 4097;
    used[0] = used[4095] = 4097;
    for (int64_t j = 0; j < 4097; ++j) {
      g.set(TESSERA_V, {0, j, 0, 1}, 1);
      g.set(TESSERA_V, {0, 4095 * 4097 + j, 0, 1}, 3);
    }
    expect_ok(attempt(g.problem, g.bindings, how));
    EXPECT_EQ(g.get(TESSERA_OUT, {0, 0, 0, 1}), 1);
    EXPECT_EQ(g.get(TESSERA_OUT, {4095, 0, 0, 1}), 3);
    EXPECT_EQ(g.get(TESSERA_OUT, {2000, 0, 0, 1}), 0);
    EXPECT_EQ(g.get(TESSERA_LSE, {2000, 0, 0, 0}), -infinity);
  });
}

// 33728 does not fit 16 bits with a sign.
TEST(Cases, D15_LengthBeyond16Bits) {
  on_engines([](const How& how) {
    for (const char* line :
         {"forward f32 h1 q1 k33728 d64", "forward f32 h1 q33728 k1 d64", "forward f32 h1 q65537 k1 d2"}) {
      Exam c(line);
      for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V}) c.put(name, 0);
      run_all(c, how);
      expect_zero(c.values(TESSERA_OUT));
      for (const double lse : c.values(TESSERA_LSE))
        ASSERT_NEAR(lse, std::log(static_cast<double>(c.problem().len_k)), 1e-5);
    }
  });
}

TEST(Cases, E02_OneOperandATransposedView) {
  on_engines([](const How& how) {
    for (const int64_t d : {8, 40}) {
      const std::string line = fmt::format("backward f16 b2 h3 q62 k62 d{}", d);
      for (const char* name : {"q", "k", "v", "out", "dout", "dq", "dk", "dv"})  // rows of a head together
        expect_same_bits(line, fmt::format("{} strides={}[{},{},{},1]", line, name, 3 * 62 * d, d, 62 * d), how);
    }
  });
}

TEST(Cases, E03_OutHasItsOwnStrides) {
  on_engines([](const How& how) {
    const std::string line = "forward bf16 b2 h2 q9 k9 d8";
    expect_same_bits(line, line + " strides=q[432,48,8,1]", how);
    expect_same_bits(line, line + " layout=qkv", how);
    expect_same_bits(line, line + " layout=kv strides=out[1000,100,11,1]", how);
  });
}

TEST(Cases, E04_LseHasItsOwnStrides) {
  on_engines([](const How& how) {
    for (const char* line : {"forward bf16 b2 h8/2 q4 k300 d64", "backward bf16 b2 h8/2 q4 k300 d64 dlse"})
      expect_same_bits(line, std::string(line) + " strides=lse[4096,7,512,1]", how);
  });
}

TEST(Cases, E05_DoutExpanded) {
  on_engines([](const How& how) {
    Exam one("backward f32 b2 h8/1 q4 k4 d16"), other("backward f32 b2 h8/1 q4 k4 d16 strides=dout[0,0,0,0]");
    one.put(TESSERA_DOUT, 0.75);
    other.put(TESSERA_DOUT, 0.75);
    run_all(one, how);
    run_all(other, how);
    EXPECT_EQ(output_bits(one), output_bits(other));
    expect_right(other, "E05");
  });
}

TEST(Cases, E06_TheLastDimensionIsNotContiguous) {
  on_engines([](const How& how) {
    for (const char* dtype : {"f32", "bf16", "f16", "f64"}) {
      const std::string line = fmt::format("backward {} h2 q8 k8 d16", dtype);
      for (const char* name : {"q", "k", "v", "out", "dout", "dq", "dk", "dv"})
        expect_same_bits(line, fmt::format("{} strides={}[256,1,128,8]", line, name), how);
    }
    expect_same_bits(
        "backward f32 h2 q5 k7 d8 bias=1,1,q,k mask=keep",
        "backward f32 h2 q5 k7 d8 bias=1,1,q,k mask=keep strides=bias[0,0,1,5]dbias[0,0,2,10]keep[0,0,3,15]", how);
  });
}

TEST(Cases, E07_StridesOfOneElementDimensions) {
  on_engines([](const How& how) {
    for (const std::string line : {"backward f32 q1 k1 d2", "backward bf16 q1 k1 d1"})
      for (const char* stride : {"[7,7,7,1]", "[0,0,0,1]", "[4611686018427387904,7,0,1]"})
        for (const char* name : {"q", "k", "v", "out", "dout", "dq", "dk", "dv"})
          expect_same_bits(line, line + " strides=" + name + stride, how);
    expect_same_bits("backward f32 q1 k1 d1", "backward f32 q1 k1 d1 strides=q[9,9,9,9]dv[0,0,0,0]lse[3,0,3,0]", how);
  });
}

TEST(Cases, E10_BiasRowsOf43) {
  expect_line_right("backward f16 b1 h16 q43 k43 d16 bias=1,h,q,k");
  expect_line_right("forward bf16 b1 h16 q43 k43 d16 bias=1,h,q,k");
}

// Broadcast, or written out in full: the same.
TEST(Cases, E11_BroadcastMasksAndBiases) {
  on_engines([](const How& how) {
    for (const char* dims : {"b,1,1,k", "1,1,q,1", "1,h,1,k", "b,1,q,k", "1,1,1,1", "1,1,1,k", "b,h,q,1"}) {
      SCOPED_TRACE(dims);
      const std::string line = "forward f32 b2 h2 q33 k40 d8";
      Exam small(fmt::format("{} mask=keep({}) bias={}", line, dims, dims)),
          full(line + " mask=keep(b,h,q,k) bias=b,h,q,k");
      for (const int name : {TESSERA_KEEP, TESSERA_BIAS})
        full.put(name, [&](Index i) {
          for (size_t d = 0; d < 4; ++d) i[d] = std::min(i[d], small.operand(name).extent[d] - 1);
          return small.get(name, i);
        });
      run_all(small, how);
      run_all(full, how);
      EXPECT_TRUE(output_bits(small) == output_bits(full));
    }
  });
}

TEST(Cases, E12_O06_OutInAnyLayout) {
  on_engines([](const How& how) {
    for (const char* line : {"forward bf16 b2 h4 q33 k33 d32 mask=causal", "backward f32 b2 h2 q49 k49 d32"})
      for (const char* layout : {"bhsd", "qkv", "kv"})
        expect_same_bits(line, fmt::format("{} layout={}", line, layout), how);
  });
}

// Outputs may not share addresses.
TEST(Cases, E_OverlappingOutputsAreRefused) {
  expect_invalid(parse("forward f32 b2 h2 q3 k3 d4 strides=out[0,8,4,1]"), {"out", "stride"});
  expect_invalid(parse("backward f32 b2 h2 q3 k3 d4 strides=dk[24,4,4,1]"), {"dk", "stride"});
}

// The order of a BHSD tensor under the name of a BSHD one.
TEST(Cases, P05_WrongExtentsAreRefused) {
  tessera_problem p = tools::Line("forward f32 b4 h6 q256 k256 d48").problem();
  std::swap(p.operand[TESSERA_Q].extent[1], p.operand[TESSERA_Q].extent[2]);
  expect_invalid(attempt(p, {}), {"q.extent[1]", "6", "256"});
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_OUT, TESSERA_LSE})
    for (int d = 0; d < 4; ++d) {
      tessera_problem wrong = tools::Line("forward f32 b4 h6 q256 k256 d48").problem();
      ++wrong.operand[name].extent[d];
      expect_invalid(attempt(wrong, {}), {tessera_name_text(name), "extent"});
    }
}

}  // namespace
}  // namespace tessera::test
