// What the CUDA engine takes, what it refuses and in which words, and the launches that its plans make.
#include "plan_of.h"

#include <cstring>

#include "core/cascade.h"
#include "tests/api/calls.h"
#include "tests/core/refusal.h"

namespace tessera::cuda {
namespace {

using core::Device;
using core::expect_says;
using core::find_device;
using core::Hints;
using core::parse;
using core::Plan;
using core::refusal;

const Hints general = test::allowing("cuda.general");
const Hints portable = test::allowing("cuda.portable");

const core::Launch& launch_of(const Plan& plan) {
  EXPECT_EQ(plan.steps.size(), 1u);
  return plan.steps.front().launch;
}

TEST(CudaPlan, EveryKnownGpuTakesACausalForwardOrSaysFromWhichChipOn) {
  int taken = 0, refused = 0;
  for (int n = 0; core::known_device(n); ++n) {
    const Device device = find_device(core::known_device(n));
    if (device.kind != TESSERA_GPU) continue;
    const char* const line = "forward bf16 b2 h8/2 q1000 k1000 d128 mask=causal";
    if (device.sm_arch >= 80) {
      EXPECT_STREQ(plan_of(line, device).kernel->name, device.sm_arch == 90 ? "cuda.sm90" : "cuda.portable")
          << device.name;
      ++taken;
    } else {
      expect_says(refusal([&] { plan_of(line, device); }), TESSERA_UNSUPPORTED,
                  fmt::format("cuda.portable: device {} is sm_{}; the kernel's instructions begin with sm_80",
                              device.name, device.sm_arch));
      ++refused;
    }
  }
  EXPECT_GE(taken, 10);
  EXPECT_EQ(refused, 1);  // t4
}

TEST(CudaPlan, WhatTheKernelHas) {
  for (const char* line : {"forward bf16 d64",
                           "forward f16 d64",
                           "forward bf16 d128",
                           "forward f16 d128 out=f32",
                           "forward bf16 d64 nolse",
                           "forward bf16 b2 h6/2 q5 k7 d64 layout=bhsd",
                           "forward bf16 b2 h6/2 q5 k7 d64 layout=qkv",
                           "forward bf16 b2 h6/2 q5 k7 d64 layout=kv",
                           "forward bf16 q5 k7 d64 mask=causal@top_left",
                           "forward bf16 q5 k7 d64 mask=window(2,0)",
                           "forward bf16 q5 k7 d64 mask=window(unbounded,3)&first(1)",
                           "forward bf16 q5 k7 d64 mask=chunk(4)&causal",
                           "forward bf16 q5 k7 d64 mask=prefix(3)",
                           "forward bf16 b2 q5 k7 d64 mask=causal@at[1,2]",
                           "forward bf16 d64 varlen=q[3,0,5]k[4,2,1]",
                           "forward bf16 b2 q5 k7 d64 seqused=q[1,2]k[3,4]",
                           "forward bf16 d64 varlen=q[3,5] k9 b2 seqused=k[1,2] status",
                           "forward bf16 d64 scale=0.5 deterministic allow_tf32",
                           "forward bf16 d256 mask=causal",
                           "forward f16 b2 h6/2 q5 k8 d64 bias=b,h,q,k",
                           "forward bf16 b2 h6/2 q5 k8 d128 bias=1,1,1,k scale=-2",
                           "forward bf16 b2 h6/2 q5 k7 d64 mask=keep(b,1,q,k)",
                           "forward bf16 b2 h6/2 q5 k8 d64 mask=keep&causal bias=1,h,q,k",
                           "forward bf16 d64 align=16",
                           "forward bf16 d64 align=64",
                           "forward bf16 b0 d64",
                           "forward bf16 q0 d64",
                           "forward bf16 k0 d64"})
    EXPECT_EQ(refusal([&] { plan_of(line, "h200", portable); }).message, "") << line;
}

// Everything else, in the kernel's own words. The general kernels answer it.
TEST(CudaPlan, WhatTheKernelLacks) {
  constexpr struct {
    const char *line, *words;
  } rows[] = {
      {"forward f32 d64", "its products are bf16 or f16, q is f32"},
      {"forward bf16 d96", "dims are 96 and 96; it has D = Dv of 64 and 128, and without bias and keep mask 256"},
      {"forward bf16 q4 k4 d256 bias=1,1,q,k", "dims are 256 and 256; it has D = Dv of 64 and 128"},
      {"forward bf16 q4 k4 d256 mask=keep", "dims are 256 and 256; it has D = Dv of 64 and 128"},
      {"forward bf16 d64/32", "dims are 64 and 32; it has D = Dv of 64 and 128"},
      {"forward bf16 d64/128", "dims are 64 and 128; it has D = Dv of 64 and 128"},
      {"backward bf16 d64", "it attends forward only"},
      {"append bf16 k8 n2 d64", "an append has no products"},
      {"decode bf16 k8 d64", "k and v are a cache; it reads tensors"},
      {"decode bf16 k8 d64 append", "k and v are a cache; it reads tensors"},
      {"decode bf16 k8 d64 page=4", "k and v are a cache; it reads tensors"},
      {"decode bf16 k8 d64 kv=e4m3:tensor", "k is e4m3, the kernel reads q's dtype"},
      {"forward bf16 q4 k4 d64 softcap=5", "it has no softcap"},
      {"forward bf16 q4 k4 d64 dropout=0.5", "it has no dropout"},
      {"forward bf16 q4 k4 d64 bias=1,1,q,k:f32", "bias is f32, it reads q's dtype"},
      {"forward bf16 q4 k4 d64 bias=1,1,q,k:f16", "bias is f16, it reads q's dtype"},
      {"forward bf16 q4 k4 d64 bias=1,1,q,1", "bias has 1 keys of stride 1; it reads all keys one after the other"},
      {"forward bf16 q4 k4 d64 bias=1,1,q,k strides=bias[32,32,8,2]",
       "bias has 4 keys of stride 2; it reads all keys one after the other"},
      {"forward bf16 q4 k5 d64 bias=1,1,q,k", "bias has rows of 5 numbers"},
      {"forward bf16 q4 k4 d64 bias=1,1,q,k strides=bias[20,20,5,1]",
       "bias has rows of 4 numbers, stride[2] 5; it reads two at once"},
      {"forward bf16 q4 k4 d64 mask=keep(1,1,q,1)",
       "keep has 1 keys of stride 1; it reads all keys one after the other"},
      {"forward bf16 q4 k4 d64 mask=exclude_keys", "it has no excluded keys"},
      {"forward bf16 q4 k4 d64 mask=documents", "it has no documents"},
      {"forward bf16 q4 k4 d64 alibi", "it has no ALiBi slopes"},
      {"forward bf16 q4 k4 d64 sink", "it has no sinks"},
      {"forward bf16 q4 k4 d64 max", "it has no max_score"},
      {"forward bf16 q4 k4 d64 scale=0", "scale is 0; it must be above 0"},
      {"forward bf16 q4 k4 d64 scale=-0.5", "scale is -0.5; it must be above 0"},
      {"forward bf16 q4 k4 d64 scale=1e-39", "scale is 1e-39; it must be above 0"},
      {"forward bf16 q4 k4 d64 scale=1e38", "scale is 1e+38; it must be above 0"},
      {"forward bf16 q4 k4 d64 mask=window(-1,3)", "the window lies off the diagonal"},
      {"forward bf16 q4 k4 d64 mask=window(3,-1)", "the window lies off the diagonal"},
      {"forward bf16 h2 q4 k4 d64 strides=q[544,132,66,1]",
       "q.stride[1] is 132; the kernel needs rows at multiples of 16 bytes"},
      {"forward bf16 h2 q4 k4 d64 strides=k[1024,128,68,1]",
       "k.stride[2] is 68; the kernel needs rows at multiples of 16 bytes"},
      {"forward bf16 b2 q4 k4 d64 strides=v[260,64,64,1]",
       "v.stride[0] is 260; the kernel needs rows at multiples of 16 bytes"},
      {"forward bf16 q4 k4 d64 strides=out[272,66,64,1]",
       "out.stride[1] is 66; the kernel needs rows at multiples of 16 bytes"},
      {"forward bf16 q4 k4 d64 strides=k[512,128,128,2]",
       "k has stride 2 along its dim; the kernel copies rows 16 bytes at a time"},
      {"forward bf16 d64 align=8", "pointers are promised at multiples of 8 bytes, the kernel needs 16"},
      {"forward bf16 d64 align=2", "pointers are promised at multiples of 2 bytes, the kernel needs 16"},
  };
  for (const auto& row : rows) {
    expect_says(refusal([&] { plan_of(row.line, "h200", portable); }), TESSERA_UNSUPPORTED,
                fmt::format("\n  cuda.portable: {}", row.words));
    EXPECT_EQ(refusal([&] { plan_of(row.line, "h200", general); }).message, "") << row.line;
  }
}

TEST(CudaPlan, WhatNoKernelHas) {
  constexpr struct {
    const char *line, *portable_words, *general_words;
  } rows[] = {
      {"forward f64 d64", "its products are bf16 or f16, q is f64", "float64 is computed on processors only"},
      {"forward bf16 k1073741825 d64", "a sequence is longer than 1073741824", "a sequence is longer than 1073741824"},
  };
  for (const auto& row : rows) {
    const core::Refusal got = refusal([&] { plan_of(row.line); });
    expect_says(got, TESSERA_UNSUPPORTED, fmt::format("\n  cuda.portable: {}", row.portable_words));
    expect_says(got, TESSERA_UNSUPPORTED, fmt::format("\n  cuda.general: {}", row.general_words));
  }
}

TEST(CudaPlan, StridesThatCannotMatterAreNotRead) {
  for (const char* line :
       {"forward bf16 b1 h1 q4 k4 d64 strides=q[3,64,3,1]", "forward bf16 q1 k4 d64 strides=q[3,3,3,1]",
        "forward bf16 h2 q4 k4 d64 strides=k[0,64,0,1]"})
    EXPECT_EQ(refusal([&] { plan_of(line, "h200", portable); }).message, "") << line;
  // 4-byte numbers: 36 of them are 144 bytes.
  const char* const f32 = "forward bf16 q4 k4 d64 out=f32 strides=out[400,100,64,1]";
  EXPECT_EQ(refusal([&] { plan_of(f32, "h200", portable); }).message, "");
}

TEST(CudaPlan, DevicesThatCannotRunIt) {
  const char* const line = "forward bf16 d128";
  expect_says(refusal([&] { plan_of(line, "avx2"); }), TESSERA_UNSUPPORTED,
              "cuda.portable: device avx2 is a processor, the kernel runs on NVIDIA GPUs");
  Device small = find_device("a10");
  small.shared_per_block = 100'000;
  expect_says(refusal([&] { plan_of(line, small, portable); }), TESSERA_UNSUPPORTED,
              "cuda.portable: a block needs 101120 bytes of shared memory, device a10 has 100000");
  small.shared_per_block = 101'120;
  EXPECT_EQ(refusal([&] { plan_of(line, small, portable); }).message, "");
  // More than 2^31 - 1 blocks: of 2^16 sequences, 2^10 heads and 2^6 tiles, whose k and v are one row.
  expect_says(refusal([&] { plan_of("forward bf16 b65536 h1024 q8192 k1 d64 strides=q[0,0,0,1]", "h200", portable); }),
              TESSERA_UNSUPPORTED, "cuda.portable: it would take 4294967296 blocks; a launch has at most 2147483647");
}

TEST(CudaPlan, TheSameQuestionHasTheSameTextTwice) {
  const char* const line = "forward bf16 b2 h8/2 q1000 k1000 d128 mask=causal";
  const std::string text = core::to_text(plan_of(line, "h200", portable));
  EXPECT_EQ(text, core::to_text(plan_of(line, "h200", portable)));
  EXPECT_NE(text.find("device     h200 (sm_90, 132 SMs)"), std::string::npos) << text;
  EXPECT_NE(
      text.find(
          "1 attend   cuda.portable  tile 128 rows x 64 keys, 2 stages; 128 blocks of 128 threads, 99 KiB shared"),
      std::string::npos)
      << text;
  EXPECT_NE(text.find("workspace  none"), std::string::npos) << text;
}

// Blocks are batch * heads * ceil(queries / 128), beside biases and keep masks / 64; a packed q has one more for each
// tile of its rows, at most 64, which clear what lies past the last sequence. Shared memory: q, two stages of k and v,
// 20 bytes a row, 256 for the job.
TEST(CudaPlan, GridsByHand) {
  const auto bytes = [](int dim, int tile_rows, int tile_keys = 64) {
    return 2 * dim * (tile_rows + 2 * 2 * tile_keys) + 20 * tile_rows + 256;
  };
  const int d128 = bytes(128, 128), d64 = bytes(64, 128);
  const struct {
    const char* line;
    int64_t blocks;
    int shared_bytes, threads = 128, tile_rows = 128, tile_keys = 64;
  } rows[] = {
      {"forward bf16 b1 h1 q1 k1 d128", 1, d128},
      {"forward bf16 b1 h1 q128 k1 d128", 1, d128},
      {"forward bf16 b1 h1 q129 k1 d128", 2, d128},
      {"forward f16 b2 h4/2 q300 k300 d64", 2 * 4 * 3, d64},
      {"forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal", 4 * 32 * 32, d128},
      {"forward bf16 h2 d128 varlen=q[100,200,0]k[1,1,1]", 2 * 3 * 2 + 3, d128},
      {"forward bf16 h2 d64 varlen=q[100,200]k[1,1] rows=q100000", 2 * 2 * 2 + 64, d64},
      {"forward bf16 b3 h2 q200 k8 d64 seqused=q[1,2,3]", 3 * 2 * 2, d64},
      {"forward bf16 b0 h2 q200 k8 d64", 0, d64},
      {"forward bf16 b3 h2 q0 k8 d64", 0, d64},
      {"forward bf16 h2 q5 d64 varlen=q[0,0]k[3,4]", 0, d64},  // bounds alone, no rows
      {"forward bf16 b3 h2 q200 k0 d64", 3 * 2 * 2, d64},      // whose out is zeros
      {"forward bf16 b3 h2 q200 k8 d256", 3 * 2 * 2, bytes(256, 128, 64), 256, 128, 64},
      {"forward bf16 b3 h2 q200 k8 d64 bias=1,1,q,k", 3 * 2 * 4, bytes(64, 64), 128, 64},
      {"forward f16 b3 h2 q200 k8 d128 mask=keep", 3 * 2 * 4, bytes(128, 64), 128, 64},
  };
  for (const auto& [line, blocks, shared_bytes, threads, tile_rows, tile_keys] : rows) {
    const Plan plan = plan_of(line, "h200", portable);
    EXPECT_EQ(launch_of(plan).blocks, blocks) << line;
    EXPECT_EQ(launch_of(plan).threads, threads) << line;
    EXPECT_EQ(launch_of(plan).shared_bytes, shared_bytes) << line;
    EXPECT_EQ(plan.tile_rows, tile_rows) << line;
    EXPECT_EQ(plan.tile_keys, tile_keys);
    EXPECT_EQ(plan.workspace_bytes, 0);
  }
}

TEST(CudaPlan, TilesFitTheDevice) {
  const char* const line = "forward bf16 q300 k300 d256";
  EXPECT_EQ(plan_of(line, "h200", portable).tile_rows, 128);
  const Plan plan = plan_of(line, "a100", portable);
  EXPECT_STREQ(plan.kernel->name, "cuda.portable");
  EXPECT_EQ(plan.tile_rows, 64);
  EXPECT_EQ(plan.tile_keys, 32);
}

TEST(CudaPlan, HintsChooseTilesThatCanBe) {
  const char* const line = "forward bf16 b1 h2 q300 k300 d64";
  const auto tiles = [&](int rows, int keys) {
    Hints hints = portable;
    hints.tile_rows = rows;
    hints.tile_keys = keys;
    const Plan plan = plan_of(line, "h200", hints);
    EXPECT_EQ(launch_of(plan).blocks, 2 * rules::ceil_div(300, plan.tile_rows));
    return std::pair(plan.tile_rows, plan.tile_keys);
  };
  EXPECT_EQ(tiles(64, 0), std::pair(64, 64));
  EXPECT_EQ(tiles(0, 128), std::pair(128, 128));
  EXPECT_EQ(tiles(64, 32), std::pair(64, 32));
  EXPECT_EQ(tiles(100, 0), std::pair(128, 64));   // no such kernel
  EXPECT_EQ(tiles(0, 1000), std::pair(128, 64));  // nor such
  EXPECT_EQ(tiles(0, 48), std::pair(128, 64));    // whose last 16 keys no word of the mask would test
  Hints large = portable;
  large.tile_keys = 256;  // 147 KiB of shared memory
  EXPECT_EQ(plan_of("forward bf16 d64", "h200", large).tile_keys, 256);
  EXPECT_EQ(plan_of("forward bf16 d64", "l4", large).tile_keys, 64);
}

TEST(CudaPlan, CascadesAreRefusedInWords) {
  const core::Problem level = parse("forward bf16 h2 q4 k4 d64").problem;
  const core::Problem levels[] = {level, level};
  expect_says(refusal([&] { core::choose_cascade(kernels(), levels, find_device("h200"), {}); }), TESSERA_UNSUPPORTED,
              "cuda.portable cannot merge levels");
}

}  // namespace
}  // namespace tessera::cuda
