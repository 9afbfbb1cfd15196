// Hopper's forward kernel: what it launches, through the fake driver.
#include <cmath>

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
    EXPECT_EQ(padded.dim_v, 48);
    EXPECT_FLOAT_EQ(padded.scale, static_cast<float>(1 / std::sqrt(80.0)));
  });
}

// Each run counts from 0, on its stream and before its launch.
TEST(Sm90Launch, TheCounterIsCleared) {
  with_driver([] {
    const Case c(any_line);
    auto* const stream = reinterpret_cast<Stream>(0x1234);
    auto* const next = static_cast<int*>(c.bindings.workspace);
    for (int run = 0; run < 2; ++run) {
      next[0] = next[1] = 7;
      EXPECT_EQ(c.launch(stream).sm90.next, next);
      EXPECT_EQ(next[0], 0);
      EXPECT_EQ(next[1], 7);
      ASSERT_EQ(fake_fills(), run + 1);
      FakeFill fill;
      fake_fill(run, &fill);
      EXPECT_EQ(fill.begin, next);
      EXPECT_EQ(fill.value, 0u);
      EXPECT_EQ(fill.words, 1u);
      EXPECT_EQ(fill.stream, stream);
      EXPECT_EQ(fill.launches, fake_launches() - 1);
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

    const rules::Sm90ForwardParams capped = params(Case("forward bf16 d64 softcap=5 scale=-2"));
    EXPECT_EQ(capped.scale, 1);
    EXPECT_FLOAT_EQ(capped.scale_log2, static_cast<float>(M_LOG2E));
    EXPECT_EQ(capped.pairs.softcap, 5);
    EXPECT_FLOAT_EQ(capped.pairs.scale_to_cap, -0.4f);
    EXPECT_FALSE(capped.pairs.drops);
    EXPECT_EQ(capped.pairs.keep_scale, 1);

    const Case masked("forward bf16 b2 h2 q5 k7 d64 alibi=b,h mask=exclude_keys&documents");
    const rules::Sm90PairParams m = params(masked).pairs;
    EXPECT_EQ(m.scale, 0.125f);
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

TEST(Sm90Launch, SplitsAndTheirCombination) {
  with_driver([] {
    const Case c("forward bf16 q1024 k2048 d128 sink");
    const std::vector<FakeLaunch> all = c.launches();
    ASSERT_EQ(all.size(), 2u);
    const rules::Sm90ForwardParams& p = all[0].sm90;
    EXPECT_EQ(all[0].grid[0], 128u);
    EXPECT_EQ(p.splits, 16);
    EXPECT_EQ(p.items, 128);
    EXPECT_EQ(reinterpret_cast<std::byte*>(p.partials), static_cast<std::byte*>(c.bindings.workspace) + 64);
    EXPECT_TRUE(std::string(all[1].image).starts_with("general task=combine")) << all[1].image;
    EXPECT_EQ(all[1].general.splits, 16);
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
    EXPECT_EQ(fake_fills(), 0);
    // No keys, but rows: zeros and -inf. There is nothing to make a map of.
    const Case no_keys("forward bf16 b2 h4 q300 k0 d128");
    const rules::Sm90ForwardParams p = no_keys.launch().sm90;
    EXPECT_EQ(no_keys.bindings.data[TESSERA_K], nullptr);
    EXPECT_FALSE(is_zeros(p.q_map));
    EXPECT_TRUE(is_zeros(p.k_map));
    EXPECT_TRUE(is_zeros(p.v_map));
    EXPECT_EQ(p.items, 24);
    EXPECT_EQ(p.keys.longest, 0);
    // Rows, but no sequence that has them.
    const FakeLaunch tail = Case("forward bf16 h2 d64 mask=causal varlen=q[]k[] rows=q300").launch();
    EXPECT_STREQ(tail.entry, "tessera_general");
    EXPECT_EQ(tail.general.queries.rows, 300);
    EXPECT_EQ(fake_fills(), 1);
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

TEST(Sm90Run, AWorkspaceThatIsNoMemoryOfTheDevice) {
  with_driver([] {
    Case c(any_line);
    alignas(64) static std::byte here[64];
    c.bindings.workspace = here;
    c.expect_refused(TESSERA_FAILED, "clearing a part of the workspace: the CUDA driver says 1 (invalid argument)");
  });
}

}  // namespace
}  // namespace tessera::cuda
