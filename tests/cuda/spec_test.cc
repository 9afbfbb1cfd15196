// What kernels are compiled for, in words and as source.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/code.h"

namespace tessera::cuda {
namespace {

using rules::Float;
using rules::ForwardSpec;

constexpr ForwardSpec good = {
    .dtype = Float::bf16, .dim = 128, .tile_rows = 128, .tile_keys = 64, .warps = 4, .stages = 2, .pairs = 0};

// Specs that differ from `good` in one field.
std::vector<ForwardSpec> neighbours() {
  std::vector<ForwardSpec> all(7, good);
  all[0].dtype = Float::f16;
  all[1].dim = 64;
  all[2].tile_rows = 256;
  all[3].tile_keys = 32;
  all[4].warps = 8;
  all[5].stages = 3;
  all[6].pairs = 1;
  return all;
}

std::vector<std::string> field_names() {
  std::vector<std::string> names;
  ForwardSpec spec = good;
  rules::visit_fields(spec, [&](const char* name, auto&) { names.push_back(name); });
  return names;
}

TEST(Spec, WhatShipsIsLegalAndNoneShipsTwice) {
  for (const ForwardSpec& spec : shipped_forward()) EXPECT_TRUE(rules::legal(spec)) << code_of(spec).text;
  for (const rules::BackwardSpec& spec : shipped_backward()) EXPECT_TRUE(rules::legal(spec)) << code_of(spec).text;
  for (const auto& [spec, least_keys] : shipped_sm90_forward()) {
    EXPECT_TRUE(rules::legal(spec)) << code_of(spec).text;
    EXPECT_LE(rules::shared_bytes(spec), 232448) << code_of(spec).text;  // of a Hopper block
  }
  std::set<std::string> texts, sources;
  for (const Code& code : shipped()) {
    EXPECT_TRUE(texts.insert(code.text).second) << code.text;
    EXPECT_TRUE(sources.insert(code.source).second) << code.text;
  }
  EXPECT_GE(texts.size(), shipped_forward().size() + shipped_general().size());
}

TEST(Spec, TextAndSourceNameEveryField) {
  EXPECT_EQ(field_names(),
            (std::vector<std::string>{"dtype", "dim", "tile_rows", "tile_keys", "warps", "stages", "pairs"}));
  const Code code = code_of(good);
  EXPECT_EQ(code.text, "forward dtype=bf16 dim=128 tile_rows=128 tile_keys=64 warps=4 stages=2 pairs=0");
  EXPECT_NE(
      code.source.find("#define TESSERA_SPEC {.dtype = tessera::rules::Float::bf16, .dim = 128, .tile_rows = 128, "
                       ".tile_keys = 64, .warps = 4, .stages = 2, .pairs = 0, }\n"),
      std::string::npos)
      << code.source;
  EXPECT_EQ(code.threads, 128);
  EXPECT_EQ(code.shared_bytes, 2 * 128 * (128 + 2 * 2 * 64) + 20 * 128 + 256);
}

TEST(Spec, OfHopperNamesEveryField) {
  const Code code = code_of(rules::Sm90ForwardSpec{Float::f16, 192, 128, 2, 96, 3, 1, 0, 0, 0});
  EXPECT_EQ(
      code.text,
      "sm90_forward dtype=f16 dim=192 dim_v=128 groups=2 tile_keys=96 stages=3 q_stages=1 turns=0 pairs=0 parts=0");
  EXPECT_NE(code.source.find(
                ".groups = 2, .tile_keys = 96, .stages = 3, .q_stages = 1, .turns = 0, .pairs = 0, .parts = 0, }"),
            std::string::npos)
      << code.source;
  EXPECT_EQ(code.threads, 3 * 128);
  // Rows of 3 slabs of 128 bytes, of V 2: q, three stages of k and v, the kernel's own.
  EXPECT_EQ(code.shared_bytes, 128 * (3 * 128 + 3 * (3 + 2) * 96) + 1024);
  EXPECT_EQ(code.least_arch, 90);
  EXPECT_TRUE(code.only_arch);
}

TEST(Spec, OfHopperSharesMemoryWithPairsAndPages) {
  constexpr rules::Sm90ForwardSpec plain = {Float::bf16, 128, 128, 2, 64, 2, 1, 1, 0, 0};
  rules::Sm90ForwardSpec pairs = plain, parts = plain;
  pairs.pairs = parts.parts = 1;
  EXPECT_EQ(rules::shared_bytes(pairs) - rules::shared_bytes(plain), 2 * 128 * 64 * 2);  // two tiles of bias
  EXPECT_EQ(rules::shared_bytes(parts) - rules::shared_bytes(plain), 4 * 64 * 4);        // a page for each key
  // Of bias and keep a tile each, if given.
  EXPECT_EQ(rules::pair_bytes_of_tile(pairs, true, false), 128 * 64 * 2);
  EXPECT_EQ(rules::pair_bytes_of_tile(pairs, false, true), 128 * 64);
  EXPECT_EQ(rules::pair_bytes_of_tile(pairs, true, true), 128 * 64 * (2 + 1));
  EXPECT_EQ(rules::pair_bytes_of_tile(pairs, false, false), 0);
  EXPECT_EQ(rules::pair_bytes(plain), 0);
}

TEST(Spec, OfHopperIllegal) {
  const rules::Sm90ForwardSpec good = {rules::Float::bf16, 128, 128, 2, 128, 2, 2, 1, 0, 0};
  EXPECT_TRUE(rules::legal(good));
  const auto bad = [&](const char* why, auto change) {
    rules::Sm90ForwardSpec spec = good;
    change(spec);
    EXPECT_FALSE(rules::legal(spec)) << why;
  };
  using Spec = rules::Sm90ForwardSpec;
  bad("a dim that is no multiple of 16", [](Spec& s) { s.dim = 72; });
  bad("a dim that is too large", [](Spec& s) { s.dim = 272; });
  bad("results of a width without products", [](Spec& s) { s.dim_v = 144; });
  bad("keys of a number without products", [](Spec& s) { s.tile_keys = 88; });
  bad("one group, which has too many registers", [](Spec& s) { s.groups = 1; });
  bad("four groups, which have too few", [](Spec& s) { s.groups = 4; });
  bad("no stage", [](Spec& s) { s.stages = 0; });
  bad("too many stages", [](Spec& s) { s.stages = 9; });
  bad("too many q", [](Spec& s) { s.q_stages = 3; });
  bad("three that take turns", [](Spec& s) { s.groups = 3; });
  bad("pairs that are neither there nor not", [](Spec& s) { s.pairs = 2; });
  bad("pairs of three groups", [](Spec& s) { s.pairs = 1, s.groups = 3, s.turns = 0; });
  bad("pairs of keys that are no whole words of 64", [](Spec& s) { s.pairs = 1, s.tile_keys = 96; });
  bad("parts that are neither there nor not", [](Spec& s) { s.parts = 2; });
}

// Plain ones come first, then those of parts and of pairs. Each dims' rows stand together, from the most keys to any
// number; the fewest columns come first.
TEST(Spec, OfHopperHasARowForAnyNumberOfKeys) {
  const std::span<const Sm90Choice> all = shipped_sm90_forward();
  const auto dims = [](const Sm90Choice& c) {
    return std::tuple(c.spec.dtype, c.spec.pairs, c.spec.parts, c.spec.dim, c.spec.dim_v);
  };
  const auto columns = [](const Sm90Choice& c) {
    return std::tuple(c.spec.dtype, c.spec.pairs, c.spec.parts, c.spec.dim + c.spec.dim_v);
  };
  for (size_t n = 0; n < all.size(); ++n) {
    const bool last = n + 1 == all.size() || dims(all[n]) != dims(all[n + 1]);
    EXPECT_EQ(last, all[n].least_keys == 0) << code_of(all[n].spec).text;
    EXPECT_TRUE(last || all[n].least_keys > all[n + 1].least_keys) << code_of(all[n].spec).text;
    EXPECT_LE(columns(all[n > 0 ? n - 1 : 0]), columns(all[n])) << code_of(all[n].spec).text;
  }
}

TEST(Spec, DifferentSpecsNeverHaveEqualText) {
  std::set<std::string> texts = {code_of(good).text}, sources = {code_of(good).source};
  for (const ForwardSpec& spec : neighbours()) {
    EXPECT_NE(spec, good);
    EXPECT_TRUE(texts.insert(code_of(spec).text).second) << code_of(spec).text;
    EXPECT_TRUE(sources.insert(code_of(spec).source).second) << code_of(spec).source;
  }
  EXPECT_EQ(texts.size(), field_names().size() + 1) << "a field has no neighbour in this test";
}

// A rule broken at a time. Each of these would not compile, or would leave rows or keys out.
TEST(Spec, LegalRefusesWhatCannotBe) {
  EXPECT_TRUE(rules::legal(good));
  const auto bad = [](const char* why, auto change) {
    ForwardSpec spec = good;
    change(spec);
    EXPECT_FALSE(rules::legal(spec)) << why << ": " << code_of(spec).text;
  };
  bad("no dim", [](ForwardSpec& s) { s.dim = 0; });
  bad("a dim below zero", [](ForwardSpec& s) { s.dim = -64; });
  bad("a dim that is no multiple of eight chunks", [](ForwardSpec& s) { s.dim = 96; });
  bad("a dim that the registers cannot hold", [](ForwardSpec& s) { s.dim = 512; });
  bad("no rows", [](ForwardSpec& s) { s.tile_rows = 0; });
  bad("rows that are no blocks of 16 for each warp", [](ForwardSpec& s) { s.tile_rows = 96; });
  bad("too many rows", [](ForwardSpec& s) { s.tile_rows = 1024; });
  bad("no keys", [](ForwardSpec& s) { s.tile_keys = 0; });
  bad("keys that are no multiple of 16", [](ForwardSpec& s) { s.tile_keys = 40; });
  bad("too many keys", [](ForwardSpec& s) { s.tile_keys = 512; });
  bad("no warps", [](ForwardSpec& s) { s.warps = 0; });
  bad("too many warps", [](ForwardSpec& s) { s.warps = 32, s.tile_rows = 512; });
  bad("threads that do not divide into rows", [](ForwardSpec& s) { s.warps = 2, s.dim = 192; });
  bad("biases of more rows than registers hold", [](ForwardSpec& s) { s.pairs = 1; });
  bad("pairs that are neither there nor not", [](ForwardSpec& s) { s.pairs = 2, s.tile_rows = 64; });
  bad("one stage, which is read while it is written", [](ForwardSpec& s) { s.stages = 1; });
  bad("too many stages", [](ForwardSpec& s) { s.stages = 9; });
  // The kernel tests keys in words of 32 (src/device/portable/forward.h): a half word would be left untested.
  bad("keys that are no multiple of 32", [](ForwardSpec& s) { s.tile_keys = 48; });
  bad("fewer keys than a word", [](ForwardSpec& s) { s.tile_keys = 16; });
}

// What a hint may ask for is refused here or compiles; the last stage of shared memory must hold the kernel's own.
TEST(Spec, SharedMemoryGrowsWithWhatIsInIt) {
  const auto more = [](auto change) {
    ForwardSpec spec = good;
    change(spec);
    return rules::shared_bytes(spec) - rules::shared_bytes(good);
  };
  EXPECT_EQ(more([](ForwardSpec& s) { s.stages = 3; }), 2 * 64 * 128 * 2);               // one tile of k, one of v
  EXPECT_EQ(more([](ForwardSpec& s) { s.tile_keys = 128; }), 2 * 2 * 64 * 128 * 2);      // 64 keys more, of each stage
  EXPECT_EQ(more([](ForwardSpec& s) { s.tile_rows = 256; }), 128 * 128 * 2 + 128 * 20);  // q, and what a row keeps
}

}  // namespace
}  // namespace tessera::cuda
