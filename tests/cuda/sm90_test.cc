// Hopper's forward kernel: what it takes and refuses, its plans, and what it launches through the fake driver.
#include <array>
#include <cmath>
#include <cstring>

#include "cuda/loaded.h"
#include "cuda/tensor_map.h"
#include "on_fake.h"
#include "plan_of.h"
#include "tests/core/refusal.h"

namespace tessera::cuda {
namespace {

using core::Device;
using core::Hints;
using core::Plan;
using core::refusal;
using test::Case;
using test::with_driver;

const Hints sm90 = test::allowing("cuda.sm90");

// ---------------------------------------------------------------------------------------------------------- the plan

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
      {"decode bf16 k8 d64", "k and v are a cache; it reads tensors"},
      {"decode bf16 k8 d64 append", "k and v are a cache; it reads tensors"},
      {"forward bf16 d64 batch_invariant", "it does not answer every chunk of a sequence"},
      {"forward bf16 d100", "dims are 100 and 100; it takes multiples of 8 up to 256"},
      {"forward bf16 d64/4", "dims are 64 and 4; it takes multiples of 8 up to 256"},
      {"forward bf16 d264/64", "dims are 264 and 64; it takes multiples of 8 up to 256"},
      {"forward bf16 d64/512", "dims are 64 and 512; it takes multiples of 8 up to 256"},
      {"forward bf16 q4 k4 d64 bias=1,1,q,k", "it has no bias"},
      {"forward bf16 q4 k4 d64 mask=keep", "it has no keep mask"},
      {"forward bf16 q4 k4 d64 out=f32",
       "out is f32, which would show how its weights are rounded; it writes q's dtype"},
      {"forward bf16 q4 k4 d64 softcap=5", "it has no softcap"},
      {"forward bf16 q4 k4 d64 dropout=0.5", "it has no dropout"},
      {"forward bf16 q4 k4 d64 sink", "it has no sinks"},
      {"forward bf16 q4 k4 d64 mask=window(-1,3)", "the window lies off the diagonal"},
      {"forward bf16 q4 k4 d64 scale=0", "scale is 0; it must be above 0"},
      {"forward bf16 q4 k4 d64 scale=-0.5", "scale is -0.5; it must be above 0"},
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

// How many items were taken is counted in the workspace; who has none is served by the next kernel.
TEST(Sm90Plan, TakesWorkspace) {
  const char* const line = "forward bf16 b2 h4 q300 k300 d128";
  EXPECT_EQ(plan_of(line).workspace_bytes, 64);
  Hints hints = {};
  hints.has_workspace_limit = 1;
  EXPECT_STREQ(plan_of(line, "h200", hints).kernel->name, "cuda.portable");
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
  EXPECT_NE(text.find("1 attend   cuda.sm90  tile 128 rows x 128 keys, 2 stages; 132 blocks of 384 threads take turns "
                      "at 2048 items, 193 KiB shared"),
            std::string::npos)
      << text;
}

// Items are batch * heads * ceil(queries / tile), and blocks take them in turns. A packed q has a second step, which
// clears rows past its last sequence.
TEST(Sm90Plan, GridsByHand) {
  constexpr struct {
    const char* line;
    int64_t blocks;
    int threads, tile_rows, tile_keys;
    size_t steps = 1;
  } rows[] = {
      {"forward bf16 q1 k1 d64", 1, 384, 128, 128},
      {"forward f16 b2 h4/2 q193 k2000 d64", 2 * 4 * 2, 512, 192, 128},
      {"forward f16 b2 h4/2 q129 k300 d128", 2 * 4 * 2, 384, 128, 128},
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
      {"forward f16 d72", "dtype=f16 dim=96 dim_v=96"},
      {"forward bf16 d64/72", "dtype=bf16 dim=96 dim_v=96"},
      {"forward bf16 d96/8", "dtype=bf16 dim=96 dim_v=96"},
      {"forward bf16 d104", "dtype=bf16 dim=128 dim_v=128"},
      {"forward f16 d64/128", "dtype=f16 dim=128 dim_v=128"},
      {"forward bf16 d136/8", "dtype=bf16 dim=192 dim_v=128"},
      {"forward f16 d192/128", "dtype=f16 dim=192 dim_v=128"},
      {"forward bf16 d128/136", "dtype=bf16 dim=192 dim_v=192"},
      {"forward f16 d192", "dtype=f16 dim=192 dim_v=192"},
      {"forward bf16 d8/200", "dtype=bf16 dim=256 dim_v=256"},
      {"forward f16 d256/8", "dtype=f16 dim=256 dim_v=256"},
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
  EXPECT_EQ(tiles("forward bf16 q1 k1023 d64"), narrow_64);
  EXPECT_EQ(tiles("forward bf16 q1 k1024 d64"), wide_64);
  EXPECT_EQ(tiles("forward f16 q5000 k1024 d40"), wide_64);
  EXPECT_EQ(tiles("forward bf16 q2046 k2046 d64 mask=causal"), narrow_64);  // 1023.5
  EXPECT_EQ(tiles("forward bf16 q2047 k2047 d64 mask=causal"), wide_64);
  EXPECT_EQ(tiles("forward bf16 q9000 k9000 d64 mask=window(1000,0)"), narrow_64);
  EXPECT_EQ(tiles("forward bf16 q1 k6143 d128"), narrow_128);
  EXPECT_EQ(tiles("forward bf16 q1 k6144 d128"), wide_128);
  EXPECT_EQ(tiles("forward bf16 q8192 k8192 d128 mask=causal"), narrow_128);
  EXPECT_EQ(tiles("forward bf16 q16384 k16384 d128 mask=causal"), wide_128);
  EXPECT_EQ(tiles("forward bf16 d128 varlen=q[100,7000]k[100,7000]"), wide_128);  // the longest of them
}

TEST(Sm90Plan, HintsChooseOfWhatShips) {
  const auto tiles = [](const char* line, int rows, int keys, Device device = core::find_device("h200")) {
    Hints hints = sm90;
    hints.tile_rows = rows;
    hints.tile_keys = keys;
    const Plan plan = plan_of(line, device, hints);
    return std::pair(plan.tile_rows, plan.tile_keys);
  };
  const char *const d64 = "forward bf16 q300 k300 d64", *const d128 = "forward bf16 q300 k300 d128",
                    *const long_64 = "forward bf16 q300 k3000 d64";
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

// ------------------------------------------------------------------------------------------------------- the launches

void expect_map(const rules::TensorMap& map, const void* address, std::array<uint64_t, 4> extents,
                std::array<uint64_t, 3> strides, uint32_t rows, int dtype = map_bf16) {
  FakeMap made;
  ASSERT_TRUE(fake_map(map, &made));
  EXPECT_EQ(made.address, address);
  EXPECT_EQ(made.dtype, dtype);
  EXPECT_EQ(std::to_array(made.extents), extents);
  EXPECT_EQ(std::to_array(made.strides), strides);
  EXPECT_EQ(std::to_array(made.box), (std::array<uint32_t, 4>{64, rows, 1, 1}));
  EXPECT_EQ(made.interleave, map_no_interleave);
  EXPECT_EQ(made.swizzle, map_swizzle_128);
  EXPECT_EQ(made.promotion, map_promote_256);
  EXPECT_EQ(made.fill, map_fill_zeros);
}
bool is_zeros(const rules::TensorMap& map) {
  constexpr rules::TensorMap zeros = {};
  return std::memcmp(&map, &zeros, sizeof map) == 0;
}

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

TEST(Sm90Launch, MapsOfLayouts) {
  with_driver([] {
    const auto expect = [](const Case& c, std::array<uint64_t, 3> q, std::array<uint64_t, 3> k) {
      const rules::Sm90ForwardParams p = c.launch().sm90;
      expect_map(p.q_map, c.bindings.data[TESSERA_Q], {128, 300, 4, 2}, q, 64);
      expect_map(p.k_map, c.bindings.data[TESSERA_K], {128, 300, 2, 2}, k, 128);
      expect_map(p.v_map, c.bindings.data[TESSERA_V], {128, 300, 2, 2}, k, 128);
    };
    expect(Case("forward bf16 b2 h4/2 q300 k300 d128"), {1024, 256, 307200}, {512, 256, 153600});
    expect(Case("forward bf16 b2 h4/2 q300 k300 d128 layout=bhsd"), {256, 76800, 307200}, {256, 76800, 153600});
    expect(Case("forward bf16 b2 h4/2 q300 k300 d128 layout=qkv"), {2048, 256, 614400}, {2048, 256, 614400});

    const Case half("forward f16 h3/1 q2 k5 d64");
    const rules::Sm90ForwardParams p = half.launch().sm90;
    expect_map(p.q_map, half.bindings.data[TESSERA_Q], {64, 2, 3, 1}, {384, 128, 128}, 64, map_f16);
    expect_map(p.v_map, half.bindings.data[TESSERA_V], {64, 5, 1, 1}, {128, 128, 128}, 128, map_f16);

    // The operands' own dims: what the kernel has more is out of bounds, and zeros. 192 x 80 tiles.
    const Case odd("forward bf16 h2/1 q2 k7000 d120/104");
    const rules::Sm90ForwardParams o = odd.launch().sm90;
    expect_map(o.q_map, odd.bindings.data[TESSERA_Q], {120, 2, 2, 1}, {480, 240, 240}, 64);
    expect_map(o.k_map, odd.bindings.data[TESSERA_K], {120, 7000, 1, 1}, {240, 240, 240}, 80);
    expect_map(o.v_map, odd.bindings.data[TESSERA_V], {104, 7000, 1, 1}, {208, 208, 208}, 80);
  });
}

// A map has a stride for each dimension, and some would be refused that nobody reads.
TEST(Sm90Launch, StridesOfOneElementAreNotRead) {
  with_driver([] {
    const Case c("forward bf16 b1 h1 q1 k4 d64 strides=q[3,5,0,1]k[0,72,7,1]");
    const rules::Sm90ForwardParams p = c.launch().sm90;
    expect_map(p.q_map, c.bindings.data[TESSERA_Q], {64, 1, 1, 1}, {128, 128, 128}, 64);
    expect_map(p.k_map, c.bindings.data[TESSERA_K], {64, 4, 1, 1}, {144, 128, 128}, 128);
  });
}

TEST(Sm90Launch, PackedOperandsHaveOnePlane) {
  with_driver([] {
    const Case c("forward bf16 h4/2 d64 varlen=q[100,200,0]k[50,60,70]");
    const std::vector<FakeLaunch> all = c.launches();
    ASSERT_EQ(all.size(), 2u);
    const rules::Sm90ForwardParams& p = all[0].sm90;
    expect_map(p.q_map, c.bindings.data[TESSERA_Q], {64, 300, 4, 1}, {512, 128, 128}, 64);
    expect_map(p.k_map, c.bindings.data[TESSERA_K], {64, 180, 2, 1}, {256, 128, 128}, 128);
    EXPECT_EQ(all[0].grid[0], 3u * 4 * 2);
    EXPECT_EQ(p.queries.cu, c.bindings.data[TESSERA_CU_SEQLENS_Q]);
    EXPECT_EQ(p.queries.rows, 300);
    // Rows past the last sequence, if the device's list ends before them.
    EXPECT_STREQ(all[1].entry, "tessera_general");
    EXPECT_TRUE(std::string(all[1].image).starts_with("general task=clear")) << all[1].image;
    EXPECT_EQ(all[1].general.out.data, c.bindings.data[TESSERA_OUT]);
    EXPECT_EQ(all[1].general.queries.cu, c.bindings.data[TESSERA_CU_SEQLENS_Q]);
    EXPECT_EQ(all[1].stream, all[0].stream);
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

TEST(Sm90Run, AMapThatTheDriverRefuses) {
  with_driver({{"FAKE_CUDA_MAP", "1"}}, [] {
    Case(any_line).expect_refused(TESSERA_FAILED,
                                  "making a tensor map of q, extents 128 300 4 2 and strides 1024 256 307200 in bytes: "
                                  "the CUDA driver says 1 (invalid argument)");
    ::unsetenv("FAKE_CUDA_MAP");
    EXPECT_EQ(Case(any_line).launch().grid[0], 24u);
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
