// Hopper's forward kernel: what it launches, through the fake driver.
#include <cmath>
#include <set>

#include "on_fake.h"

namespace tessera::cuda {
namespace {

using test::Case;
using test::with_driver;

constexpr const char* any_line = "forward bf16 b2 h4/2 q300 k200 d128 status";

TEST(Sm90Launch, GridAndParameters) {
  with_driver([] {
    const Case c(any_line);
    auto* const stream = reinterpret_cast<Stream>(0x1234);
    const FakeLaunch launch = c.launch(stream);
    EXPECT_STREQ(launch.entry, "tessera_sm90_forward");
    EXPECT_EQ(launch.grid[0], 2u * 4 * 3);
    EXPECT_EQ(launch.block[0], 384u);
    EXPECT_EQ(launch.shared_bytes, 197632u);
    EXPECT_EQ(launch.stream, stream);
    const rules::Sm90ForwardParams& p = launch.sm90;
    EXPECT_EQ(p.items, 2 * 4 * 3);
    EXPECT_EQ(p.dim, 128);
    EXPECT_EQ(p.dim_v, 128);
    EXPECT_EQ(p.row_tiles, 3);
    EXPECT_EQ(p.out, c.bindings.data[TESSERA_OUT]);
    EXPECT_EQ(p.lse, c.bindings.data[TESSERA_LSE]);
    EXPECT_EQ(p.status, c.bindings.data[TESSERA_STATUS]);
    EXPECT_EQ(p.queries.longest, 300);
    EXPECT_EQ(p.keys.longest, 200);
    EXPECT_EQ(p.out_step.row, 4 * 128);
    EXPECT_EQ(p.slack, 8);
    const FakeLaunch many = Case("forward bf16 b4 h32/8 q4096 k64 d128").launch();
    EXPECT_EQ(many.grid[0], 132u);
    EXPECT_EQ(many.sm90.items, 4 * 32 * 32);
    const rules::Sm90ForwardParams padded = Case("forward bf16 d80/48").launch().sm90;
    EXPECT_EQ(padded.dim, 80);
    EXPECT_EQ(padded.dim_v, 48);
    EXPECT_FLOAT_EQ(padded.scale, static_cast<float>(1 / std::sqrt(80.0)));
  });
}

// The workspace, of which the host writes nothing; or none, where blocks need not count.
TEST(Sm90Launch, Turns) {
  with_driver([] {
    const Case counted("forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal");
    auto* const turns = static_cast<rules::Turns*>(counted.bindings.workspace);
    *turns = {5, 7};
    EXPECT_EQ(counted.launch().sm90.turns, turns);
    EXPECT_EQ(turns->tag, 5u);
    EXPECT_EQ(turns->taken, 7);
    for (const char* line :
         {any_line, "forward bf16 b4 h32/8 q4096 k4096 d128", "forward bf16 b2 h4/2 q300 k200 d128 mask=causal"})
      EXPECT_EQ(Case(line).launch().sm90.turns, nullptr) << line;
  });
}

// What lies in the workspace is known to be a launch's own by its number. Odd ones are the device's.
TEST(Sm90Launch, EachHasItsNumber) {
  with_driver([] {
    const Case a("forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal"), b(any_line);
    std::set<unsigned long long> numbers;
    for (const Case* c : {&a, &a, &b, &a, &b}) {
      const unsigned long long number = c->launch().sm90.launch;
      EXPECT_NE(number, 0u);
      EXPECT_EQ(number % 2, 0u);
      EXPECT_TRUE(numbers.insert(number).second) << number;
    }
  });
}

TEST(Sm90Launch, BandsIn32Bits) {
  with_driver([] {
    const auto band = [](const std::string& mask) {
      return Case(("forward bf16 q5 k7 d64 mask=" + mask).c_str()).launch().sm90.narrow_band;
    };
    EXPECT_TRUE(band("causal").causal);
    EXPECT_EQ(band("causal").left, rules::farthest<int>);
    EXPECT_EQ(band("window(3,unbounded)&first(2)").left, 3);
    EXPECT_EQ(band("window(3,unbounded)&first(2)").right, rules::farthest<int>);
    EXPECT_EQ(band("window(3,unbounded)&first(2)").first, 2);
    EXPECT_EQ(band("chunk(4)@at(-3)").chunk, 4);
    EXPECT_TRUE(band("chunk(4)@at(-3)").chunked);
    EXPECT_EQ(band("chunk(4)@at(-3)").offset, -3);
    EXPECT_EQ(band("prefix(5000000000)").prefix, rules::farthest<int>);
  });
}

// Causal and no more: the device needs one comparison a score.
TEST(Sm90Launch, PlainCausal) {
  constexpr struct {
    const char* line;
    bool plain;
  } rows[] = {
      {"forward bf16 q5 k7 d64 mask=causal", true},
      {"forward bf16 q5 k7 d64 mask=causal@top_left", true},
      {"forward bf16 b2 q5 k7 d64 mask=causal@at[1,2]", true},
      {"forward bf16 b2 q5 k7 d64 mask=causal&exclude_keys seqused=q[1,2]k[3,4]", true},
      {"decode bf16 q64 k100 d64 page=16 mask=causal", true},
      {"forward bf16 q5 k7 d64 mask=prefix(0)", true},  // it is causal where there is no prefix
      {"forward bf16 q5 k7 d64 mask=causal&window(unbounded,unbounded)", true},
      {"forward bf16 q5 k7 d64", false},
      {"forward bf16 q5 k7 d64 mask=window(unbounded,0)", false},
      {"forward bf16 q5 k7 d64 mask=causal&window(3,unbounded)", false},
      {"forward bf16 q5 k7 d64 mask=causal&window(unbounded,3)", false},
      {"forward bf16 q5 k7 d64 mask=causal&window(unbounded,unbounded)&first(2)", false},
      {"forward bf16 q5 k7 d64 mask=causal&chunk(4)", false},
      {"forward bf16 q5 k7 d64 mask=prefix(3)", false},
  };
  with_driver([&] {
    for (const auto& [line, plain] : rows) EXPECT_EQ(Case(line).launch().sm90.plain_causal, plain) << line;
  });
}

// Who multiplies products by the problem's scale (here 1/8, 1/16 of dim 256): the exponential, unless something is
// added to scores before, or they are capped. And how many tiles of what lies beside scores have room.
TEST(Sm90Launch, ScalesAndSlotsOfPairs) {
  constexpr struct {
    const char* line;
    float scale, pair_scale;
    int slots;
  } rows[] = {
      {"forward bf16 q5 k16 d64 mask=keep", 0.125f, 1, 4},
      {"forward bf16 q5 k16 d256 mask=keep", 0.0625f, 1, 4},
      {"forward bf16 q5 k16 d64 mask=exclude_keys", 0.125f, 1, 0},
      {"forward bf16 q5 k16 d64 mask=documents", 0.125f, 1, 0},
      {"forward bf16 q5 k16 d64 dropout=0.5", 0.125f, 1, 0},
      {"forward bf16 q5 k16 d64 bias=1,1,q,k", 1, 0.125f, 2},
      {"forward bf16 q5 k16 d256 bias=1,1,1,k", 1, 0.0625f, 2},
      {"forward bf16 q5 k16 d64 bias=1,1,q,k scale=-2", 1, -2, 2},
      {"forward bf16 q5 k16 d64 alibi", 1, 0.125f, 0},
      {"forward bf16 q5 k16 d64 alibi mask=keep", 1, 0.125f, 4},
      {"forward bf16 q5 k16 d64 bias=1,1,q,k mask=keep", 1, 0.125f, 1},
      {"forward bf16 q5 k16 d64 softcap=5", 1, 1, 0},
      {"forward bf16 q5 k16 d64 softcap=5 alibi", 1, 1, 0},
      {"forward bf16 q5 k16 d64 softcap=5 bias=1,1,q,k", 1, 1, 2},
      {"forward bf16 q5 k16 d64 softcap=5 mask=keep scale=0", 1, 1, 4},
  };
  with_driver([&] {
    for (const auto& [line, scale, pair_scale, slots] : rows) {
      const rules::Sm90ForwardParams p = Case(line).launch().sm90;
      EXPECT_EQ(p.scale, scale) << line;
      EXPECT_FLOAT_EQ(p.scale_log2, static_cast<float>(scale * M_LOG2E)) << line;
      EXPECT_EQ(p.pairs.scale, pair_scale) << line;
      EXPECT_EQ(p.pairs.slots, slots) << line;
    }
  });
}

TEST(Sm90Launch, WhatPairsHave) {
  with_driver([] {
    const auto params = [](const Case& c) { return c.launch().sm90; };
    const rules::Sm90ForwardParams plain = params(Case("forward bf16 d64"));
    EXPECT_FLOAT_EQ(plain.scale, 0.125f);
    EXPECT_EQ(plain.pairs.slopes, nullptr);
    EXPECT_EQ(plain.sinks, nullptr);

    const Case sink("forward bf16 h2 d64 sink");
    EXPECT_EQ(params(sink).sinks, sink.bindings.data[TESSERA_SINKS]);
    EXPECT_EQ(params(sink).sink_step.head, 1);
    EXPECT_FLOAT_EQ(params(sink).scale, 0.125f);

    const rules::Sm90PairParams capped = params(Case("forward bf16 d64 softcap=5 scale=-2")).pairs;
    EXPECT_EQ(capped.softcap, 5);
    EXPECT_FLOAT_EQ(capped.scale_to_cap, -0.4f);
    EXPECT_FALSE(capped.drops);
    EXPECT_EQ(capped.keep_scale, 1);

    const Case masked("forward bf16 b2 h2 q5 k7 d64 alibi=b,h mask=exclude_keys&documents");
    const rules::Sm90PairParams m = params(masked).pairs;
    EXPECT_EQ(m.softcap, 0);
    EXPECT_EQ(m.scale_to_cap, 0);
    EXPECT_EQ(m.slopes, masked.bindings.data[TESSERA_SLOPES]);
    EXPECT_EQ(m.excluded, masked.bindings.data[TESSERA_EXCLUDE_KEYS]);
    EXPECT_EQ(m.documents_q, masked.bindings.data[TESSERA_DOCUMENTS_Q]);
    EXPECT_EQ(m.documents_k, masked.bindings.data[TESSERA_DOCUMENTS_K]);
    EXPECT_EQ(m.slope_step.batch, 2);
    EXPECT_EQ(m.slope_step.head, 1);
    EXPECT_EQ(m.excluded_step.batch, 7);
    EXPECT_EQ(m.document_q_step.batch, 5);
    EXPECT_EQ(m.document_k_step.row, 1);

    Case dropping("forward bf16 d64 dropout=0.75");
    dropping.bindings.seed = 11;
    dropping.bindings.offset = 13;
    const rules::Sm90PairParams d = params(dropping).pairs;
    const rules::Dropout expected = rules::make_dropout(0.75, 11, 13, 0);
    EXPECT_TRUE(d.drops);
    EXPECT_EQ(d.keep_scale, 4);
    EXPECT_EQ(d.dropout.threshold, expected.threshold);
    EXPECT_EQ(d.dropout.words(2, 3).at[0], expected.words(2, 3).at[0]);
  });
}

TEST(Sm90Launch, NewTokens) {
  with_driver([] {
    const Case appends("decode bf16 b2 q64 k100 n5 d64 append left_pad");
    const std::vector<FakeLaunch> all = appends.launches();
    ASSERT_EQ(all.size(), 2u);
    EXPECT_TRUE(std::string(all[0].image).starts_with("general task=append")) << all[0].image;
    EXPECT_EQ(all[0].general.k_new.data, appends.bindings.data[TESSERA_K_NEW]);
    const rules::Sm90ForwardParams& p = all[1].sm90;
    EXPECT_TRUE(p.cache.is_cache);
    EXPECT_EQ(p.cache.lens, appends.bindings.data[TESSERA_CACHE_LENS]);
    EXPECT_EQ(p.cache.left_pad, appends.bindings.data[TESSERA_LEFT_PAD]);
    EXPECT_EQ(p.cache.page, 0);
    EXPECT_EQ(p.fresh.longest, 5);
    EXPECT_EQ(p.page_rows, 128);
    // New tokens, but no query.
    const std::vector<FakeLaunch> only = Case("decode bf16 b2 q64 k100 n5 d64 append varlen=q[0,0]").launches();
    ASSERT_EQ(only.size(), 1u);
    EXPECT_TRUE(std::string(only[0].image).starts_with("general task=append")) << only[0].image;
  });
}

TEST(Sm90Launch, PackedQueries) {
  with_driver([] {
    const Case c("forward bf16 h4/2 d64 varlen=q[100,200,0]k[50,60,70]");
    const std::vector<FakeLaunch> all = c.launches();
    ASSERT_EQ(all.size(), 2u);
    EXPECT_EQ(all[0].grid[0], 3u * 4 * 2);
    EXPECT_EQ(all[0].sm90.queries.cu, c.bindings.data[TESSERA_CU_SEQLENS_Q]);
    EXPECT_EQ(all[0].sm90.queries.rows, 300);
    // Rows past the last sequence, if the device's list ends before them.
    EXPECT_STREQ(all[1].entry, "tessera_general");
    EXPECT_TRUE(std::string(all[1].image).starts_with("general task=clear")) << all[1].image;
    EXPECT_EQ(all[1].general.out.data, c.bindings.data[TESSERA_OUT]);
    EXPECT_EQ(all[1].general.queries.cu, c.bindings.data[TESSERA_CU_SEQLENS_Q]);
    EXPECT_EQ(all[1].stream, all[0].stream);
  });
}

TEST(Sm90Launch, SplitsAndTheirCombination) {
  with_driver([] {
    const FakeLaunch joined = Case("forward bf16 q1024 k2048 d128 sink").launch();
    EXPECT_EQ(joined.grid[0], 64u);
    EXPECT_EQ(joined.cluster, 8u);
    EXPECT_EQ(joined.sm90.splits, 8);
    EXPECT_TRUE(joined.sm90.joins);
    EXPECT_EQ(joined.sm90.partials, nullptr);
    const Case c("forward bf16 q128 k20000 d128 sink");
    const std::vector<FakeLaunch> all = c.launches();
    ASSERT_EQ(all.size(), 2u);
    const rules::Sm90ForwardParams& p = all[0].sm90;
    EXPECT_EQ(all[0].grid[0], 132u);
    EXPECT_EQ(all[0].cluster, 1u);
    EXPECT_EQ(p.splits, 132);
    EXPECT_FALSE(p.joins);
    EXPECT_EQ(p.items, 132);
    EXPECT_EQ(p.turns, nullptr);
    EXPECT_EQ(p.partials, c.bindings.workspace);
    EXPECT_TRUE(std::string(all[1].image).starts_with("general task=combine")) << all[1].image;
    EXPECT_EQ(all[1].general.splits, 132);
    EXPECT_EQ(all[1].general.partials, p.partials);
    EXPECT_EQ(all[1].general.sinks.data, c.bindings.data[TESSERA_SINKS]);
    const rules::Sm90ForwardParams whole = Case("forward bf16 q1024 k128 d128").launch().sm90;
    EXPECT_EQ(whole.splits, 1);
    EXPECT_EQ(whole.items, 8);
  });
}

TEST(Sm90Launch, WhatIsEmpty) {
  with_driver([] {
    for (const char* line : {"forward bf16 b0 h4 q300 k200 d128", "forward bf16 b2 h4 q0 k200 d128",
                             "forward bf16 h2 q5 d64 varlen=q[0,0]k[3,4]"})
      EXPECT_TRUE(Case(line).launches().empty()) << line;
    EXPECT_EQ(fake_loads(), 0);
    // No keys, but rows: zeros and -inf.
    const rules::Sm90ForwardParams p = Case("forward bf16 b2 h4 q300 k0 d128").launch().sm90;
    EXPECT_EQ(p.items, 24);
    EXPECT_EQ(p.keys.longest, 0);
    // Rows, but no sequence that has them.
    const FakeLaunch tail = Case("forward bf16 h2 d64 mask=causal varlen=q[]k[] rows=q300").launch();
    EXPECT_STREQ(tail.entry, "tessera_general");
    EXPECT_EQ(tail.general.queries.rows, 300);
  });
}

TEST(Sm90Run, PointersAreAligned) {
  with_driver([] {
    for (const auto& [name, text] : {std::pair(TESSERA_Q, "q"), std::pair(TESSERA_K, "k"), std::pair(TESSERA_V, "v"),
                                     std::pair(TESSERA_OUT, "out")}) {
      Case c(any_line);
      c.bindings.data[name] = static_cast<std::byte*>(c.bindings.data[name]) + 8;
      c.expect_refused(TESSERA_INVALID, std::string(text) + " is at address 0x");
      c.expect_refused(TESSERA_INVALID, "the problem promised multiples of 16 bytes");
    }
  });
}

}  // namespace
}  // namespace tessera::cuda
