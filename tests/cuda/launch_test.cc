// Runs through the fake driver: which device is found, what is launched with which parameters, what is refused.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "cuda/compile.h"
#include "on_fake.h"

namespace tessera::test {
namespace {

using rules::Corner;
using rules::ForwardParams;

cuda::Context current_context() {
  cuda::Context context = nullptr;
  EXPECT_EQ(cuCtxGetCurrent(&context), 0);
  return context;
}

void expect_steps(const rules::Steps& got, int64_t batch, int64_t row, int64_t head) {
  EXPECT_EQ(got.batch, batch);
  EXPECT_EQ(got.row, row);
  EXPECT_EQ(got.head, head);
}

const tessera_hints portable = allowing("cuda.portable");
struct Portable : Case {
  explicit Portable(const char* text, const char* device_name = "cuda", int device = 0,
                    const tessera_hints& hints = portable)
      : Case(text, device_name, device, &hints) {}
};

constexpr const char* any_line = "forward bf16 b2 h4/2 q300 k200 d128";

// ------------------------------------------------------------------------------------------------------------ devices

TEST(CudaDevice, FactsAreTheDrivers) {
  with_driver([] {
    for (const char* name : {"cuda", "cuda:0"}) {
      const tessera_device d = find_device(name);
      EXPECT_STREQ(d.name, "NVIDIA H200");
      EXPECT_EQ(d.kind, TESSERA_GPU);
      EXPECT_EQ(d.sm_arch, 90);
      EXPECT_EQ(d.sms, 132);
      EXPECT_EQ(d.shared_per_block, 232448);
      EXPECT_EQ(d.memory, int64_t{141} << 30);
      EXPECT_EQ(d.flops_16, 989e12);  // of the known h200
      EXPECT_EQ(d.bytes_per_second, 4.8e12);
    }
    EXPECT_STREQ(find_device("h200").name, "h200");  // the known one is asked of nobody
  });
  with_driver({{"FAKE_CUDA_DEVICE", "NVIDIA Unheard of 9000:103:7:65536"}}, [] {
    const tessera_device d = find_device("cuda");
    EXPECT_STREQ(d.name, "NVIDIA Unheard of 9000");
    EXPECT_EQ(d.sm_arch, 103);
    EXPECT_EQ(d.sms, 7);
    EXPECT_EQ(d.shared_per_block, 65536);
    EXPECT_EQ(d.flops_16, 0);  // unknown
  });
}

TEST(CudaDevice, NamesThatAreNoneAreRefusedInWords) {
  const auto says = [](const char* name, int code, const char* fragment) {
    tessera_device device = {};
    device.size = sizeof device;
    expect_says(code, fragment, [&](tessera_error* e) { return tessera_device_find(name, &device, e); });
  };
  with_driver([&] {
    says("cuda:7", TESSERA_FAILED, "device is \"cuda:7\"; this machine has 1 GPU, cuda:0.");
    for (const char* name : {"cuda:x", "cuda:", "cuda:-1", "cuda:0x", "cuda: 0", "cuda:99999999999"})
      says(name, TESSERA_INVALID, "; a GPU of this machine is \"cuda\" or \"cuda:N\".");
    for (const char* name : {"cuda0", "CUDA", "cud"}) says(name, TESSERA_INVALID, "it must be one of host, baseline");
  });
  with_driver({{"FAKE_CUDA_COUNT", "3"}}, [&] {
    EXPECT_EQ(find_device("cuda:2").sm_arch, 90);
    says("cuda:3", TESSERA_FAILED, "device is \"cuda:3\"; this machine has 3 GPUs.");
  });
  with_driver({{"FAKE_CUDA_COUNT", "0"}}, [&] { says("cuda", TESSERA_FAILED, "this machine has 0 GPUs."); });
  with_driver({{"FAKE_CUDA_INIT", "100"}}, [&] {
    says("cuda", TESSERA_FAILED, "cuInit says 100 (no CUDA-capable device is detected)");
    says("cuda:x", TESSERA_INVALID, "or \"cuda:N\"");
  });
}

// ------------------------------------------------------------------------------------------------------------ launches

TEST(CudaLaunch, GridBlockSharedMemoryAndStream) {
  with_driver([] {
    const Portable c(any_line);
    auto* const stream = reinterpret_cast<cuda::Stream>(0x1234);
    const FakeLaunch launch = c.launch(stream);
    EXPECT_EQ(launch.grid[0], 2u * 4 * 3);
    EXPECT_EQ(launch.grid[1], 1u);
    EXPECT_EQ(launch.grid[2], 1u);
    EXPECT_EQ(launch.block[0], 128u);
    EXPECT_EQ(launch.block[1], 1u);
    EXPECT_EQ(launch.block[2], 1u);
    EXPECT_EQ(launch.shared_bytes, 101120u);
    EXPECT_EQ(launch.stream, stream);
    EXPECT_EQ(c.launch().stream, nullptr);
  });
}

TEST(CudaLaunch, PointersAndSizes) {
  with_driver([] {
    const Portable c("forward bf16 b2 h4/2 q300 k200 d128 status");
    const ForwardParams p = c.params();
    EXPECT_EQ(p.q, c.bindings.data[TESSERA_Q]);
    EXPECT_EQ(p.k, c.bindings.data[TESSERA_K]);
    EXPECT_EQ(p.v, c.bindings.data[TESSERA_V]);
    EXPECT_EQ(p.out, c.bindings.data[TESSERA_OUT]);
    EXPECT_EQ(p.lse, c.bindings.data[TESSERA_LSE]);
    EXPECT_EQ(p.status, c.bindings.data[TESSERA_STATUS]);
    EXPECT_NE(p.status, nullptr);
    EXPECT_EQ(p.batch, 2);
    EXPECT_EQ(p.heads, 4);
    EXPECT_EQ(p.group, 2);
    EXPECT_EQ(p.row_tiles, 3);
    EXPECT_EQ(p.out_is_f32, 0);
    EXPECT_FLOAT_EQ(p.scale, static_cast<float>(1 / std::sqrt(128.0)));
    EXPECT_FLOAT_EQ(p.scale_log2, static_cast<float>(1.4426950408889634 / std::sqrt(128.0)));

    const ForwardParams other = Portable("forward f16 h3 q2 k2 d64 scale=0.25 out=f32 nolse").params();
    EXPECT_EQ(other.lse, nullptr);
    EXPECT_EQ(other.status, nullptr);
    EXPECT_EQ(other.group, 1);
    EXPECT_EQ(other.row_tiles, 1);
    EXPECT_EQ(other.out_is_f32, 1);
    EXPECT_EQ(other.scale, 0.25f);
    EXPECT_FLOAT_EQ(other.scale_log2, 0.25f * 1.4426950408889634f);
  });
}

TEST(CudaLaunch, StepsOfLayouts) {
  with_driver([] {
    const ForwardParams bshd = Portable(any_line).params();
    expect_steps(bshd.q_step, 300 * 4 * 128, 4 * 128, 128);
    expect_steps(bshd.k_step, 200 * 2 * 128, 2 * 128, 128);
    expect_steps(bshd.v_step, 200 * 2 * 128, 2 * 128, 128);
    expect_steps(bshd.out_step, 300 * 4 * 128, 4 * 128, 128);
    expect_steps(bshd.lse_step, 4 * 300, 1, 300);  // (B, H, S) in every layout

    const ForwardParams bhsd = Portable("forward bf16 b2 h4/2 q300 k200 d128 layout=bhsd").params();
    expect_steps(bhsd.q_step, 4 * 300 * 128, 128, 300 * 128);
    expect_steps(bhsd.k_step, 2 * 200 * 128, 128, 200 * 128);
    expect_steps(bhsd.v_step, 2 * 200 * 128, 128, 200 * 128);
    expect_steps(bhsd.out_step, 4 * 300 * 128, 128, 300 * 128);
    expect_steps(bhsd.lse_step, 4 * 300, 1, 300);

    const ForwardParams qkv = Portable("forward bf16 b2 h4/2 q300 k300 d128 layout=qkv").params();
    expect_steps(qkv.q_step, 300 * 8 * 128, 8 * 128, 128);  // 4 + 2 + 2 heads a token
    expect_steps(qkv.k_step, 300 * 8 * 128, 8 * 128, 128);
    expect_steps(qkv.v_step, 300 * 8 * 128, 8 * 128, 128);

    // A dimension of extent 1 has no step, whatever its stride says.
    const ForwardParams one = Portable("forward bf16 b1 h1 q1 k2 d64 strides=q[800,80,8,1]").params();
    expect_steps(one.q_step, 0, 0, 0);
    expect_steps(one.k_step, 0, 64, 0);
  });
}

TEST(CudaLaunch, LengthsAreReadOnTheDevice) {
  with_driver([] {
    const ForwardParams dense = Portable(any_line).params();
    for (const rules::DeviceLengths& lengths : {dense.queries, dense.keys}) {
      EXPECT_EQ(lengths.cu, nullptr);
      EXPECT_EQ(lengths.used, nullptr);
      EXPECT_EQ(lengths.rows, 0);
    }
    EXPECT_EQ(dense.queries.longest, 300);
    EXPECT_EQ(dense.keys.longest, 200);

    const Portable packed("forward bf16 h4/2 d64 varlen=q[100,200,0]k[50,60,70] seqused=k[1,2,3]");
    const FakeLaunch launch = packed.launch();
    const ForwardParams& p = launch.params;
    EXPECT_EQ(launch.grid[0], 3u * 4 * 2 + 3);
    EXPECT_EQ(p.queries.cu, packed.bindings.data[TESSERA_CU_SEQLENS_Q]);
    EXPECT_EQ(p.queries.used, nullptr);
    EXPECT_EQ(p.queries.rows, 300);
    EXPECT_EQ(p.queries.longest, 200);
    EXPECT_EQ(p.keys.cu, packed.bindings.data[TESSERA_CU_SEQLENS_K]);
    EXPECT_EQ(p.keys.used, packed.bindings.data[TESSERA_SEQUSED_K]);
    EXPECT_EQ(p.keys.rows, 180);
    EXPECT_EQ(p.keys.longest, 70);
    EXPECT_NE(p.queries.cu, nullptr);
    EXPECT_NE(p.keys.used, nullptr);
    expect_steps(p.q_step, 0, 4 * 64, 64);
    expect_steps(p.k_step, 0, 2 * 64, 64);
    expect_steps(p.lse_step, 0, 1, 300);

    const Portable used("forward bf16 b2 q5 k7 d64 seqused=q[1,2]");
    const ForwardParams u = used.params();
    EXPECT_EQ(u.queries.cu, nullptr);
    EXPECT_EQ(u.queries.used, used.bindings.data[TESSERA_SEQUSED_Q]);
    EXPECT_NE(u.queries.used, nullptr);
    EXPECT_EQ(u.queries.longest, 5);
  });
}

TEST(CudaLaunch, BandsAndCorners) {
  with_driver([] {
    const auto params = [](const std::string& mask) {
      return Portable(("forward bf16 b2 q5 k7 d64 mask=" + mask).c_str()).params();
    };
    const ForwardParams none = params("none");
    EXPECT_FALSE(none.band.causal || none.band.chunked);
    EXPECT_EQ(none.band.left, rules::far_away);
    EXPECT_EQ(none.band.right, rules::far_away);
    EXPECT_EQ(none.band.first, 0);

    const ForwardParams causal = params("causal");
    EXPECT_TRUE(causal.band.causal);
    EXPECT_EQ(causal.band.prefix, 0);
    EXPECT_EQ(causal.corner, Corner::bottom_right);

    const ForwardParams top = params("causal@top_left");
    EXPECT_EQ(top.corner, Corner::fixed);
    EXPECT_EQ(top.band.offset, 0);

    const ForwardParams window = params("window(3,1)@top_left&first(2)");
    EXPECT_EQ(window.band.left, 3);
    EXPECT_EQ(window.band.right, 1);
    EXPECT_EQ(window.band.first, 2);
    EXPECT_FALSE(window.band.causal);
    EXPECT_EQ(window.corner, Corner::fixed);
    EXPECT_EQ(params("window(3,unbounded)").band.right, rules::far_away);

    const ForwardParams chunk = params("chunk(4)@at(-3)");
    EXPECT_TRUE(chunk.band.chunked);
    EXPECT_EQ(chunk.band.chunk, 4);
    EXPECT_EQ(chunk.corner, Corner::fixed);
    EXPECT_EQ(chunk.band.offset, -3);

    const ForwardParams prefix = params("prefix(2)");
    EXPECT_TRUE(prefix.band.causal);
    EXPECT_EQ(prefix.band.prefix, 2);

    const Portable at("forward bf16 b2 q5 k7 d64 mask=causal@at[1,2]");
    EXPECT_EQ(at.params().corner, Corner::per_sequence);
    EXPECT_EQ(at.params().corner_offsets, at.bindings.data[TESSERA_CORNER_OFFSETS]);
    EXPECT_NE(at.params().corner_offsets, nullptr);
    EXPECT_EQ(causal.corner_offsets, nullptr);
  });
}

TEST(CudaLaunch, BiasesAndKeepMasks) {
  with_driver([] {
    Portable c("forward bf16 b2 h4/2 q300 k200 d64 bias=1,h,q,k mask=keep(b,1,q,k) scale=0.5");
    const ForwardParams p = c.params();
    EXPECT_EQ(p.bias, c.bindings.data[TESSERA_BIAS]);
    EXPECT_EQ(p.keep, c.bindings.data[TESSERA_KEEP]);
    EXPECT_NE(p.keep, nullptr);
    expect_steps(p.bias_step, 0, 200, 300 * 200);
    expect_steps(p.keep_step, 300 * 200, 200, 0);
    EXPECT_EQ(p.pair_scale, 0.5f);
    EXPECT_EQ(p.scale, 1);
    EXPECT_FLOAT_EQ(p.scale_log2, 1.4426950408889634f);
    EXPECT_TRUE(p.keep_in_words);
    c.bindings.data[TESSERA_KEEP] = static_cast<std::byte*>(c.bindings.data[TESSERA_KEEP]) + 1;
    EXPECT_FALSE(c.params().keep_in_words);
    EXPECT_FALSE(Portable("forward bf16 q2 k3 d64 mask=keep").params().keep_in_words);  // every other row begins odd
    const ForwardParams none = Portable(any_line).params();
    EXPECT_EQ(none.bias, nullptr);
    EXPECT_EQ(none.keep, nullptr);
  });
}

// Under a causal mask as many heads run side by side as keep K and V in 32 MiB: 4096 keys of 2 * 128 numbers are 2 MiB,
// so 16 KV heads, each of 4 query heads.
TEST(CudaLaunch, SectionsOfHeads) {
  with_driver([] {
    EXPECT_EQ(Portable("forward bf16 b4 h32/8 q128 k4096 d128 mask=causal").params().section, 64);
    EXPECT_EQ(Portable("forward bf16 b4 h32/8 q128 k4096 d128").params().section, 4);  // those that share keys
    EXPECT_EQ(Portable("forward bf16 b1 h8/4 q128 k128 d128 mask=causal").params().section, 8);  // all
    EXPECT_EQ(Portable("forward bf16 b1 h8/4 q1 k100000 d128 mask=causal").params().section, 2);
  });
}

TEST(CudaLaunch, WhatIsEmptyLaunchesNothing) {
  with_driver([] {
    for (const char* line : {"forward bf16 b0 h4 q300 k200 d128", "forward bf16 b2 h4 q0 k200 d128"}) {
      const Portable c(line);
      expect_ok([&](tessera_error* e) { return c.run(e); });
    }
    EXPECT_EQ(fake_launches(), 0);
    EXPECT_EQ(fake_loads(), 0);
    // No keys is not empty: out is zeros and lse -inf. Operands without elements need no memory.
    const Portable no_keys("forward bf16 b2 h4 q300 k0 d128");
    EXPECT_EQ(no_keys.bindings.data[TESSERA_K], nullptr);
    EXPECT_EQ(no_keys.params().keys.longest, 0);
  });
}

// A packed q of no rows: bounds may say more, but there is nothing to write and q may be NULL.
TEST(CudaLaunch, APackedQueryOfNoRowsLaunchesNothing) {
  with_driver([] {
    const Portable c("forward bf16 h2 q5 d64 varlen=q[0,0]k[3,4]");
    EXPECT_EQ(c.bindings.data[TESSERA_Q], nullptr);
    expect_ok([&](tessera_error* e) { return c.run(e); });
    EXPECT_EQ(fake_launches(), 0);
  });
}

// No sequence, and rows all the same: blocks that clear them, of heads that are none.
TEST(CudaLaunch, RowsOfNoSequenceAreCleared) {
  with_driver([] {
    const FakeLaunch launch = Portable("forward bf16 h2 d64 mask=causal varlen=q[]k[] rows=q300").launch();
    EXPECT_EQ(launch.grid[0], 3u);
    EXPECT_EQ(launch.params.batch, 0);
    EXPECT_EQ(launch.params.queries.rows, 300);
    EXPECT_GE(launch.params.section, 1);
  });
}

// ------------------------------------------------------------------------------------------------------------ refusals

TEST(CudaRun, PointersAreOfGpuMemoryAndAligned) {
  with_driver([] {
    Portable c(any_line);
    const auto with = [&](int name, void* data) {
      Portable changed(any_line);
      changed.bindings.data[name] = data;
      return changed;
    };
    alignas(16) static std::byte here[16];
    with(TESSERA_Q, here).expect_refused(TESSERA_INVALID, "q is at address 0x");
    with(TESSERA_Q, here)
        .expect_refused(TESSERA_INVALID, "which is no memory of a GPU. Bind device memory, or plan for \"host\".");
    with(TESSERA_Q, nullptr).expect_refused(TESSERA_INVALID, "q is bound to NULL");
    for (const auto& [name, text] : {std::pair(TESSERA_Q, "q"), std::pair(TESSERA_K, "k"), std::pair(TESSERA_V, "v"),
                                     std::pair(TESSERA_OUT, "out")}) {
      const Portable moved = with(name, static_cast<std::byte*>(c.bindings.data[name]) + 8);
      moved.expect_refused(TESSERA_INVALID, std::string(text) + " is at address 0x");
      moved.expect_refused(TESSERA_INVALID, "the problem promised multiples of 16 bytes");
    }
    // Rows of 16 bytes and no more: 16 is enough.
    EXPECT_EQ(with(TESSERA_K, static_cast<std::byte*>(c.bindings.data[TESSERA_K]) + 16).launch().grid[0], 24u);
    // Memory that the driver knows and the processor holds.
    alignas(16) static std::byte pinned[16];
    fake_host_memory(pinned, sizeof pinned);
    with(TESSERA_Q, pinned).expect_refused(TESSERA_INVALID, "which is no memory of a GPU");
  });
}

TEST(CudaRun, APlanForAnotherChipIsRefusedByBothNames) {
  with_driver([] {
    const Portable c(any_line, "a100");
    c.expect_refused(TESSERA_INVALID,
                     "the plan was made for a100 (sm_80); q lies on NVIDIA H200 (sm_90). Make it for "
                     "\"cuda:0\".");
    EXPECT_EQ(fake_loads(), 0);
    EXPECT_EQ(Portable(any_line, "h100").launch().grid[0], 24u);  // the same architecture
  });
}

TEST(CudaRun, WhatTheDriverSaysIsTold) {
  with_driver({{"FAKE_CUDA_LOAD", "218"}}, [] {
    const Portable c(any_line);
    c.expect_refused(TESSERA_FAILED,
                     "loading forward dtype=bf16 dim=128 tile_rows=128 tile_keys=64 warps=4 stages=2 pairs=0 for "
                     "sm_90: the CUDA driver says 218 (a PTX JIT compilation failed)");
    ::unsetenv("FAKE_CUDA_LOAD");
    EXPECT_EQ(c.launch().grid[0], 24u) << "what failed once is tried again";
  });
  with_driver({{"FAKE_CUDA_LOAD", "12345"}},
              [] { Portable(any_line).expect_refused(TESSERA_FAILED, "the CUDA driver says 12345 (?)"); });
  with_driver({{"FAKE_CUDA_KERNEL", "500"}}, [] {
    Portable(any_line).expect_refused(TESSERA_FAILED,
                                      "tessera_forward: the CUDA driver says 500 (named symbol not found)");
    EXPECT_EQ(fake_libraries(), 0) << "a library whose kernel is not used must be unloaded";
  });
}

TEST(CudaRun, NoDriverNoRun) {
  with_driver({{"FAKE_CUDA_INIT", "999"}}, [] {
    // Planning for a known device needs none.
    Portable(any_line, "h200").expect_refused(TESSERA_FAILED, "the NVIDIA driver does not start: cuInit says 999");
  });
}

// ------------------------------------------------------------------------------------------------------------ contexts

TEST(CudaContext, TheThreadsOwnIsUsedIfItIsOfTheDevice) {
  with_driver({{"FAKE_CUDA_COUNT", "2"}}, [] {
    const Portable first(any_line, "cuda:0", 0), second(any_line, "cuda:1", 1);
    cuda::Context primary_0 = nullptr, primary_1 = nullptr;
    ASSERT_EQ(cuDevicePrimaryCtxRetain(&primary_0, 0), 0);
    ASSERT_EQ(cuDevicePrimaryCtxRetain(&primary_1, 1), 0);

    // None is current: the primary one is for the run, and none is again.
    ASSERT_EQ(current_context(), nullptr);
    EXPECT_EQ(first.launch().context, primary_0);
    EXPECT_EQ(second.launch().context, primary_1);
    EXPECT_EQ(second.launch().device, 1);
    EXPECT_EQ(current_context(), nullptr);

    // One of the thread's own, which is not the primary one.
    const cuda::Context own = fake_context(1);
    ASSERT_EQ(cuCtxSetCurrent(own), 0);
    EXPECT_EQ(second.launch().context, own);
    EXPECT_EQ(first.launch().context, primary_0);
    EXPECT_EQ(current_context(), own);
    Portable refused(any_line, "cuda:0", 0);
    refused.bindings.data[TESSERA_V] = static_cast<std::byte*>(refused.bindings.data[TESSERA_V]) + 8;
    refused.expect_refused(TESSERA_INVALID, "v is at address");
    EXPECT_EQ(current_context(), own);
  });
}

TEST(CudaContext, IsPutBackWhereALoadFails) {
  with_driver({{"FAKE_CUDA_LOAD", "218"}}, [] {
    Portable(any_line).expect_refused(TESSERA_FAILED, "218");
    EXPECT_EQ(current_context(), nullptr);
    int mode = 0;
    EXPECT_EQ(cuThreadExchangeStreamCaptureMode(&mode), 0);
    EXPECT_EQ(mode, 0);
  });
}

// ------------------------------------------------------------------------------------------------------------- loading

TEST(CudaLoad, OneKernelIsLoadedOnceForADevice) {
  with_driver({{"FAKE_CUDA_COUNT", "2"}}, [] {
    const Portable first(any_line, "cuda:0", 0), second(any_line, "cuda:1", 1),
        same("forward bf16 q1 k1 d128 mask=causal");
    const Portable other("forward f16 q1 k1 d128");
    first.launch();
    first.launch();
    same.launch();  // another problem, the same kernel
    EXPECT_EQ(fake_loads(), 1);
    second.launch();
    EXPECT_EQ(fake_loads(), 2);
    other.launch();
    EXPECT_EQ(fake_loads(), 3);
  });
}

TEST(CudaLoad, EightThreadsAtOnceLoadItOnce) {
  for (int round = 0; round < 5; ++round)
    with_driver([] {
      const Portable c(any_line);
      constexpr int count = 8, runs = 20;
      std::atomic<int> waiting = count, wrong = 0;
      std::vector<std::thread> threads;
      for (int n = 0; n < count; ++n)
        threads.emplace_back([&] {
          --waiting;
          while (waiting > 0) std::this_thread::yield();
          for (int m = 0; m < runs; ++m) wrong += c.run(nullptr) != TESSERA_OK;
        });
      for (std::thread& thread : threads) thread.join();
      EXPECT_EQ(wrong, 0);
      EXPECT_EQ(fake_loads(), 1);
      EXPECT_EQ(fake_launches(), count * runs);
    });
}

TEST(CudaLoad, FromThePackInACapture) {
  with_driver({{"FAKE_CUDA_CAPTURING", "1"}}, [] {
    const Portable c(any_line);
    EXPECT_EQ(c.launch(reinterpret_cast<void*>(0x10)).grid[0], 24u);
    EXPECT_EQ(fake_loads(), 1);
    int mode = 0;  // of this thread, as it was
    EXPECT_EQ(cuThreadExchangeStreamCaptureMode(&mode), 0);
    EXPECT_EQ(mode, 0);
  });
}

// What no pack has is compiled here, so these need NVRTC.
class CudaCompiled : public testing::Test {
 protected:
  void SetUp() override {
#if defined(TESSERA_SANITIZED)
    GTEST_SKIP() << "what NVRTC does is no business of our sanitizers";
#endif
    const cuda::OpenedCompiler opened = cuda::open_compiler("", 0);
    if (!opened.compiler) GTEST_SKIP() << opened.why;
    // The fake's driver is as new as the compiler.
    version_ = std::to_string(std::max(opened.compiler->version, cuda::oldest_driver));
  }
  std::string version_;
};

TEST_F(CudaCompiled, NothingIsCompiledInACapture) {
  with_driver({{"FAKE_CUDA_CAPTURING", "1"}, {"FAKE_CUDA_VERSION", version_}}, [] {
    no_pack();
    const Portable c(any_line);
    const int before = fake_launches();
    auto* const stream = reinterpret_cast<void*>(0x10);
    expect_says(TESSERA_FAILED,
                "it is not compiled yet and the stream is being captured; run the plan once before the capture",
                [&](tessera_error* e) { return c.run(e, stream); });
    EXPECT_EQ(fake_launches(), before);
    EXPECT_EQ(fake_loads(), 0);
    ::unsetenv("FAKE_CUDA_CAPTURING");
    EXPECT_EQ(c.launch(stream).grid[0], 24u);
  });
}

TEST_F(CudaCompiled, IsKeptForTheNextProcess) {
  const Folder cache;
  const Environment environment = {{"FAKE_CUDA_VERSION", version_}, {"TESSERA_CACHE", cache.path()}};
  const auto run = [] {
    no_pack();
    EXPECT_EQ(Portable(any_line).launch().grid[0], 24u);
  };
  in_child(environment, run);
  ASSERT_EQ(cache.files().size(), 1u);
  const std::string path = cache.files()[0];
  EXPECT_NE(path.find("/sm_90-"), std::string::npos) << path;
  const std::optional<std::string> kept = cuda::read_file(path);
  ASSERT_TRUE(kept);
  // The next finds it: also where it could not compile.
  in_child({{"FAKE_CUDA_VERSION", version_}, {"TESSERA_CACHE", cache.path()}, {"FAKE_CUDA_CAPTURING", "1"}}, [] {
    no_pack();
    EXPECT_EQ(Portable(any_line).launch(reinterpret_cast<void*>(0x10)).grid[0], 24u);
  });
  // Half a file is none, and is written again.
  ASSERT_EQ(cuda::write_file(path, kept->substr(0, kept->size() / 2)), "");
  in_child(environment, run);
  EXPECT_EQ(cuda::read_file(path), kept);
  EXPECT_EQ(cache.files().size(), 1u);
}

TEST_F(CudaCompiled, ACacheThatCannotBeWrittenCostsNoAnswer) {
  const Folder folder;
  ASSERT_EQ(cuda::write_file(folder / "file", ""), "");
  in_child({{"FAKE_CUDA_VERSION", version_}, {"TESSERA_CACHE", folder / "file/under"}}, [] {
    no_pack();
    EXPECT_EQ(Portable(any_line).launch().grid[0], 24u);
  });
}

TEST_F(CudaCompiled, TilesOfAHintThatNoPackHas) {
  with_driver({{"FAKE_CUDA_VERSION", version_}}, [] {
    tessera_hints hints = portable;
    hints.tile_rows = 64;
    const FakeLaunch launch = Portable("forward bf16 b2 h4/2 q300 k200 d64", "cuda", 0, hints).launch();
    EXPECT_EQ(launch.grid[0], 2u * 4 * 5);
    EXPECT_EQ(launch.params.row_tiles, 5);
  });
}

// Both reasons are told. Where there is an NVRTC of this driver's, it compiles instead.
TEST(CudaLoad, APackNewerThanTheDriver) {
  with_driver({{"FAKE_CUDA_VERSION", "12080"}}, [] {
    cuda::Pack pack = made_pack();
    pack.compiler = 99000;
    put_pack(pack);
    const Portable c(any_line);
    const cuda::OpenedCompiler here = cuda::open_compiler("", 12080);
    if (here.compiler) {
      c.launch();
      EXPECT_EQ(fake_loads(), 1);
      return;
    }
    const std::string made = "the kernel pack was made by NVRTC 99.0, whose code needs a driver of CUDA 99.0";
    c.expect_refused(TESSERA_FAILED, " cannot be had: " + made + "; this one is 12.8; and here: " + here.why);
    EXPECT_EQ(fake_loads(), 0);
  });
  // Of the driver's own version or an older one it is taken.
  with_driver({{"FAKE_CUDA_VERSION", "13000"}}, [] {
    Portable(any_line).launch();
    EXPECT_EQ(fake_loads(), 1);
  });
}

}  // namespace
}  // namespace tessera::test
