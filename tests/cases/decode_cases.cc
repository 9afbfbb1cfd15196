// Decoding: steps through a cache, the batch around a request, lse, scale and e4m3 on every path.
#include "caches.h"

namespace tessera::test {
namespace {

// Rows of an operand of new tokens or queries, from row `first` of another case's.
void copy_rows(const Exam& from, int64_t first, Exam& to, std::initializer_list<int> names) {
  for (const int name : names)
    if (to.has(name)) to.put(name, [&](const Index& i) { return from.get(name, {0, first + i[1], i[2], i[3]}); });
}

// A sequence that enters its cache at once, in chunks or token by token: each row's bits are the same, and so is every
// byte of the cache. Without rotation and e4m3 they are those of a plain prefill, too.
TEST(Cases, J04_StepsThroughACacheAgreeWithThePrefill) {
  for (const std::string& dtype : dtypes)
    for (const char* options :
         {" mask=causal", " mask=causal&window(20,0)&first(3) sink", " mask=causal softcap=9 alibi"})
      for (const char* place : {"", " page=16", " page=5 left_pad=[3]", " rotary=8 page=7", " rotary=16:interleaved",
                                " kv=e4m3:head page=8", " kv=e4m3:token/token_head rotary=6"}) {
        if (sanitized && dtype != dtypes[0]) continue;
        const std::string head =
            fmt::format("decode {} h4/2 k84 d16 slots=87 append batch_invariant{}{}", dtype, options, place);
        const bool padded = head.find("left_pad") != std::string::npos;
        const bool plain = head.find("rotary") == std::string::npos && head.find("e4m3") == std::string::npos;
        Exam whole(fmt::format("{} q84 cache_lens=[{}]", head, padded ? 3 : 0)),
            prefill(fmt::format("forward {} h4/2 q84 k84 d16 batch_invariant{}", dtype, options));
        copy_rows(whole, 0, prefill, {TESSERA_Q});
        if (plain) copy_keys(whole, 0, prefill, 0);
        tools::poison(whole);
        for (const std::string& kernel : kernels_for(whole.problem())) {
          run_all(whole, {kernel, 1});
          if (plain) {
            run_all(prefill, {kernel, 3});
            ASSERT_TRUE(result_bits(whole, 0) == result_bits(prefill, 0)) << head << " on " << kernel;
          }
          for (const int64_t step : {1, 7, 28}) {
            SCOPED_TRACE(fmt::format("{} on {} by steps of {}", head, kernel, step));
            Exam c(fmt::format("{} q{}", head, step));  // its table has all pages
            const int64_t pad = padded ? 3 : 0;
            for (const int name : {TESSERA_K_SCALE, TESSERA_V_SCALE})
              for (int64_t j = 0; whole.has(name) && whole.operand(name).extent[1] > 1 && j < 84; ++j)
                for (int64_t h = 0; h < whole.operand(name).extent[2]; ++h)
                  std::memcpy(key_at(c, name, 0, j, h, true), key_at(whole, name, 0, j, h, true), sizeof(float));
            for (const int name : {TESSERA_K, TESSERA_V}) c.wipe(name);
            for (int64_t first = 0; first < 84; first += step) {
              c.value(TESSERA_CACHE_LENS, 0) = static_cast<int32_t>(pad + first);
              copy_rows(whole, first, c, {TESSERA_Q, TESSERA_K_NEW, TESSERA_V_NEW});
              run_all(c, {kernel, 1});
              ASSERT_TRUE(result_bits(c, 0) == result_bits(whole, 0, first, step)) << "row " << first;
            }
            EXPECT_TRUE(stored_bits(c, 0, 0) == stored_bits(whole, 0, 0));
          }
          expect_right(whole, head);
        }
      }
}

// Over keys that are split between threads, and joined.
TEST(Cases, J04_StepsOverSplitKeysAgreeWithThePrefill) {
  for (const std::string& dtype : dtypes)
    for (const char* place : {"", " page=16"}) {
      if (sanitized && (dtype != dtypes[0] || *place == 0)) continue;
      const std::string options = " h2/1 d16 append mask=causal batch_invariant";
      Exam whole(fmt::format("decode {}{} q1300 k1300{} cache_lens=[0]", dtype, options, place));
      for (const std::string& kernel : kernels_for(whole.problem())) {
        run_all(whole, {kernel, 2});
        for (const int64_t first : {511, 512, 1023, 1024, 1299}) {
          const std::string line = fmt::format("decode {}{} q1 k{}{}", dtype, options, first + 1, place);
          Exam step(line);
          copy_keys(whole, 0, step, 0);
          copy_queries(whole, 0, first, step, 0);
          tools::poison(step);
          for (const int threads : {1, 2, 5}) {
            run_all(step, {kernel, threads});
            ASSERT_TRUE(result_bits(step, 0) == result_bits(whole, 0, first, 1)) << line << " " << kernel << threads;
          }
        }
      }
    }
}

// One request several times in a batch, between others: the same bits each time, and alone.
TEST(Cases, J04_IdenticalRequestsGetIdenticalBits) {
  for (const std::string& dtype : dtypes)
    for (const char* options : {" mask=causal", " mask=causal&window(100,0) sink", " kv=e4m3:token/head"})
      for (const char* invariant : {"", " batch_invariant"}) {
        if (dtype != dtypes[0] && (sanitized || !*invariant)) continue;
        const std::string head = fmt::format("decode {} h4/2 k1100 d16 page=16{}{}", dtype, options, invariant);
        Exam batch(head + " b7 cache_lens=[1100,3,1100,700,1100,0,1100] q2"), alone(head + " q2");
        copy_keys(batch, 0, alone, 0);
        copy_queries(batch, 0, 0, alone, 0);
        for (const int64_t b : {2, 4, 6}) {
          copy_keys(batch, 0, batch, b);
          copy_queries(batch, 0, 0, batch, b);
        }
        tools::poison(batch);
        tools::poison(alone);
        for (const std::string& kernel : kernels_for(alone.problem()))
          for (const int threads : {1, 3}) {
            run_all(batch, {kernel, threads});
            run_all(alone, {kernel, threads});
            for (const int64_t b : {0, 2, 4, 6})
              ASSERT_TRUE(result_bits(batch, b) == result_bits(alone, 0)) << head << " on " << kernel << " " << b;
            if (threads == 3 && *invariant) expect_right(batch, head);
          }
      }
}

// Unused slots of the last page, and of any other, hold anything.
TEST(Cases, B02_UnusedSlotsOfTheLastPage) {
  for (const char* line :
       {"decode bf16 k16 d64 page=4 cache_lens=[13]", "decode f16 h4/1 k16 d576/512 page=4 cache_lens=[13]",
        "decode bf16 h4/1 k16 d576/512 page=4 cache_lens=[13] v_in_k",
        "decode f32 b2 h2 q2 n2 k64 d16 page=16 append cache_lens=[13,0] mask=causal"}) {
    SCOPED_TRACE(line);
    for (const std::string& kernel : kernels_for(line)) {
      std::optional<std::vector<std::byte>> bits;
      for (const double rubbish : {0.0, nan, infinity, -60000.0}) {
        Exam c(line);
        Exam pools(line);
        for (const int name : stored(c.problem())) c.put(name, rubbish);
        for (int64_t b = 0; b < c.problem().batch; ++b) copy_keys(pools, b, c, b);
        run_all(c, {kernel, 2});
        std::vector<std::byte> got;
        for (int64_t b = 0; b < c.problem().batch; ++b) {
          const std::vector<std::byte> rows = result_bits(c, b);
          got.insert(got.end(), rows.begin(), rows.end());
        }
        if (!bits) bits = got;
        EXPECT_TRUE(got == *bits) << kernel << " " << rubbish;
        expect_all_finite(c, TESSERA_OUT);
      }
    }
  }
}

// Equal scores: lse is the natural logarithm of the number of keys on every path.
TEST(Cases, H01_OneBaseOnEveryPathOfACache) {
  for (const std::string& dtype : dtypes)
    for (const char* line : {"forward {} h4/2 k{} d8", "forward {} h4/2 d8 varlen=q[1]k[{}]", "decode {} h4/2 k{} d8",
                             "decode {} h4/2 k{} d8 page=16", "decode {} h4/2 k{} d8 page=16 append",
                             "decode {} h4/2 k{} d8 varlen=q[1] page=7", "decode {} h4/2 k{} d8 kv=e4m3",
                             "decode {} h4/2 k{} d8/4 v_in_k append"})
      for (const int keys : {64, 1100}) {
        const std::string text = fmt::format(fmt::runtime(line), dtype, keys);
        for (const std::string& kernel : kernels_for(text))
          for (const int threads : {1, 3}) {
            Exam c(text);
            c.put(TESSERA_Q, 0);
            run_all(c, {kernel, threads});
            expect_values(c, TESSERA_LSE, std::vector<double>(4, std::log(keys)), 1e-5);
          }
      }
}

TEST(Cases, H04_LseOfEveryRowOfADecode) {
  for (const std::string& dtype : dtypes)
    for (const char* line : {"decode {} b3 h2 q7 k20 d8 seqused=q[5,1,7] page=4 max",
                             "decode {} b3 h2 k20 d8 varlen=q[5,1,7] rows=q20 page=4 max"}) {
      const std::string text = fmt::format(fmt::runtime(line), dtype);
      on_kernels(text, [&](const How& how) {
        Exam c(text);
        c.put(TESSERA_Q, 0);
        tools::poison(c);
        run_all(c, how);
        const tessera_operand& o = c.operand(TESSERA_LSE);
        const int64_t used[] = {5, 1, 7};
        for (int64_t b = 0; b < o.extent[0]; ++b)
          for (int64_t i = 0; i < o.extent[1]; ++i)
            for (int64_t h = 0; h < 2; ++h) {
              const bool uses = i < (o.extent[0] == 1 ? 13 : used[b]);
              expect_value(c.get(TESSERA_LSE, {b, i, h, 0}), uses ? std::log(20) : -infinity, 1e-5);
              EXPECT_EQ(c.get(TESSERA_MAX_SCORE, {b, i, h, 0}), uses ? 0 : -infinity);
              EXPECT_EQ(c.get(TESSERA_OUT, {b, i, h, 3}) == 0, !uses);
            }
      });
    }
}

TEST(Cases, H05_ScaleIsANumberOfTheDecode) {
  for (const double scale : {1 / std::sqrt(128.0), 3 / std::sqrt(128.0), 1.0, 0.0, -0.25})
    for (const char* line : {"decode f32 k2 d128 page=1", "decode bf16 k2 d128 append out=f32",
                             "decode f16 k2 d128 page=2 out=f32 append"}) {
      const std::string text = fmt::format("{} scale={}", line, scale);
      on_kernels(text, [&](const How& how) {
        Exam c(text);
        c.put(TESSERA_Q, 0.125);
        for (const int name : {TESSERA_K, TESSERA_V})  // q . k is 0 and 16
          put_keys(c, name, [](int64_t, int64_t j, int64_t, int64_t) { return j; });
        tools::poison(c);
        run_all(c, how);
        const bool rounds = how.kernels == "cpu.avx512bf16";  // its weights
        EXPECT_NEAR(c.get(TESSERA_OUT, {}), 1 / (1 + std::exp(-16 * scale)), rounds ? 4e-3 : 1e-6);
        EXPECT_NEAR(c.get(TESSERA_LSE, {}), std::log(1 + std::exp(16 * scale)), 2e-5);
      });
    }
}

// Scores that rise, or fall, by 3.9 doublings with each tile: weights are float32, so that values of e4m3, be they its
// largest, lose nothing.
TEST(Cases, H06_ScoresThatRiseWithEveryTile) {
  for (const std::string& dtype : dtypes)
    for (const double sign : {1.0, -1.0}) {
      const std::string line =
          fmt::format("decode {} h2 k640 d8 kv=e4m3 bias=1,1,1,k:f32 scale=0 out=f32 page=64", dtype);
      on_kernels(line, [&](const How& how) {
        Exam c(line);
        c.put(TESSERA_BIAS,
              [&](const Index& i) { return sign * 3.9 * std::log(2.0) * static_cast<double>(i[3] / 64); });
        run_all(c, how);
        expect_right(c, line);
        c.put(TESSERA_V, 448);
        run_all(c, how);
        for (const double x : c.values(TESSERA_OUT)) ASSERT_NEAR(x, 448, 448 * 1e-6);
        double sum = 0;
        for (int tile = 0; tile < 10; ++tile) sum += 64 * std::exp2(sign * 3.9 * tile);
        expect_values(c, TESSERA_LSE, {std::log(sum), std::log(sum)}, 1e-5);
      });
    }
}

// A limit of workspace turns off what it leaves no room for, and no bit changes; a little less than needed is refused.
TEST(Cases, H07_WorkspaceOfASplitDecode) {
  for (const std::string& dtype : dtypes)
    for (const char* options : {"page=16", "append page=16 rotary=16", ""}) {
      Exam c = poisoned(fmt::format("decode {} h64/8 k1500 d16 {}", dtype, options));
      for (const std::string& kernel : kernels_for(c.problem())) {
        tools::Choice choice{kernel, 2};
        const tools::Plan split(c.problem(), choice);
        EXPECT_TRUE(has_step(split, "combine"));
        run_all(c, choice);
        const std::vector<std::byte> bits = output_bits(c);
        choice.workspace_limit = split.facts().workspace_bytes - 1;
        const tools::Plan tight(c.problem(), choice);
        EXPECT_FALSE(has_step(tight, "combine"));
        EXPECT_LE(tight.facts().workspace_bytes, *choice.workspace_limit);
        run_all(c, choice);
        EXPECT_TRUE(output_bits(c) == bits);
        const std::string needed = std::to_string(split.facts().workspace_bytes),
                          given = std::to_string(split.facts().workspace_bytes - 1);
        for (const int name : tools::outputs(c.problem())) c.wipe(name);
        const auto before = all_bytes(c);
        expect_invalid(attempt(c.problem(), c.bindings(), {kernel, 2}, 0xFF, 1),
                       {"workspace", needed.c_str(), given.c_str()});
        EXPECT_TRUE(all_bytes(c) == before);
      }
    }
}

// No option of a cache is accepted and dropped.
TEST(Cases, L10_EveryOptionOfACacheChangesTheResult) {
  constexpr const char* rows[][2] = {
      {"cache_lens=[18,18]", "cache_lens=[18,17]"},
      {"cache_lens=[18,18] slots=24", "cache_lens=[18,18] slots=24 left_pad=[1,0]"},
      {"cache_lens=[18,18] slots=24 left_pad=[1,0]", "cache_lens=[18,18] slots=24 left_pad=[2,0]"},
      {"cache_rows=4 cache_batch_idx=[0,1]", "cache_rows=4 cache_batch_idx=[0,3]"},
      {"page=5 page_table=[0,1,2,3,4,5,6,7] mask=causal&window(7,0)",
       "page=5 page_table=[0,1,3,2,4,5,6,7] mask=causal&window(7,0)"},
      {"page=5 pages=9 page_table=[0,1,2,3,4,5,6,7]", "page=5 pages=9 page_table=[0,1,2,3,4,5,6,8]"},
      {"rotary=4", "rotary=8"},
      {"", "rotary=4"},
      {"rotary=4", "rotary=4:interleaved"},
      {"rotary=4", "rotary=4:f32 cache_lens=[17,17]"},
      {"", "seqused=n[2,1]"},
      {"kv=e4m3", "kv=e4m3:tensor"},
      {"kv=e4m3:none/tensor", "kv=e4m3:tensor/tensor"},
      {"kv=e4m3:tensor/head", "kv=e4m3:tensor/token"},
      {"kv=e4m3:token/none", "kv=e4m3:token_head/none"},
      {"mask=causal&window(9,0)", "mask=causal&window(9,0) ring slots=12"},
      {"mask=causal&window(9,0) ring slots=12", "mask=causal&window(9,0) ring slots=13"},
  };
  for (const auto& row : rows) {
    const std::string head = "decode f32 b2 h2 q2 k20 d8 append ";
    on_kernels(head, [&](const How& how) {
      Exam base(head + row[0]), changed(head + row[1]);
      for (Exam* c : {&base, &changed}) {
        tools::poison(*c);
        run_all(*c, how);
        expect_all_finite(*c, TESSERA_OUT);
      }
      EXPECT_NE(base.values(TESSERA_OUT), changed.values(TESSERA_OUT)) << row[0] << " and " << row[1];
      expect_right(changed, row[1]);
    });
  }
  on_engines([](const How& how) {  // v_in_k: what is appended to k is in v
    Exam c = poisoned("decode f32 h4/1 q2 k20 d8/4 append v_in_k");
    run_all(c, how);
    const std::vector<double> before = c.values(TESSERA_OUT);
    c.set(TESSERA_K_NEW, {0, 1, 0, 3}, 9);
    run_all(c, how);
    EXPECT_NE(c.values(TESSERA_OUT), before);
    expect_right(c, "v_in_k");
  });
}

}  // namespace
}  // namespace tessera::test
