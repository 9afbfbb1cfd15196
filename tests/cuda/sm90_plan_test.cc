// Hopper's forward kernel: what it takes and refuses, its plans.
#include <algorithm>

#include "cuda/loaded.h"
#include "cuda/tensor_map.h"
#include "plan_of.h"
#include "tests/api/calls.h"
#include "tests/core/refusal.h"

namespace tessera::cuda {
namespace {

using core::Device;
using core::Hints;
using core::Plan;
using core::refusal;

const Hints sm90 = test::allowing("cuda.sm90");

TEST(Sm90Plan, WhatTheKernelHas) {
  for (const char* line :
       {"forward bf16 d64", "forward f16 d64", "forward bf16 d128", "forward f16 d128 nolse", "forward bf16 d8",
        "forward bf16 d72", "forward f16 d192/128", "forward bf16 d64/256", "forward bf16 q300 k300 d256 mask=causal",
        "forward bf16 b2 h6/2 q5 k7 d64 layout=bhsd", "forward bf16 b2 h6/2 q5 k7 d64 layout=qkv",
        "forward bf16 q5 k7 d64 mask=causal@top_left", "forward bf16 q5 k7 d64 mask=window(unbounded,3)&first(1)",
        "forward bf16 q5 k7 d64 mask=window(134217728,0)", "forward bf16 q5 k7 d64 mask=chunk(4)&causal",
        "forward bf16 q5 k7 d64 mask=prefix(3)", "forward bf16 b2 q5 k7 d64 mask=causal@at[1,2]",
        "forward bf16 d64 varlen=q[3,0,5]k[4,2,1]", "forward bf16 b2 q5 k7 d64 seqused=q[1,2]k[3,4]",
        "forward bf16 d64 varlen=q[3,5] k9 b2 seqused=k[1,2] status",
        "forward bf16 d64 scale=0.5 deterministic allow_tf32", "forward bf16 b0 d64", "forward bf16 q0 d64",
        "forward bf16 k0 d64", "forward bf16 q134217728 k134217728 d64", "forward bf16 b67108864 q1 k1 d64",
        "forward bf16 b2 h6/2 q5 k8 d64 bias=b,h,q,k", "forward f16 q5 k7 d64 bias=1,1,1,k scale=-2",
        "forward bf16 b2 q5 k16 d96 mask=keep(b,1,q,k)&causal bias=1,1,q,k", "forward bf16 q5 k7 d64 mask=exclude_keys",
        "forward bf16 d128 varlen=q[3,5]k[4,2] mask=documents", "forward bf16 b2 h4/2 q5 k7 d72 alibi=b,h softcap=5",
        "forward bf16 d256 dropout=0.5 sink", "forward bf16 d64 sink", "forward bf16 d64 softcap=5 scale=0",
        "forward bf16 b2 q5 k8 d64 bias=b,1,q,k strides=bias[0,40,8,1]", "decode bf16 b2 q64 k100 d64",
        "decode bf16 b2 q64 k100 n5 d64 append left_pad cache_batch_idx cache_rows=3 softcap=5",
        "decode bf16 b2 q64 k100 n5 d128 append page=7 mask=causal sink", "decode bf16 q64 k100 d192/128 page=16",
        "decode bf16 b2 k100 d64 varlen=q[3,70] page=16",
        // Any scale, where scores are more than products.
        "forward bf16 q5 k7 d64 alibi scale=0", "forward bf16 q5 k7 d64 softcap=5 dropout=0.5 scale=-1",
        "forward bf16 q5 k16 d64 mask=keep&exclude_keys bias=1,1,q,k scale=0",
        // Strides that cannot matter are not read; the longest that can.
        "forward bf16 b1 h1 q4 k4 d64 strides=q[3,64,3,1]", "forward bf16 h2 q4 k4 d64 strides=k[1,64,512,1]",
        "forward bf16 b2 q4 k4 d64 strides=q[549755813880,64,64,1]"}) {
    EXPECT_EQ(refusal([&] { plan_of(line, "h200", sm90); }).message, "") << line;
    const Plan plan = plan_of(line);
    EXPECT_STREQ(plan.kernel->name, "cuda.sm90") << line;
  }
}

TEST(Sm90Plan, WhatTheKernelLacks) {
  constexpr struct {
    const char *line, *words;
  } rows[] = {
      {"backward bf16 d64", "it attends forward only"},
      {"append bf16 k8 n2 d64", "an append has no products"},
      {"forward f32 d64", "its products are bf16 or f16, q is f32"},
      {"decode bf16 k8 d64 kv=e4m3:tensor", "k is e4m3, the kernel reads q's dtype"},
      {"decode bf16 q63 k100 d64", "63 queries read a cache; a warpgroup has 64 rows"},
      {"decode bf16 q1 k100 d64 append page=16", "1 queries read a cache; a warpgroup has 64 rows"},
      {"decode bf16 q64 k100 d64 ring slots=128 mask=window(30,0)", "the cache is a ring; it reads slots in order"},
      {"decode bf16 q64 k100 d64 page=16 mask=causal&window(30,0)",
       "some keys may be seen by no row; it follows the ids of all pages"},
      {"decode bf16 q64 k100 d64 page=16 mask=chunk(32)@bottom_right", "some keys may be seen by no row"},
      {"decode bf16 q64 k100 d64 page=16 mask=causal@top_left", "some keys may be seen by no row"},
      {"forward bf16 q4 k8 d64 softcap=0.009 scale=-10", "scale / softcap is -1111.111"},
      {"forward bf16 q4 k8 d64 softcap=10000", "scale / softcap is 1.25e-05; it takes 3e-5 to 1000"},
      {"forward bf16 q4 k8 d64 mask=corner@at(1000000000) alibi", "slopes are for distances from a corner that"},
      {"forward bf16 b2 q4 k8 d64 mask=corner@at[1,2] alibi", "slopes are for distances from a corner that"},
      {"decode bf16 q64 k100 d64 mask=documents", "it reads documents of tensors, not of a cache"},
      {"decode bf16 q64 k100 d128/64 v_in_k", "v lies in k; it reads both apart"},
      {"decode bf16 q64 k100 d64 append rotary=32", "it rotates no queries"},
      {"decode bf16 q64 k100 d64 page=16 left_pad", "keys in pages begin with padding; it copies whole boxes"},
      {"decode bf16 q64 k100 d64 page=16 softcap=5", "keys lie in pages and pairs have scores of their own"},
      {"decode bf16 q64 k100 d256 page=16",
       "dims are 256 and 256, keys lie in pages; of these it takes up to 192 and 128"},
      {"decode bf16 q64 k100 d100 page=16", "dims are 100 and 100; it takes multiples of 8 up to 256"},
      {"forward bf16 d64 batch_invariant", "it does not answer every chunk of a sequence"},
      {"forward bf16 d100", "dims are 100 and 100; it takes multiples of 8 up to 256"},
      {"forward bf16 d64/4", "dims are 64 and 4; it takes multiples of 8 up to 256"},
      {"forward bf16 d264/64", "dims are 264 and 64; it takes multiples of 8 up to 256"},
      {"forward bf16 d64/512", "dims are 64 and 512; it takes multiples of 8 up to 256"},
      {"forward bf16 q4 k8 d64 bias=1,1,q,k:f16", "bias is f16, it reads q's dtype"},
      {"forward bf16 q4 k4 d64 bias=1,1,q,k:f32", "bias is f32, it reads q's dtype"},
      {"forward bf16 q4 k7 d64 bias=1,1,q,k", "bias.stride[2] is 7; the kernel needs rows at multiples of 16 bytes"},
      {"forward bf16 q4 k8 d64 mask=keep", "keep.stride[2] is 8; the kernel needs rows at multiples of 16 bytes"},
      {"forward bf16 q4 k8 d64 bias=1,1,q,k strides=bias[64,64,16,2]", "bias has stride 2 along its dim"},
      {"forward bf16 q4 k8 d64 bias=1,1,1,1", "bias has 1 keys of stride 1; it reads all keys one after the other"},
      {"forward bf16 q4 k8 d64 mask=keep(1,1,1,1)",
       "keep has 1 keys of stride 1; it reads all keys one after the other"},
      {"forward bf16 b2 q4 k8 d64 bias=b,1,q,k strides=bias[549755813888,32,8,1]",
       "bias.stride[0] is 549755813888; the copy engine steps less than 2^40 bytes"},
      {"forward bf16 q4 k4 d64 out=f32",
       "out is f32, which would show how its weights are rounded; it writes q's dtype"},
      {"forward bf16 q4 k4 d64 max", "it has no max_score"},
      {"forward bf16 q4 k4 d64 mask=window(-1,3)", "the window lies off the diagonal"},
      {"forward bf16 q4 k4 d64 scale=0", "scale is 0; it must be above 0"},
      {"forward bf16 q4 k4 d64 scale=-0.5", "scale is -0.5; it must be above 0"},
      {"forward bf16 q4 k16 d64 mask=keep scale=0", "scale is 0; it must be above 0"},
      {"forward bf16 q4 k4 d64 mask=exclude_keys scale=-2", "scale is -2; it must be above 0"},
      {"forward bf16 q4 k4 d64 mask=documents scale=0", "scale is 0; it must be above 0"},
      {"forward bf16 q4 k4 d64 dropout=0.5 sink scale=0", "scale is 0; it must be above 0"},
      {"forward bf16 q134217729 k1 d64", "len_q is 134217729; it takes sequences of at most 134217728"},
      {"forward bf16 q1 k134217729 d64", "len_k is 134217729; it takes sequences of at most 134217728"},
      {"forward bf16 q4 k4 d64 mask=window(134217729,0)",
       "the mask has a window or chunk of 134217729; it takes at most 134217728, or unbounded"},
      {"forward bf16 q4 k4 d64 mask=window(0,134217730)", "the mask has a window or chunk of 134217730"},
      {"forward bf16 q4 k4 d64 mask=chunk(134217731)", "the mask has a window or chunk of 134217731"},
      {"forward bf16 b65536 h1024 q8192 k1 d64", "it would take 4294967296 items; it counts to 2147418112"},
      {"forward bf16 h2 q4 k4 d64 strides=q[544,132,66,1]",
       "q.stride[1] is 132; the kernel needs rows at multiples of 16 bytes"},
      {"forward bf16 q4 k4 d64 strides=out[272,66,64,1]",
       "out.stride[1] is 66; the kernel needs rows at multiples of 16 bytes"},
      {"forward bf16 q4 k4 d64 strides=k[512,128,128,2]", "k has stride 2 along its dim"},
      {"forward bf16 d64 align=8", "pointers are promised at multiples of 8 bytes, the kernel needs 16"},
      {"forward bf16 b2 q4 k4 d64 strides=q[0,64,64,1]", "q.stride[0] is 0; the copy engine repeats no rows"},
      {"forward bf16 q4 k4 d64 strides=k[256,0,64,1]", "k.stride[1] is 0; the copy engine repeats no rows"},
      {"forward bf16 h4/2 q4 k4 d64 strides=v[256,64,0,1]", "v.stride[2] is 0; the copy engine repeats no rows"},
      {"forward bf16 b2 q4 k4 d64 strides=q[549755813888,64,64,1]",
       "q.stride[0] is 549755813888; the copy engine steps less than 2^40 bytes"},
  };
  for (const auto& row : rows)
    core::expect_says(refusal([&] { plan_of(row.line, "h200", sm90); }), TESSERA_UNSUPPORTED,
                      fmt::format("\n  cuda.sm90: {}", row.words));
}

// As the rows of all packed sequences.
TEST(Sm90Plan, ExtentsThatTheCopyEngineDoesNotCount) {
  core::Problem p = core::parse("forward bf16 d64").problem;
  EXPECT_EQ(refuse_map(p, TESSERA_Q), "");
  p.operand[TESSERA_Q].extent[1] = int64_t{1} << 31;
  EXPECT_EQ(refuse_map(p, TESSERA_Q), "q.extent[1] is 2147483648; the copy engine counts to 2147483647");
}

TEST(Sm90Plan, ACacheWithoutPages) {
  core::Problem p = core::parse("decode bf16 q64 k100 d64 page=16").problem;
  p.cache.pages = p.operand[TESSERA_K].extent[0] = p.operand[TESSERA_V].extent[0] = 0;
  core::expect_says(refusal([&] { core::choose(kernels(), p, core::find_device("h200"), sm90); }), TESSERA_UNSUPPORTED,
                    "\n  cuda.sm90: the cache has no pages");
}

// More items than 132 multiprocessors, of which some take longer, go to whoever is free: how many were taken is counted
// in the workspace.
TEST(Sm90Plan, TurnsByHand) {
  constexpr struct {
    const char* line;
    int items;
    bool counted;
  } rows[] = {
      // Rows see more keys the later they come, or only those nearby.
      {"forward bf16 h133 q128 k128 d64 mask=causal", 133, true},
      {"forward bf16 b2 h40 q300 k300 d128 mask=causal@top_left", 240, true},
      {"forward bf16 b2 h40 q300 k300 d128 mask=prefix(3)", 240, true},
      {"forward bf16 b2 h40 q300 k300 d128 mask=window(100,unbounded)", 240, true},
      {"forward bf16 b2 h40 q300 k300 d128 mask=window(unbounded,0)", 240, true},
      {"forward bf16 b2 h40 q300 k300 d128 mask=chunk(64)", 240, true},
      {"forward bf16 b2 h40 q300 k300 d128 mask=causal softcap=5", 240, true},
      // Sequences of many lengths.
      {"forward bf16 b2 h40 k300 d128 varlen=q[300,1]", 240, true},
      {"forward bf16 b2 h40 q300 d128 varlen=k[300,1]", 240, true},
      {"forward bf16 b2 h40 q300 k300 d128 seqused=q[300,1]", 240, true},
      {"forward bf16 b2 h40 q300 k300 d128 seqused=k[300,1]", 240, true},
      {"decode bf16 b2 h80 q64 k100 d64", 160, true},
      {"decode bf16 b2 h80 q64 k100 d64 page=16", 160, true},
      // All take as long, whatever pairs have.
      {"forward bf16 b2 h40 q300 k300 d128", 240, false},
      {"forward bf16 b2 h40/2 q300 k301 d64/32 sink", 240, false},
      {"forward bf16 b2 h40 q300 k300 d128 mask=window(unbounded,unbounded)", 240, false},
      {"forward bf16 b2 h40 q300 k304 d128 mask=keep&exclude_keys bias=1,1,q,k alibi dropout=0.5", 240, false},
      {"forward bf16 b2 h40 q300 k300 d128 mask=documents softcap=5", 240, false},
      // Each block has one item, or there is none.
      {"forward bf16 h132 q128 k128 d64 mask=causal", 132, false},
      {"forward bf16 q1024 k2048 d128 mask=causal", 8 * 8, false},
      {"forward bf16 h2 d128 varlen=q[100,200]k[2000,1]", 8 * 8, false},
      {"forward bf16 b0 h200 q128 k128 d64 mask=causal", 0, false},
  };
  for (const auto& [line, items, counted] : rows) {
    const Plan plan = plan_of(line, "h200", sm90);
    const auto is_turns = [](const core::Region& r) { return r.name == "turns" && r.bytes == 16; };
    EXPECT_EQ(std::count_if(plan.regions.begin(), plan.regions.end(), is_turns), counted) << line;
    const std::string words = fmt::format("take {} items {},", items, counted ? "as each is free" : "in turns");
    EXPECT_NE(plan.steps[0].text.find(words), std::string::npos) << line << ": " << plan.steps[0].text;
  }
}

// Items that are counted need a line of it; who has less is served by the next kernel.
TEST(Sm90Plan, Workspace) {
  const auto plan = [](const char* line, int64_t limit) {
    Hints hints = {};
    hints.has_workspace_limit = 1;
    hints.workspace_limit = limit;
    return plan_of(line, "h200", hints);
  };
  const char* const even = "forward bf16 b2 h40 q300 k300 d128";
  EXPECT_STREQ(plan(even, 0).kernel->name, "cuda.sm90");
  EXPECT_EQ(plan(even, 0).workspace_bytes, 0);
  const char* const uneven = "forward bf16 b2 h40 q300 k300 d128 mask=causal";
  EXPECT_STREQ(plan(uneven, 64).kernel->name, "cuda.sm90");
  EXPECT_EQ(plan(uneven, 64).workspace_bytes, 64);
  EXPECT_STREQ(plan(uneven, 63).kernel->name, "cuda.sm90");  // in turns then
  EXPECT_EQ(plan(uneven, 63).workspace_bytes, 0);
}

TEST(Sm90Plan, DevicesThatCannotRunIt) {
  const char* const line = "forward bf16 q300 k300 d128 mask=causal";
  const auto says = [&](const Device& device, const std::string& words) {
    core::expect_says(refusal([&] { plan_of(line, device, sm90); }), TESSERA_UNSUPPORTED, "\n  cuda.sm90: " + words);
  };
  says(core::find_device("avx2"), "device avx2 is a processor, the kernel runs on NVIDIA GPUs");
  for (int n = 0; core::known_device(n); ++n)
    if (const Device device = core::find_device(core::known_device(n));
        device.kind == TESSERA_GPU && device.sm_arch != 90)
      says(device, fmt::format("device {} is sm_{}; the kernel's instructions are those of sm_90a alone", device.name,
                               device.sm_arch));
  EXPECT_STREQ(plan_of(line, "a100").kernel->name, "cuda.portable");
  Device small = core::find_device("h200");
  small.shared_per_block = 100'000;
  says(small, "a block needs 197632 bytes of shared memory, device h200 has 100000");
}

TEST(Sm90Plan, ItsText) {
  const std::string text = core::to_text(plan_of("forward bf16 b4 h16/4 q4096 k4096 d128 mask=causal"));
  EXPECT_NE(text.find("1 attend   cuda.sm90  tile 128 rows x 128 keys, 2 stages; 132 blocks of 384 threads take 2048 "
                      "items as each is free, 193 KiB shared"),
            std::string::npos)
      << text;
}

// Items are batch * heads * ceil(queries / tile), and blocks take them. A packed q has a second step, which
// clears rows past its last sequence.
TEST(Sm90Plan, GridsByHand) {
  constexpr struct {
    const char* line;
    int64_t blocks;
    int threads, tile_rows, tile_keys;
    size_t steps = 1;
  } rows[] = {
      {"forward bf16 q1 k1 d64", 1, 384, 128, 128},
      {"forward f16 b2 h80/2 q193 k2000 d64", 132, 512, 192, 128},
      {"forward f16 b2 h4/2 q129 k300 d128", 2 * 4 * 2, 384, 128, 128},
      {"forward f16 b2 h4/2 q129 k300 d128 softcap=5", 2 * 4 * 2, 384, 128, 128},
      {"forward f16 b2 h4/2 q129 k300 d192 softcap=5", 2 * 4 * 2, 384, 128, 64},
      {"decode f16 b2 h4/2 q129 k128 d128 page=16", 2 * 4 * 2, 384, 128, 128},
      {"forward bf16 b2 h4/2 q129 k300 d256", 2 * 4 * 2, 384, 128, 80},
      {"forward bf16 b4 h32/8 q4096 k4096 d128", 132, 384, 128, 128},
      {"forward bf16 h2 d128 varlen=q[100,200,0]k[1,1,1]", 3 * 2 * 2, 384, 128, 128, 2},
      {"forward bf16 b3 h2 q200 d128 varlen=k[1,1,1]", 3 * 2 * 2, 384, 128, 128},
      {"forward bf16 h2 d64 varlen=q[]k[] rows=q300", 0, 384, 128, 128, 2},
      {"forward bf16 h2 q5 d64 varlen=q[0,0]k[3,4]", 0, 384, 128, 128},  // bounds alone, no rows
      {"forward bf16 b0 q5 k5 d64", 0, 384, 128, 128},
      {"forward bf16 b2 q0 k5 d64", 0, 384, 128, 128},
      {"forward bf16 b2 q5 k0 d64", 2, 384, 128, 128},
  };
  for (const auto& [line, blocks, threads, tile_rows, tile_keys, steps] : rows) {
    const Plan plan = plan_of(line, "h200", sm90);
    ASSERT_EQ(plan.steps.size(), steps) << line;
    EXPECT_EQ(plan.steps[0].launch.blocks, blocks) << line;
    EXPECT_EQ(plan.steps[0].launch.threads, threads) << line;
    EXPECT_LE(plan.steps[0].launch.shared_bytes, 232448) << line;
    EXPECT_TRUE(steps == 1 || plan.steps[1].launch.blocks > 0) << line;
    EXPECT_EQ(plan.tile_rows, tile_rows) << line;
    EXPECT_EQ(plan.tile_keys, tile_keys) << line;
  }
}

// In steps of a tile of keys: a cluster's blocks take their share and four, those that a second step joins twelve
// more. The least counts, and whole ones win where all are equal. Of 132 multiprocessors clusters of two take all, of
// three and four 118, larger ones are 14. Sums that a second step joins lie in the workspace: of a row and head columns
// of out, and two.
TEST(Sm90Plan, SplitsByHand) {
  constexpr struct {
    const char* line;
    int items, splits;
    bool joined;
    int64_t partials = 0;
    const char* last = "attend";
  } rows[] = {
      {"forward bf16 q1024 k2048 d128", 8, 8, true},
      {"forward bf16 q1024 k1664 d128", 8, 7, true},
      {"forward bf16 q1024 k640 d128", 8, 1, false},  // five and whole ones take as long
      {"forward bf16 q1024 k768 d128", 8, 6, true},
      {"forward bf16 h14 q128 k1024 d64", 14, 8, true},
      {"forward bf16 h15 q128 k1024 d64", 15, 4, true},
      {"forward bf16 h39 q128 k1152 d64", 39, 3, true},
      {"forward bf16 h66 q128 k1280 d64", 66, 2, true},
      {"forward f16 b2 h4/2 q129 k2000 d128", 16, 4, true},
      {"forward f16 h2 q129 k2000 d136/8", 4, 8, true},
      {"forward bf16 h2 d128 varlen=q[100,200]k[2000,1] rows=q400", 8, 8, true, 0, "clear"},
      {"decode bf16 q64 k2000 d64 page=16", 1, 8, true},
      // More than a cluster has.
      {"forward bf16 q128 k100000 d64", 1, 132, false, 128 * 132 * 66 * 4, "combine"},
      {"forward bf16 h40 q128 k12800 d64", 40, 3, false, 40 * 128 * 3 * 66 * 4, "combine"},
      // It would not pay; there are too many items; no such kernel.
      {"forward bf16 q1024 k384 d128", 8, 1, false},
      {"forward bf16 h67 q128 k3328 d64", 67, 1, false},
      {"forward bf16 q1024 k2048 d256", 8, 1, false},
      {"forward bf16 q1024 k2048 d128 alibi", 8, 1, false},
      {"forward bf16 q1024 k2048 d128 scale=1e20", 8, 1, false},
  };
  for (const auto& [line, items, splits, joined, partials, last] : rows) {
    const Plan plan = plan_of(line, "h200", sm90);
    EXPECT_EQ(plan.steps[0].launch.blocks, items * splits) << line;
    EXPECT_EQ(plan.steps[0].launch.cluster, joined ? splits : 1) << line;
    const std::string text = plan.steps[0].text;
    EXPECT_EQ(plan.steps.back().name, last) << line;
    const std::string words = fmt::format("; keys in {} splits{}", splits, joined ? ", joined by clusters" : "");
    EXPECT_EQ(text.ends_with(words), splits > 1) << line << ": " << text;
    ASSERT_EQ(plan.regions.size(), partials > 0 ? 1u : 0u) << line;
    if (partials > 0) {
      EXPECT_EQ(plan.regions[0].name, "partials") << line;
      EXPECT_EQ(plan.regions[0].offset, 0) << line;
      EXPECT_EQ(plan.regions[0].bytes, partials) << line;
    }
  }
  const std::string text = core::to_text(plan_of(rows[0].line));
  EXPECT_NE(text.find("64 blocks of 384 threads take 64 items in turns, 195 KiB shared; keys in 8 splits"),
            std::string::npos)
      << text;
}

TEST(Sm90Plan, NoSplitsWhereOtherTilesAreWished) {
  Hints hints = sm90;
  hints.tile_rows = 192;
  const Plan plan = plan_of("forward bf16 q1024 k2048 d128", "h200", hints);
  EXPECT_EQ(plan.tile_rows, 192);
  EXPECT_EQ(plan.steps.size(), 1u);
  EXPECT_TRUE(plan.regions.empty());
}

TEST(Sm90Plan, AClustersSplitsWhereMoreHaveNoRoom) {
  constexpr struct {
    const char* line;
    int64_t needed;
  } rows[] = {
      {"forward bf16 q128 k100000 d64", 128 * 132 * 66 * 4},
      {"forward bf16 q1 k16640 d8", 5248},  // 130 splits of 10 numbers, 5200 bytes, in whole lines
  };
  for (const auto& [line, needed] : rows) {
    const auto plan = [&, text = line](int64_t limit) {
      Hints hints = sm90;
      hints.has_workspace_limit = 1;
      hints.workspace_limit = limit;
      return plan_of(text, "h200", hints);
    };
    EXPECT_EQ(plan(needed).workspace_bytes, needed) << line;
    EXPECT_EQ(plan(needed).steps[0].launch.cluster, 1) << line;
    EXPECT_EQ(plan(needed - 1).workspace_bytes, 0) << line;
    EXPECT_EQ(plan(needed - 1).steps[0].launch.cluster, 8) << line;
  }
}

std::string code_of(const Plan& plan) {
  return static_cast<const Loaded*>(plan.steps[0].launch.code)->code().text;
}

// The smallest dims that hold the problem's, D first.
TEST(Sm90Plan, KernelsByDims) {
  constexpr struct {
    const char *line, *code;
  } rows[] = {
      {"forward bf16 d8", "dtype=bf16 dim=64 dim_v=64"},
      {"forward f16 d64", "dtype=f16 dim=64 dim_v=64"},
      {"forward f16 d72", "dtype=f16 dim=80 dim_v=80"},
      {"forward bf16 d64/72", "dtype=bf16 dim=80 dim_v=80"},
      {"forward bf16 d96/8", "dtype=bf16 dim=96 dim_v=96"},
      {"forward bf16 d104", "dtype=bf16 dim=112 dim_v=112"},
      {"forward f16 d64/128", "dtype=f16 dim=128 dim_v=128"},
      {"forward bf16 d136/8", "dtype=bf16 dim=192 dim_v=128"},
      {"forward f16 d192/128", "dtype=f16 dim=192 dim_v=128"},
      {"forward bf16 d128/136", "dtype=bf16 dim=160 dim_v=160"},
      {"forward f16 d192", "dtype=f16 dim=192 dim_v=192"},
      {"forward bf16 d8/200", "dtype=bf16 dim=256 dim_v=256"},
      {"forward f16 d256/8", "dtype=f16 dim=256 dim_v=256"},
      {"forward f16 d72 softcap=5", "dtype=f16 dim=96 dim_v=96"},
      {"decode bf16 q64 k100 d72 page=16", "dtype=bf16 dim=128 dim_v=128"},
  };
  for (const auto& row : rows)
    EXPECT_TRUE(code_of(plan_of(row.line, "h200", sm90)).starts_with(fmt::format("sm90_forward {} ", row.code)))
        << row.line << ": " << code_of(plan_of(row.line, "h200", sm90));
}

// By the keys that a row sees on average.
TEST(Sm90Plan, KernelsByKeys) {
  const auto tiles = [](const char* line) {
    const Plan plan = plan_of(line, "h200", sm90);
    return std::pair(plan.tile_rows, plan.tile_keys);
  };
  const std::pair narrow_64(128, 128), wide_64(192, 128), narrow_128(128, 128), wide_128(192, 80);
  EXPECT_EQ(tiles("forward bf16 b300 q1 k1023 d64"), narrow_64);
  EXPECT_EQ(tiles("forward bf16 b300 q1 k1024 d64"), wide_64);
  EXPECT_EQ(tiles("forward f16 b300 q5000 k1024 d40"), wide_64);
  EXPECT_EQ(tiles("forward bf16 b300 q2046 k2046 d64 mask=causal"), narrow_64);  // 1023.5
  EXPECT_EQ(tiles("forward bf16 b300 q2047 k2047 d64 mask=causal"), wide_64);
  EXPECT_EQ(tiles("forward bf16 b300 q9000 k9000 d64 mask=window(1000,0)"), narrow_64);
  EXPECT_EQ(tiles("forward bf16 b300 q1 k2047 d72"), std::pair(128, 128));
  EXPECT_EQ(tiles("forward bf16 b300 q1 k2048 d72"), std::pair(192, 96));
  EXPECT_EQ(tiles("forward bf16 b300 q1 k6143 d128"), narrow_128);
  EXPECT_EQ(tiles("forward bf16 b300 q1 k6144 d128"), wide_128);
  EXPECT_EQ(tiles("forward bf16 b300 q8192 k8192 d128 mask=causal"), narrow_128);
  EXPECT_EQ(tiles("forward bf16 b300 q16384 k16384 d128 mask=causal"), wide_128);
  EXPECT_EQ(tiles("forward bf16 h4 d128 varlen=q[100,7000]k[100,7000]"), wide_128);  // the longest of them
  // Two items for each of 132 multiprocessors, or the shorter tile.
  EXPECT_EQ(tiles("forward bf16 b263 q1 k1024 d64"), narrow_64);
  EXPECT_EQ(tiles("forward bf16 b264 q1 k1024 d64"), wide_64);
}

TEST(Sm90Plan, HintsChooseOfWhatShips) {
  const auto tiles = [](const char* line, int rows, int keys, Device device = core::find_device("h200")) {
    Hints hints = sm90;
    hints.tile_rows = rows;
    hints.tile_keys = keys;
    const Plan plan = plan_of(line, device, hints);
    return std::pair(plan.tile_rows, plan.tile_keys);
  };
  const char *const d64 = "forward bf16 b200 q300 k300 d64", *const d128 = "forward bf16 b200 q300 k300 d128",
                    *const long_64 = "forward bf16 b200 q300 k3000 d64";
  EXPECT_EQ(tiles(d64, 192, 0), std::pair(192, 128));
  EXPECT_EQ(tiles(d64, 192, 128), std::pair(192, 128));
  EXPECT_EQ(tiles(d64, 0, 128), std::pair(128, 128));  // both have them, and this one is for few keys
  EXPECT_EQ(tiles(long_64, 0, 128), std::pair(192, 128));
  EXPECT_EQ(tiles(long_64, 128, 0), std::pair(128, 128));
  EXPECT_EQ(tiles(d128, 0, 80), std::pair(192, 80));
  // No such kernel of these dims.
  EXPECT_EQ(tiles(d64, 64, 0), std::pair(128, 128));
  EXPECT_EQ(tiles(d64, 0, 80), std::pair(128, 128));
  EXPECT_EQ(tiles(d128, 192, 128), std::pair(128, 128));
  Device small = core::find_device("h200");
  small.shared_per_block = 200'000;  // the wished takes 214016
  EXPECT_EQ(tiles(d128, 192, 80, small), std::pair(128, 128));
}

}  // namespace
}  // namespace tessera::cuda
