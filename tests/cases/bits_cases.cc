// Bits: batch invariance, dropout, workspaces, order of calls.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "cases.h"

namespace tessera::test {
namespace {

// The bytes of row `i` of sequence plane `b` in out and lse.
std::vector<std::byte> row_bits(const Exam& c, int64_t b, int64_t i) {
  std::vector<std::byte> bits;
  for (const int name : {TESSERA_OUT, TESSERA_LSE}) {
    const tessera_operand& o = c.operand(name);
    const size_t size = tessera_dtype_bytes(o.dtype);
    for (int64_t h = 0; h < o.extent[2]; ++h)
      for (int64_t d = 0; d < o.extent[3]; ++d)
        bits.insert(bits.end(), c.at(name, {b, i, h, d}), c.at(name, {b, i, h, d}) + size);
  }
  return bits;
}

// Rows of q, k or v of one case into another.
void copy_rows(const Exam& from, int64_t plane, int64_t first, Exam& to, std::initializer_list<int> names) {
  for (const int name : names)
    to.put(name, [&](const Index& i) { return from.get(name, {plane, first + i[1], i[2], i[3]}); });
}

const char* const invariant_options[] = {"", " softcap=15 alibi", " sink mask=causal",
                                         " mask=causal&window(70,0)&first(3)"};

TEST(Cases, J04_PrefillAndDecodeAgree) {
  for (const char* dtype : {"bf16", "f16", "f32", "f64"})
    for (const char* options : {" mask=causal", " mask=causal softcap=20 alibi sink", " mask=causal&window(100,0)"})
      on_engines([&](const How& how) {
        const std::string head = fmt::format("forward {} h4/2 d192/128 k300{} batch_invariant q", dtype, options);
        Exam prefill(head + "300"), decode(head + "1");
        copy_rows(prefill, 0, 299, decode, {TESSERA_Q});
        run_all(prefill, how);
        run_all(decode, how);
        EXPECT_TRUE(row_bits(prefill, 0, 299) == row_bits(decode, 0, 0)) << head;
      });
}

// Also beside a V that is no number: it spoils its own dimension of the rows that see it, and no bit else.
TEST(Cases, J04_PrefillAndDecodeAgreeBesideANaN) {
  for (const char* dtype : {"bf16", "f16", "f32"})
    for (const int64_t row : {70, 79})
      for (const int64_t bad : {3, 66, 75})  // seen in a full tile, in one cut by the mask, and by few
        on_engines([&](const How& how) {
          const std::string head = fmt::format("forward {} h2 d8 k80 batch_invariant mask=causal", dtype);
          SCOPED_TRACE(fmt::format("{} row {} NaN at {}", head, row, bad));
          Exam prefill(head + " q80"), decode(fmt::format("{}@at({}) q1", head, row));
          prefill.set(TESSERA_V, {0, bad, 0, 3}, nan);
          copy_rows(prefill, 0, 0, decode, {TESSERA_K, TESSERA_V});
          copy_rows(prefill, 0, row, decode, {TESSERA_Q});
          run_all(prefill, how);
          run_all(decode, how);
          for (int64_t d = 0; d < 8; ++d)
            if (d != 3) {
              EXPECT_EQ(prefill.get(TESSERA_OUT, {0, row, 0, d}), decode.get(TESSERA_OUT, {0, 0, 0, d})) << d;
            }
          EXPECT_EQ(std::isnan(prefill.get(TESSERA_OUT, {0, row, 0, 3})), bad <= row);
        });
}

// However the queries of a sequence are chunked.
TEST(Cases, J04_ChunksOfQueriesAgree) {
  for (const char* dtype : {"bf16", "f32"})
    for (const char* options :
         {" mask=causal", " mask=causal&window(40,0)&first(2) sink", " mask=window(9,20) softcap=9 alibi"})
      on_engines([&](const How& how) {
        const std::string head = fmt::format("forward {} h6/2 d32 k130 batch_invariant", dtype);
        Exam whole(head + " q100" + options);
        run_all(whole, how);
        for (const int64_t step : {1, 7, 33, 64})
          for (int64_t first = 0; first < 100; first += std::max<int64_t>(step, 11)) {
            std::string at = options;  // query 0 of the chunk stands at key 30 + first
            at.insert(at.find(')') == std::string::npos || at.find("causal") != std::string::npos
                          ? at.find("causal") + 6
                          : at.find(')') + 1,
                      fmt::format("@at({})", 30 + first));
            Exam chunk(fmt::format("{} q{}{}", head, std::min(step, 100 - first), at));
            copy_rows(whole, 0, first, chunk, {TESSERA_Q});
            run_all(chunk, how);
            for (int64_t i = 0; i < chunk.problem().len_q; ++i)
              ASSERT_TRUE(row_bits(whole, 0, first + i) == row_bits(chunk, 0, i)) << at << " row " << i;
          }
      });
}

// Whatever else is in the batch.
TEST(Cases, J04_ASequenceAloneAndInABatchAgree) {
  for (const char* dtype : {"bf16", "f32"})
    for (const char* options : invariant_options)
      on_engines([&](const How& how) {
        const std::string head = fmt::format("forward {} h4/2 d24 batch_invariant{}", dtype, options);
        const std::vector<int64_t> rows = {70, 1, 5, 33}, keys = {90, 200, 5, 64};
        Exam dense(head + " b4 q70 k200 seqused=q[70,1,5,33]k[90,200,5,64]"),
            packed(head + " varlen=q[70,1,5,33]k[90,200,5,64]");
        run_all(dense, how);
        run_all(packed, how);
        int64_t first_q = 0, first_k = 0;
        for (size_t b = 0; b < rows.size(); ++b) {
          Exam alone(fmt::format("{} q{} k{}", head, rows[b], keys[b]));
          const auto batch = static_cast<int64_t>(b);
          copy_rows(dense, batch, 0, alone, {TESSERA_Q, TESSERA_K, TESSERA_V});
          run_all(alone, how);
          for (int64_t i = 0; i < rows[b]; ++i)
            ASSERT_TRUE(row_bits(dense, batch, i) == row_bits(alone, 0, i)) << head << b;
          copy_rows(packed, 0, first_q, alone, {TESSERA_Q});
          copy_rows(packed, 0, first_k, alone, {TESSERA_K, TESSERA_V});
          run_all(alone, how);
          for (int64_t i = 0; i < rows[b]; ++i)
            ASSERT_TRUE(row_bits(packed, 0, first_q + i) == row_bits(alone, 0, i)) << head << b;
          first_q += rows[b];
          first_k += keys[b];
        }
      });
}

TEST(Cases, J05_CapacityChangesNothing) {
  on_engines([](const How& how) {
    Exam roomy("forward bf16 h8/2 q1 k4096 d64 seqused=k[300] batch_invariant"),
        tight("forward bf16 h8/2 q1 k300 d64 batch_invariant");
    copy_rows(roomy, 0, 0, tight, {TESSERA_Q, TESSERA_K, TESSERA_V});
    run_all(roomy, how);
    run_all(tight, how);
    EXPECT_TRUE(output_bits(roomy) == output_bits(tight));
  });
}

std::vector<uint8_t> dropout(double p, uint64_t seed, uint64_t offset, int64_t b, int64_t h, int64_t heads,
                             int64_t rows, int64_t keys) {
  std::vector<uint8_t> grid(static_cast<size_t>(rows * keys));
  tessera_error error = tools::fresh_error();
  tools::call(tessera_dropout_mask(p, seed, offset, b, h, heads, rows, keys, grid.data(), &error), error);
  return grid;
}

// The first words of Philox4x32-10 for counter 0 and key 0 belong to (0, 0), (0, 8), (8, 0) and (8, 8).
TEST(Cases, J06_DropoutKnownAnswers) {
  const double words[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  const size_t places[] = {0, 8, 8 * 9, 8 * 9 + 8};
  for (int n = 0; n < 4; ++n) {
    EXPECT_EQ(dropout(words[n] / 0x1p32, 0, 0, 0, 0, 1, 9, 9)[places[n]], 1) << n;        // word >= threshold
    EXPECT_EQ(dropout((words[n] + 1) / 0x1p32, 0, 0, 0, 0, 1, 9, 9)[places[n]], 0) << n;  // one more
  }
  const std::vector<uint8_t> base = dropout(0.5, 7, 0, 1, 2, 4, 40, 40);
  EXPECT_EQ(base, dropout(0.5, 7, 0, 1, 2, 4, 40, 40));
  EXPECT_EQ(base, dropout(0.5, 7, 0, 0, 6, 8, 40, 40));  // b Hq + h is all that counts
  EXPECT_NE(base, dropout(0.5, 8, 0, 1, 2, 4, 40, 40));
  EXPECT_NE(base, dropout(0.5, 7, 1, 1, 2, 4, 40, 40));
  EXPECT_NE(base, dropout(0.5, 7, uint64_t{1} << 32, 1, 2, 4, 40, 40));
  EXPECT_NE(base, dropout(0.5, 7 + (uint64_t{1} << 32), 0, 1, 2, 4, 40, 40));
  EXPECT_NE(base, dropout(0.5, 7, 0, 1, 3, 4, 40, 40));
  const auto share = static_cast<double>(std::count(base.begin(), base.end(), 1)) / 1600;
  EXPECT_NEAR(share, 0.5, 0.06);
  for (const uint8_t keep : dropout(0, 7, 0, 1, 2, 4, 5, 5)) EXPECT_EQ(keep, 1);
}

// With v and dO the identity, out is the mask by rows and dV the mask by keys.
TEST(Cases, J06_OneMaskForForwardAndBackward) {
  for (const int tile : {0, 1, 16, 33})
    on_engines([&](How how) {
      how.tile_rows = how.tile_keys = tile;
      for (const uint64_t offset : {uint64_t{0}, uint64_t{5}, (uint64_t{9} << 32) + 1}) {
        Exam c("backward f32 b2 h2/1 q40 k40 d40 dropout=0.25@seed123456789012");
        c.put(TESSERA_Q, 0);
        for (const int name : {TESSERA_V, TESSERA_DOUT}) c.put(name, [](const Index& i) { return i[1] == i[3]; });
        tessera_bindings bound = c.bindings();
        bound.offset = offset;
        expect_ok(attempt(tools::forward_of(c.problem()), bound, how));
        expect_ok(attempt(c.problem(), bound, how));
        for (int64_t b = 0; b < 2; ++b) {
          const std::vector<uint8_t> kept[] = {dropout(0.25, 123456789012, offset, b, 0, 2, 40, 40),
                                               dropout(0.25, 123456789012, offset, b, 1, 2, 40, 40)};
          const double weight = 1 / 0.75 / 40;
          for (int64_t i = 0; i < 40; ++i)
            for (int64_t j = 0; j < 40; ++j) {
              double both = 0;  // heads of the group
              for (int64_t h = 0; h < 2; ++h) {
                const int keep = kept[h][static_cast<size_t>(i * 40 + j)];
                both += keep * weight;
                ASSERT_NEAR(c.get(TESSERA_OUT, {b, i, h, j}), keep * weight, 1e-7);
              }
              ASSERT_NEAR(c.get(TESSERA_DV, {b, j, 0, i}), both, 1e-7);
            }
          ASSERT_NEAR(c.get(TESSERA_LSE, {b, 3, 1, 0}), std::log(40.0), 1e-6);  // lse knows nothing of it
        }
      }
    });
}

// Rows beyond 2^16 have words of their own.
TEST(Cases, D13_DropoutOfFarRows) {
  on_engines([](const How& how) {
    Exam c("forward f32 q65600 k16 d1/16 dropout=0.5@seed2");
    c.put(TESSERA_Q, 0);
    c.put(TESSERA_V, [](const Index& i) { return i[1] == i[3]; });
    run_all(c, how);
    const std::vector<uint8_t> kept = dropout(0.5, 2, 0, 0, 0, 1, 65600, 16);
    for (int64_t i = 0; i < 65600; ++i)
      for (int64_t j = 0; j < 16; ++j)
        ASSERT_EQ(c.get(TESSERA_OUT, {0, i, 0, j}) != 0, kept[static_cast<size_t>(i * 16 + j)] != 0) << i << " " << j;
    EXPECT_FALSE(std::equal(kept.begin(), kept.begin() + 64 * 16, kept.begin() + 65536 * 16));
  });
}

// Whoever takes which tile, and however often.
TEST(Cases, J02_F11_J07_TheSameBitsEveryTime) {
  for (const char* line :
       {"backward bf16 h2 q64 k300 d32 mask=causal deterministic",
        "backward bf16 h2 q300 k64 d32 mask=causal deterministic",
        "backward f32 h4/2 d16 varlen=q[9,130,1]k[70,9,200] mask=causal bias=1,h,q,k sink alibi deterministic",
        "forward f16 h16/2 q65 k129 d512"}) {
    const std::vector<std::byte> bits = bits_of(line, {"cpu", 1});
    for (int turn = 0; turn < 10; ++turn) EXPECT_TRUE(bits_of(line, {"cpu", 1 + turn % 4}) == bits) << line;
  }
}

// Many threads, one plan, a workspace each.
TEST(Cases, K07_OnePlanManyThreads) {
  const std::string line = "forward bf16 h4/2 q40 k50 d16 mask=causal";
  const std::vector<std::byte> want = bits_of(line);
  const Exam model(line);
  tools::Choice choice;
  choice.threads = 2;
  const tools::Plan plan(model.problem(), choice);
  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < wrong.size(); ++t)
    threads.emplace_back([&, t] {
      const Exam c(line);
      const tools::Buffer workspace = tools::allocate(static_cast<size_t>(plan.facts().workspace_bytes), 64);
      tessera_bindings bound = c.bindings();
      bound.workspace = workspace.memory.get();
      bound.workspace_bytes = plan.facts().workspace_bytes;
      for (int turn = 0; turn < 10; ++turn)
        wrong[t] += tessera_run(plan.get(), &bound, nullptr, nullptr) != TESSERA_OK || output_bits(c) != want;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4));
}

const char* const ten_lines[] = {
    "forward f32 b2 h4/2 q40 k50 d16 mask=causal",
    "backward bf16 b2 h4/2 q33 k65 d24 mask=causal softcap=9 dlse",
    "forward bf16 h8/1 q1 k300 d64 batch_invariant",
    "backward f32 h2 d8 varlen=q[9,0,65]k[9,3,70] sink alibi bias=b,h,q,k",
    "forward f16 b3 h2 q17 k129 d80/48 seqused=k[1,129,40] mask=exclude_keys max",
    "backward f64 h3 q20 k30 d5 mask=window(4,4)@top_left dropout=0.4@seed3",
    "forward f32 b0 h2 q3 k3 d4",
    "backward f16 h2 q30 k0 d8",
    "forward bf16 h2 q130 k130 d32 mask=prefix(40)&documents layout=qkv",
    "backward bf16 h5/1 q64 k64 d40 mask=keep(1,h,q,k) grads=dk,dv deterministic",
};

// Contents do not matter, nor who used it before.
TEST(Cases, K08_WorkspaceContents) {
  on_engines([](const How& how) {
    size_t most = 0;
    std::vector<std::vector<std::byte>> bits;
    for (const char* line : ten_lines) {
      Exam c(line);
      if (c.problem().pass == TESSERA_BACKWARD)
        expect_ok(attempt(tools::forward_of(c.problem()), c.bindings(), how, 0));
      expect_ok(attempt(c.problem(), c.bindings(), how, 0));
      bits.push_back(output_bits(c));
      expect_ok(attempt(c.problem(), c.bindings(), how, 0xFF));
      EXPECT_TRUE(output_bits(c) == bits.back()) << line;
      tools::Choice choice;
      choice.kernels = how.kernels;
      choice.threads = how.threads;
      most = std::max(most, static_cast<size_t>(tools::Plan(c.problem(), choice).facts().workspace_bytes));
    }
    // One workspace for all in turn, never cleared.
    const tools::Buffer workspace = tools::allocate(most, 64);
    tools::Choice choice;
    choice.kernels = how.kernels;
    choice.threads = how.threads;
    for (size_t n = 0; n < std::size(ten_lines); ++n) {
      Exam c(ten_lines[n]);
      if (c.problem().pass == TESSERA_BACKWARD) run(c, tools::forward_of(c.problem()), how);
      const tools::Plan plan(c.problem(), choice);
      tessera_bindings bound = c.bindings();
      bound.workspace = workspace.memory.get();
      bound.workspace_bytes = static_cast<int64_t>(most);
      tessera_error error = tools::fresh_error();
      tools::call(tessera_run(plan.get(), &bound, nullptr, &error), error);
      EXPECT_TRUE(output_bits(c) == bits[n]) << ten_lines[n];
    }
  });
}

TEST(Cases, K09_OnePlanManyRuns) {
  on_engines([](const How& how) {
    for (const char* line : {"forward f32 h2 d8 varlen=q[9,40]k[30,40] mask=causal",
                             "backward f32 h2 d8 varlen=q[9,40]k[30,40] mask=causal"}) {
      Exam c(line);
      if (c.problem().pass == TESSERA_BACKWARD) run(c, tools::forward_of(c.problem()), how);
      tools::Choice choice;
      choice.kernels = how.kernels;
      tools::Runner runner(c, choice);
      runner.run();
      const std::vector<std::byte> bits = output_bits(c);
      for (int turn = 0; turn < 3; ++turn) {
        c.value(TESSERA_CU_SEQLENS_Q, 1) = -1;  // a run that is refused leaves nothing behind
        EXPECT_THROW(runner.run(), tools::Error);
        c.value(TESSERA_CU_SEQLENS_Q, 1) = 9;
        for (const int name : tools::outputs(c.problem())) c.wipe(name);
        runner.run();
        EXPECT_TRUE(output_bits(c) == bits) << turn;
      }
    }
  });
}

TEST(Cases, K11_MoreRowsThanPlanned) {
  on_engines([](const How& how) {
    Exam c("forward f32 h2 d8 varlen=q[4,4]k[5,5] q9");
    c.value(TESSERA_CU_SEQLENS_Q, 2) = 9;
    expect_invalid(attempt(c.problem(), c.bindings(), how), {"cu_seqlens_q", "9", "8"});
  });
}

// The bits of a line in a process of its own, by this very binary.
uint64_t hash(const std::vector<std::byte>& bits) {
  uint64_t h = 14695981039346656037u;  // FNV-1a
  for (const std::byte b : bits) h = (h ^ static_cast<uint64_t>(b)) * 1099511628211u;
  return h;
}
TEST(Cases, DISABLED_BitsOfOneLine) {
  std::string line;  // from stdin
  if (std::getline(std::cin, line)) std::printf("\nbits %016lx\n", static_cast<unsigned long>(hash(bits_of(line))));
}
uint64_t isolated(const char* line) {
  char self[4096];
  const ssize_t n = ::readlink("/proc/self/exe", self, sizeof self - 1);
  if (n <= 0) return 0;
  self[n] = 0;
  const std::string command = fmt::format(
      "echo '{}' | '{}' --gtest_also_run_disabled_tests --gtest_filter=Cases.DISABLED_BitsOfOneLine", line, self);
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  unsigned long found = 0;
  char text[512];
  while (pipe && std::fgets(text, sizeof text, pipe)) std::sscanf(text, "bits %lx", &found);
  if (pipe) ::pclose(pipe);
  return found;
}
TEST(Cases, K_OrderOfCallsDoesNotMatter) {
  std::vector<uint64_t> alone;
  for (const char* line : ten_lines) alone.push_back(isolated(line));
  for (size_t a = 0; a < std::size(ten_lines); ++a)
    for (const size_t b : {a, (a + 3) % std::size(ten_lines), (a + 7) % std::size(ten_lines)})
      for (const size_t n : {a, b, b, a})
        ASSERT_EQ(hash(bits_of(ten_lines[n])), alone[n]) << ten_lines[a] << "\n  and\n" << ten_lines[b];
}

}  // namespace
}  // namespace tessera::test
