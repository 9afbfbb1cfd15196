// Packed batches, lengths of zero, tails, and lengths that are no lengths.
#include "caches.h"

namespace tessera::test {
namespace {

TEST(Cases, C01_KeysWithoutQueries) {
  on_engines([](const How& how) {
    Exam c("backward f32 h1 d16 varlen=q[3,0,3]k[2,2,2]");
    run_all(c, how);
    for (const int name : {TESSERA_DK, TESSERA_DV})
      for (int64_t j = 0; j < 6; ++j)
        for (int64_t d = 0; d < 16; ++d) {
          EXPECT_EQ(c.get(name, {0, j, 0, d}) == 0, j == 2 || j == 3);
        }
    expect_right(c, "C01");
    const std::vector<std::byte> bits = output_bits(c);
    for (const int name : {TESSERA_K, TESSERA_V})  // nobody asks for these
      for (int64_t j = 2; j < 4; ++j)
        for (int64_t d = 0; d < 16; ++d) c.set(name, {0, j, 0, d}, nan);
    run_all(c, how);
    EXPECT_TRUE(output_bits(c) == bits);
  });
  expect_line_right("backward bf16 h4/1 d256 varlen=q[0,60,42,0]k[126,87,42,153]");
}

TEST(Cases, C02_QueriesWithoutKeys) {
  on_engines([](const How& how) {
    for (const char* mask : {"", " mask=causal"}) {
      Exam c(std::string("backward f16 h1 d8 varlen=q[3,3]k[0,4] dlse") + mask);
      run_all(c, how);
      for (int64_t i = 0; i < 3; ++i) {
        EXPECT_EQ(c.get(TESSERA_LSE, {0, i, 0, 0}), -infinity);
        for (int64_t d = 0; d < 8; ++d) {
          EXPECT_EQ(c.get(TESSERA_OUT, {0, i, 0, d}), 0);
          EXPECT_EQ(c.get(TESSERA_DQ, {0, i, 0, d}), 0);
        }
      }
      expect_right(c, "C02");
    }
  });
}

TEST(Cases, C01_C02_SequencesWithoutQueriesOrKeysInACache) {
  for (const std::string& dtype : dtypes)
    for (const char* place : {"", " page=4", " page=4 left_pad=[2,0,5,0]"})
      for (const char* rows : {" varlen=q[3,0,2,0]", " varlen=q[3,0,2,0]n[0,2,0,0] append"}) {
        const std::string line =
            fmt::format("decode {} h4/2 k9 d8 slots=16 cache_lens=[{}] mask=causal{}{}", dtype,
                        std::string(place).find("pad") == std::string::npos ? "0,4,7,0" : "2,4,12,0", place, rows);
        on_kernels(line, [&](const How& how) {
          Exam c = poisoned(line);
          run_all(c, how);
          for (int64_t i = 0; i < 5; ++i)
            for (int64_t h = 0; h < 4; ++h) {
              EXPECT_EQ(c.get(TESSERA_OUT, {0, i, h, 7}) == 0, i < 3) << i;
              EXPECT_EQ(c.get(TESSERA_LSE, {0, i, h, 0}) == -infinity, i < 3) << i;
            }
          expect_right(c, line);
        });
      }
}

TEST(Cases, C03_NoKeysAtAll) {
  on_engines([](const How& how) {
    for (const char* mask : {"", " mask=causal", " mask=window(3,3)&first(2)"}) {
      Exam c(std::string("backward f16 h2 q4 k0 d16") + mask);
      tessera_bindings bound = c.bindings();
      for (const int name : {TESSERA_K, TESSERA_V, TESSERA_DK, TESSERA_DV}) bound.data[name] = nullptr;
      expect_ok(attempt(tools::forward_of(c.problem()), bound, how));
      expect_ok(attempt(c.problem(), bound, how));
      expect_zero(c.values(TESSERA_OUT));
      expect_zero(c.values(TESSERA_DQ));
      expect_values(c, TESSERA_LSE, std::vector<double>(8, -infinity), 0);
    }
  });
}

TEST(Cases, C03_CachesWithoutASlot) {
  on_engines([](const How& how) {
    for (const char* line : {"decode f16 h2 q4 k0 d16", "decode f16 h2 q4 k0 d16 page=16 mask=causal",
                             "decode f16 h2 q4 k0 d16 page=1 n0 append mask=window(3,3)"}) {
      SCOPED_TRACE(line);
      Exam c(line);
      tessera_bindings bound = c.bindings();
      for (const int name : {TESSERA_K, TESSERA_V, TESSERA_K_NEW, TESSERA_V_NEW, TESSERA_PAGE_TABLE})
        bound.data[name] = nullptr;
      expect_ok(attempt(c.problem(), bound, how));
      expect_zero(c.values(TESSERA_OUT));
      expect_values(c, TESSERA_LSE, std::vector<double>(8, -infinity), 0);
    }
  });
}

TEST(Cases, C04_NoBatchNoQueriesNoHeads) {
  on_engines([](const How& how) {
    for (const char* line : {"backward f32 b0 h10 q3952 k16 d64",
                             "backward f32 b0 h2 q5 k5 d8 mask=causal dropout=0.5 sink alibi bias=1,h,q,k",
                             "backward f16 b7 h9 q0 k0 d7 mask=causal", "backward f32 b2 h2 q0 k9 d8 dropout=0.3",
                             "backward bf16 h2 d8 varlen=q[0,0]k[5,0]", "backward f32 h2 d8 b0 varlen=q[]k[]"}) {
      SCOPED_TRACE(line);
      Exam c(line);
      run_all(c, how);
      for (const int name : tools::outputs(c.problem())) expect_zero(c.values(name));
    }
  });
  expect_invalid(parse("forward f32 h0 q1 k1 d8"), {"heads_q", "0"});
  expect_invalid(parse("forward f32 h1 q1 k1 d0"), {"dim", "0"});
}

TEST(Cases, C04_NoBatchNoQueriesNoNewTokens) {
  for (const std::string& dtype : dtypes)
    for (const char* rest :
         {"decode {} b0 h10 q3952 k16 d64 append page=4", "append {} b0 n4 k9 d8", "append {} b2 h2 n0 k9 d8",
          "append {} b2 h2 n0 k9 d8 page=4 status", "decode {} b2 h3 q0 n2 k9 d7 append",
          "decode {} b7 h9 q0 n0 k0 d7 append page=1 mask=causal",
          "decode {} h2 d8 varlen=q[0,0]n[0,0] k5 append rotary=4 page=2"}) {
      const std::string line = fmt::format(fmt::runtime(rest), dtype);
      on_kernels(line, [&](const How& how) {
        Exam c = poisoned(line);
        run_all(c, how);
        for (const int name : tools::outputs(c.problem())) expect_zero(c.values(name));
        expect_right(c, line);
      });
    }
}

// Refused by what is wrong, before anything is written.
TEST(Cases, C07_MalformedOffsets) {
  const auto refuse = [](std::vector<int32_t> cu, std::initializer_list<const char*> words) {
    on_engines([&](const How& how) {
      Exam c("forward f32 h1 d4 varlen=q[3,4]k[3,4]");
      for (size_t b = 0; b < cu.size(); ++b) c.value(TESSERA_CU_SEQLENS_K, static_cast<int64_t>(b)) = cu[b];
      c.wipe(TESSERA_OUT);
      const std::vector<std::byte> before = output_bits(c);
      expect_invalid(attempt(c.problem(), c.bindings(), how), words);
      EXPECT_EQ(output_bits(c), before);
    });
  };
  refuse({1, 3, 7}, {"cu_seqlens_k[0]", "1"});
  refuse({-1, 3, 7}, {"cu_seqlens_k[0]", "-1"});
  refuse({0, 4, 3}, {"decrease", "4", "3"});
  refuse({0, 4, -5}, {"decrease", "-5"});
  refuse({0, 4, 8}, {"8", "7 rows"});      // more rows than there are
  refuse({0, 6, 7}, {"6", "len_k", "4"});  // longer than was promised
  refuse({0, INT32_MAX, INT32_MAX}, {"7 rows"});
  refuse({0, INT32_MAX, INT32_MIN}, {"decrease"});
  tessera_problem p = tools::Line("forward f32 h1 d4 varlen=q[3,4]k[3,4]").problem();
  p.operand[TESSERA_CU_SEQLENS_K].dtype = TESSERA_F64;  // eight bytes a length
  expect_invalid(attempt(p, {}), {"cu_seqlens_k", "i32"});
}

TEST(Cases, C07_MalformedOffsetsOfNewTokens) {
  for (const char* line : {"decode bf16 h2 d8 varlen=q[3,4]n[3,4] k9 append status cache_lens=[2,5]",
                           "append f16 h2 d8 varlen=n[3,4] k9 page=2 status cache_lens=[2,5]"})
    for (const auto& [index, value] : {std::pair{0, 1}, {0, -1}, {1, 8}, {1, -5}, {2, 8}, {2, 2}, {2, INT32_MAX}}) {
      Exam c = poisoned(line);
      c.value(TESSERA_CU_SEQLENS_NEW, index) = value;
      expect_refused(c, TESSERA_STATUS_LENGTH, {"cu_seqlens_new", std::to_string(value).c_str()});
    }
}

// Every operand and the workspace end at a page that may not be read.
TEST(Cases, C08_NothingBeyondTheEndIsRead) {
  for (const char* line :
       {"forward bf16 h1 d32 varlen=q[1,1,1,1,129]k[1,1,1,1,129] mask=causal",
        "backward bf16 h1 d32 varlen=q[1,1,1,1,129]k[1,1,1,1,129] mask=causal",
        "backward f32 h5/1 d7/3 varlen=q[3,0,65]k[1,9,67] seqused=qk sink alibi bias=b,h,q,k dlse",
        "backward f16 b2 h3 q5 k43 d9 mask=keep(b,1,q,k)&exclude_keys&documents bias=1,h,1,k",
        "forward f32 b2 h3 q5 k43 d1/129 mask=causal@at[1,2] max",
        "backward f64 b2 h2 q33 k3 d5 layout=bhsd strides=q[330,1,165,33]",
        "decode bf16 b2 h4/2 q2 k43 d9 append mask=causal cache_lens=[41,7] rotary=4 status",
        "decode f32 b2 h3 q1 k43 d1/129 page=4 page_table=[0,2,4,6,8,10,1,3,5,7,9,11,13,15,17,19,21,"
        "12,14,16,18,20] cache_lens=[43,41]",
        "decode f16 h5/1 k20 d7/3 varlen=q[3,0,4]n[3,1,4] append v_in_k cache_lens=[17,0,16] sink max",
        "decode bf16 b3 h2 k9 d8 cache_rows=4 cache_batch_idx=[3,0,1] left_pad=[4,0,1] slots=13 "
        "cache_lens=[13,9,2] kv=e4m3:token/token_head",
        "append bf16 b2 h3 n3 k9 d5 cache_lens=[6,0] rotary=2:interleaved positions=9",
        "append f16 h3 k9 d5/9 varlen=n[3,0,1] cache_lens=[6,9,8] page=9 page_table=[2,0,1]"})
    on_engines([&](const How& how) {
      SCOPED_TRACE(line);
      const Guarded g(line);
      if (!g.given) GTEST_SKIP() << "no address space";
      if (g.problem.pass == TESSERA_BACKWARD) expect_ok(attempt(tools::forward_of(g.problem), g.bindings, how));
      expect_ok(attempt(g.problem, g.bindings, how));
    });
}

TEST(Cases, C09_ALooserBoundChangesNothing) {
  const std::string line = " bf16 h2 d32 varlen=q[9,40]k[30,40] mask=causal batch_invariant";
  on_engines([&](const How& how) {
    expect_same_bits("forward" + line, "forward" + line + " q512 k1024", how);
    expect_same_bits("backward" + line, "backward" + line + " q512 k1024", how);
  });
}

TEST(Cases, C11_NegativeLengths) {
  on_engines([](const How& how) {
    Exam c("forward f32 h1 d4 varlen=q[1,1,1,1]k[5,7,0,0] seqused=k[5,7,0,0]");
    for (const int64_t b : {2, 3}) c.value(TESSERA_SEQUSED_K, b) = -1;
    expect_invalid(attempt(c.problem(), c.bindings(), how), {"seqused_k[2]", "-1"});
  });
  expect_invalid(parse("forward f32 h1 d4 varlen=k[5,7,-1,-1] q1"), {"-1"});
}

TEST(Cases, C09_ALooserBoundOfACacheChangesNothing) {
  for (const std::string& dtype : dtypes)
    for (const char* place : {"", " page=8"}) {
      const std::string line =
          fmt::format("decode {} h4/2 d16 mask=causal cache_lens=[30,9] append varlen=q[3,1]n[3,1]{}", dtype, place);
      expect_one_answer({line + " k33", line + " k90", line + " k33 slots=64", line + " k600 q40 n17"});
    }
}

TEST(Cases, C11_NegativeLengthsOfACache) {
  for (const char* line : {"decode {} b4 h2 k8 d8 append status cache_lens=[5,7,0,0]",
                           "append {} b4 h2 n1 k8 d8 page=2 status cache_lens=[5,7,0,0]"})
    for (const std::string& dtype : dtypes)
      for (const int32_t length : {-1, INT32_MIN}) {
        Exam c = poisoned(fmt::format(fmt::runtime(line), dtype));
        for (const int64_t b : {2, 3}) c.value(TESSERA_CACHE_LENS, b) = length;
        expect_refused(c, TESSERA_STATUS_LENGTH, {"cache_lens[2]", std::to_string(length).c_str()});
      }
}

TEST(Cases, C12_LengthsOfACacheCount) {
  const double lengths[] = {24, 125, 53, 28, 77, 96, 13, 114};
  for (const std::string& dtype : dtypes)
    for (const char* place : {"", " page=16"}) {
      const std::string line =
          fmt::format("decode {} b8 h2 k128 d16 out=f32{} cache_lens=[24,125,53,28,77,96,13,114]", dtype, place);
      on_kernels(line, [&](const How& how) {
        Exam c(line);
        average_cached_keys(c);
        tools::poison(c);
        run_all(c, how);
        for (int64_t b = 0; b < 8; ++b) EXPECT_NEAR(c.get(TESSERA_OUT, {b, 0, 1, 0}), (lengths[b] - 1) / 2, 1e-4);
        c.value(TESSERA_CACHE_LENS, 7) = 113;
        run_all(c, how);
        EXPECT_NEAR(c.get(TESSERA_OUT, {7, 0, 1, 0}), 56, 1e-4);
      });
    }
}

TEST(Cases, C12_LengthsCount) {
  const std::string line = "forward f32 b8 h2 q128 k128 d16 seqused=k";
  on_engines([&](const How& how) {
    expect_rubbish_ignored(line + "[24,125,53,28,77,96,13,114]", how);
    EXPECT_NE(bits_of(line + "[24,125,53,28,77,96,13,114]", how), bits_of(line + "[24,125,53,28,77,96,13,113]", how));
    Exam c(line + "[24,125,53,28,77,96,13,114]");
    c.average_keys();
    run_all(c, how);
    const double lengths[] = {24, 125, 53, 28, 77, 96, 13, 114};
    for (int64_t b = 0; b < 8; ++b) EXPECT_NEAR(c.get(TESSERA_OUT, {b, 127, 1, 0}), (lengths[b] - 1) / 2, 1e-4);
  });
}

TEST(Cases, C13_GradientsOfUsedRowsAlone) {
  on_engines([](const How& how) {
    Exam c("backward f32 b2 h1 q64 k64 d64 seqused=q[10,64]k[64,20]");
    c.put_unused(nan);
    run_all(c, how);
    for (const int64_t b : {0, 1}) {
      const int64_t rows = b == 0 ? 10 : 64, keys = b == 0 ? 64 : 20;
      Exam crop(fmt::format("backward f32 h1 q{} k{} d64", rows, keys));
      for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_DOUT})
        crop.put(name, [&](const Index& i) { return c.get(name, {b, i[1], i[2], i[3]}); });
      run_all(crop, how);
      for (const int name : {TESSERA_DQ, TESSERA_DK, TESSERA_DV})
        for (int64_t row = 0; row < 64; ++row)
          for (int64_t d = 0; d < 64; ++d) {
            const bool used = row < (name == TESSERA_DQ ? rows : keys);
            const double want = used ? crop.get(name, {0, row, 0, d}) : 0;
            ASSERT_NEAR(c.get(name, {b, row, 0, d}), want, used ? 1e-5 : 0) << tessera_name_text(name) << " " << row;
          }
    }
  });
}

}  // namespace
}  // namespace tessera::test
