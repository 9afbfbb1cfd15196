#include "core/plan.h"

#include <cstdio>
#include <cstring>

#include "core/device.h"
#include "core/line.h"
#include "refusal.h"

namespace tessera::core {
namespace {

// Kernels that exist for these tests alone.
std::string accept(const Problem&, const Device&) {
  return "";
}
std::string refuse_odd(const Problem& p, const Device&) {
  return p.dim % 2 ? fmt::format("dim is {}; it must be even", p.dim) : "";
}
std::string refuse_all(const Problem&, const Device& d) {
  return fmt::format("device is {}, the kernel needs another", d.name);
}
void small(Plan& plan, const Hints&) {
  plan.steps.push_back({"attend", "by rows"});
}
void large(Plan& plan, const Hints&) {
  plan.steps.push_back({"attend", "by tiles"});
  plan.steps.push_back({"combine", "two halves"});
  add_region(plan, "scores", 100);
  add_region(plan, "sums", 1000 * plan.threads);
}
void run(const Plan&, const Bindings&, void*) {}
int64_t no_merge_bytes(const tessera_merge&) {
  return 0;
}
void no_merge(const tessera_merge&, std::byte*) {}

const Kernel odd = {"fast.odd", "fast", true, 0, refuse_odd, large, run, no_merge_bytes, no_merge};
const Kernel never = {"fast.never", "fast", true, 0, refuse_all, small, run, no_merge_bytes, no_merge};
const Kernel plain = {"plain", "plain", true, 0, accept, small, run, no_merge_bytes, no_merge};
const Kernel judge = {"judge.exact", "judge", false, 0, accept, small, run, no_merge_bytes, no_merge};
const Kernel* const all[] = {&never, &odd, &plain, &judge};

Plan make(const char* line, const Hints& hints = {}, std::span<const Kernel* const> kernels = all) {
  return choose(kernels, parse(line).problem, find_device("avx2"), hints);
}
Hints allowing(const char* kernels) {
  Hints h = {};
  h.kernels = kernels;
  return h;
}
std::string reason(const Plan& plan, const std::string& kernel) {
  for (const Reason& r : plan.reasons)
    if (r.kernel == kernel) return r.why;
  return "";
}

// ------------------------------------------------------------------------------------------------------- choosing

const Kernel wide = {"wide", "plain", true, 1e6, accept, small, run, no_merge_bytes, no_merge};
const Kernel* const wide_and_plain[] = {&wide, &plain};
const Kernel* const wide_alone[] = {&wide};

// "forward q4 k4 d8" is 4 * 4 * 2 * 16 = 512 FLOP, q512 k512 two to the power of 23.
TEST(Choose, AKernelForLargeProblemsLeavesSmallOnesToTheNext) {
  const Plan plan = make("forward q4 k4 d8", {}, wide_and_plain);
  EXPECT_EQ(plan.kernel, &plain);
  EXPECT_NE(reason(plan, "wide").find("leaves 512 FLOP to a kernel with narrower registers"), std::string::npos);
  EXPECT_EQ(make("forward q512 k512 d8", {}, wide_and_plain).kernel, &wide);
  EXPECT_EQ(make("forward q4 k4 d8", {}, wide_alone).kernel, &wide);
  EXPECT_EQ(make("forward q4 k4 d8", allowing("wide,plain"), wide_and_plain).kernel, &wide);
  EXPECT_EQ(make("forward q4 k4 d8 batch_invariant", {}, wide_and_plain).kernel, &wide);
}

TEST(Choose, TheFirstThatAcceptsAndAReasonForEveryOther) {
  const Plan even = make("forward q4 k4 d8");
  EXPECT_EQ(even.kernel, &odd);
  EXPECT_EQ(even.reasons.size(), 3u);
  EXPECT_EQ(reason(even, "fast.never"), "device is avx2, the kernel needs another");
  EXPECT_EQ(reason(even, "plain"), "would accept, stands later in the list");
  EXPECT_EQ(reason(even, "judge.exact"), "never chosen unless named");
  const Plan uneven = make("forward q4 k4 d7");
  EXPECT_EQ(uneven.kernel, &plain);
  EXPECT_EQ(reason(uneven, "fast.odd"), "dim is 7; it must be even");
}

TEST(Choose, HintsNameKernelsByPrefix) {
  EXPECT_EQ(make("forward d8", allowing("plain")).kernel, &plain);
  EXPECT_EQ(make("forward d8", allowing("fast")).kernel, &odd);
  EXPECT_EQ(make("forward d8", allowing("nothing,judge.exact")).kernel, &judge);
  EXPECT_EQ(make("forward d8", allowing("judge")).kernel, &judge);
  EXPECT_EQ(reason(make("forward d8", allowing("plain")), "fast.odd"), "only plain may be chosen");
  for (const char* none : {"", ",", "fas", "fast.od", "plain.", "PLAIN"})
    expect_says(refusal([&] { make("forward d8", allowing(none)); }), TESSERA_INVALID,
                "it must name some of fast.never, fast.odd, plain, judge.exact, or their prefixes");
}

TEST(Choose, UnsupportedListsEveryReason) {
  const Kernel* const two[] = {&never, &odd};
  const Refusal r = refusal([&] { make("forward q4 k4 d7", {}, two); });
  expect_says(r, TESSERA_UNSUPPORTED, "no kernel answers \"forward f32 b1 h1 q4 k4 d7\" on device avx2:");
  expect_says(r, TESSERA_UNSUPPORTED, "\n  fast.never: device is avx2, the kernel needs another");
  expect_says(r, TESSERA_UNSUPPORTED, "\n  fast.odd: dim is 7; it must be even");
}

TEST(Choose, WorkspaceLimitPassesTheKernelBy) {
  Hints h = {};
  h.has_workspace_limit = 1;
  h.workspace_limit = 500;
  h.threads = 2;
  const Plan plan = make("forward d8", h);
  EXPECT_EQ(plan.kernel, &plain);
  EXPECT_EQ(reason(plan, "fast.odd"),
            "needs 2176 bytes of workspace with 2 threads, the limit is 500; fewer threads or "
            "smaller tiles need less");
  h.workspace_limit = 2176;
  EXPECT_EQ(make("forward d8", h).kernel, &odd);
  const Kernel* const one[] = {&odd};
  h.workspace_limit = 0;
  expect_says(refusal([&] { make("forward d8", h, one); }), TESSERA_UNSUPPORTED, "the limit is 0");
}

TEST(Choose, SamplesAreForKernelsThatAreNamed) {
  Hints h = allowing("plain,judge");
  h.sample_pairs = 3;
  const Plan plan = make("forward d8", h);
  EXPECT_EQ(plan.kernel, &judge);
  EXPECT_EQ(plan.sample_pairs, 3);
  EXPECT_EQ(reason(plan, "plain"), "hints ask for a sample of pairs, which only reference kernels take");
}

TEST(Choose, RefusesWhatIsNoHint) {
  const auto says = [](const char* sentence, auto set) {
    Hints h = {};
    h.has_workspace_limit = 1;
    set(h);
    expect_says(refusal([&] { make("forward d8", h); }), TESSERA_INVALID, sentence);
  };
  says("hints.threads is -1; it must be from 0 (all) to 1024", [](Hints& h) { h.threads = -1; });
  says("hints.threads is 1025", [](Hints& h) { h.threads = 1025; });
  says("tile_rows and tile_keys are -1 and 0", [](Hints& h) { h.tile_rows = -1; });
  says("tile_rows and tile_keys are 1025 and 0", [](Hints& h) { h.tile_rows = 1025; });
  says("tile_rows and tile_keys are 0 and -1", [](Hints& h) { h.tile_keys = -1; });
  says("tile_rows and tile_keys are 0 and 1025", [](Hints& h) { h.tile_keys = 1025; });
  says("hints.sample_pairs is -1", [](Hints& h) { h.sample_pairs = -1; });
  says("hints.workspace_limit is -1", [](Hints& h) { h.workspace_limit = -1; });
  expect_says(refusal([&] { choose(all, Problem{}, find_device("avx2"), {}); }), TESSERA_INVALID, "heads_q is 0");
}

TEST(Plan, RegionsAreAligned) {
  Plan plan;
  EXPECT_EQ(add_region(plan, "a", 1), 0);
  EXPECT_EQ(add_region(plan, "b", 64), 64);
  EXPECT_EQ(add_region(plan, "c", 65), 128);
  EXPECT_EQ(plan.workspace_bytes, 256);
  EXPECT_EQ(region_offset(plan, "b"), 64);
  EXPECT_EQ(region_offset(plan, "c"), 128);
}

TEST(Plan, TextForAPerson) {
  const std::string text = to_text(make("forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal"));
  for (const char* part :
       {"forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal@bottom_right\n", "device     avx2 (avx2, 1 thread)",
        "1 attend   fast.odd  by tiles", "2 combine  fast.odd  two halves",
        "workspace  1.15 kB (scores 100 B, sums 1 kB)", "reads 201 MB, writes 136 MB", "550 GFLOP",
        "a score matrix would take 8.59 GB", "not chosen fast.never: device is avx2"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

TEST(Plan, ForGpusThatAreNotHere) {
  const Plan plan = choose(all, parse("forward d8").problem, find_device("h200"), {});
  EXPECT_NE(to_text(plan).find("h200 (sm_90, 132 SMs)"), std::string::npos);
}

// ----------------------------------------------------------------------------------------------------------- cost

Cost cost_of(const char* line, const char* device = "h200") {
  return cost(parse(line).problem, find_device(device));
}

TEST(Cost, ClosedForms) {
  // q and k: b h s d, out: b h s dv, lse: b h s float32.
  const Cost dense = cost_of("forward f32 b2 h4 q6 k10 d8/16");
  EXPECT_EQ(dense.bytes_read, 4 * (2 * 4 * 6 * 8 + 2 * 4 * 10 * (8 + 16)));
  EXPECT_EQ(dense.bytes_written, 4 * (2 * 4 * 6 * (16 + 1)));
  EXPECT_EQ(dense.score_bytes, 4 * 2 * 4 * 6 * 10);
  EXPECT_DOUBLE_EQ(dense.flops, 2.0 * 2 * 4 * 6 * 10 * (8 + 16));
  const Cost backward = cost_of("backward f64 b1 h2 q6 k10 d8/16");
  EXPECT_DOUBLE_EQ(backward.flops, 2.0 * 2 * 6 * 10 * (3 * 8 + 2 * 16));
  EXPECT_EQ(backward.bytes_written, 8 * 2 * (6 * 8 + 10 * 8 + 10 * 16));
  EXPECT_EQ(backward.score_bytes, 8 * 2 * 6 * 10);
}

TEST(Cost, TakesTheBandOff) {
  const auto pairs = [](const char* line) { return cost_of(line).flops / (2 * (1 + 1)); };  // of d1
  EXPECT_DOUBLE_EQ(pairs("forward q64 k64 d1 mask=causal"), 64 * 65 / 2);
  EXPECT_DOUBLE_EQ(pairs("forward q4096 k4096 d1 mask=causal"), 4096.0 * 4097 / 2);
  EXPECT_DOUBLE_EQ(pairs("forward q2 k5 d1 mask=causal"), 9);
  EXPECT_DOUBLE_EQ(pairs("forward q2 k5 d1 mask=causal@top_left"), 3);
  EXPECT_DOUBLE_EQ(pairs("forward q5 k2 d1 mask=causal"), 3);
  EXPECT_DOUBLE_EQ(pairs("forward q100 k100 d1 mask=window(4,0)"), 100 * 5 - 10);
  EXPECT_DOUBLE_EQ(pairs("forward q100 k100 d1 mask=window(4,0)&first(1)"), 100 * 5 - 10 + 95);
  EXPECT_DOUBLE_EQ(pairs("forward q100 k100 d1 mask=window(2,-5)"), 0);
  EXPECT_DOUBLE_EQ(pairs("forward q64 k64 d1 mask=chunk(16)"), 64 * 16);
  EXPECT_DOUBLE_EQ(pairs("forward q0 k64 d1"), 0);
  EXPECT_DOUBLE_EQ(pairs("forward b0 q4 k64 d1"), 0);
}

TEST(Cost, SharedElementsCountOnce) {
  EXPECT_EQ(cost_of("forward q1 k100 h4 d8 strides=k[3200,8,0,1]").bytes_read, 4 * (4 * 8 + 100 * 8 + 100 * 4 * 8));
  EXPECT_EQ(cost_of("forward q1 k100 h4 d8 strides=k[0,0,0,0]").bytes_read, 4 * (4 * 8 + 1 + 100 * 4 * 8));
  // Extents alone would not fit 64 bits.
  EXPECT_EQ(cost_of("forward h64/64 b64 q1 k2147483647 d64 strides=k[0,0,0,0]v[0,0,0,0]").bytes_read,
            4 * (64 * 64 * 64 + 2));
}

TEST(Cost, Roofline) {
  const Cost compute = cost_of("forward bf16 b8 h32 q8192 k8192 d128");
  EXPECT_DOUBLE_EQ(compute.seconds, compute.flops / 989e12);
  const Cost memory = cost_of("forward bf16 b8 h32 q1 k8192 d128");
  EXPECT_DOUBLE_EQ(memory.seconds, static_cast<double>(memory.bytes_read + memory.bytes_written) / 4.8e12);
  EXPECT_EQ(cost_of("forward d8", "avx2").seconds, 0);
}

// --------------------------------------------------------------------------------------------------------- devices

TEST(Device, KnownOnesAreFound) {
  int n = 0;
  for (; known_device(n); ++n) {
    const Device d = find_device(known_device(n));
    EXPECT_STREQ(d.name, known_device(n));
    EXPECT_EQ(d.size, sizeof d);
    if (d.kind == TESSERA_CPU) EXPECT_GE(d.threads, 1);
    else
      EXPECT_TRUE(d.sm_arch >= 75 && d.sms > 0 && d.shared_per_block > 0 && d.memory > 0 && d.bytes_per_second > 0)
          << d.name;
  }
  EXPECT_GE(n, 16);
  EXPECT_STREQ(known_device(0), "host");
  EXPECT_EQ(known_device(n + 1), nullptr);
  EXPECT_EQ(known_device(-1), nullptr);
  EXPECT_GT(find_device("host").memory, 0);
}

TEST(Device, FactsOfTheOneWeMeasureOn) {
  const Device d = find_device("h200");
  EXPECT_EQ(d.sm_arch, 90);
  EXPECT_EQ(d.sms, 132);
  EXPECT_EQ(d.shared_per_block, 227 * 1024);
}

TEST(Device, UnknownNamesListTheKnown) {
  expect_says(refusal([] { find_device("h2000"); }), TESSERA_INVALID,
              "device is \"h2000\"; it must be one of host, baseline, avx2");
  expect_says(refusal([] { find_device(""); }), TESSERA_INVALID, "rtx5090, gb10");
}

TEST(Device, InstructionSetsHaveNames) {
  EXPECT_STREQ(isa_text(TESSERA_ISA_BASELINE), "baseline");
  EXPECT_STREQ(isa_text(TESSERA_ISA_AVX512BF16), "avx512bf16");
}

// -------------------------------------------------------------------------------------------------------- bindings

struct Memory {
  alignas(64) char bytes[4096] = {};
  Plan plan;
  Bindings bound = {};

  explicit Memory(const char* line) : plan(make(line)) {
    for (int name = 0; name < TESSERA_NAMES; ++name)
      if (has(plan.problem, name)) bound.data[name] = bytes + 64 * name;
    bound.workspace = bytes;
    bound.workspace_bytes = sizeof bytes;
  }
  Refusal check() const {
    return refusal([&] { check_bindings(plan, bound); });
  }
};

TEST(Bindings, WhatAPlanNeeds) {
  EXPECT_EQ(Memory("forward q2 k3 d8").check().message, "");
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_OUT, TESSERA_LSE, TESSERA_SINKS}) {
    Memory m("forward q2 k3 d8 sink");
    m.bound.data[name] = nullptr;
    expect_says(m.check(), TESSERA_INVALID,
                fmt::format("{} is bound to NULL; the plan was made with it", operand_row(name).text));
  }
}

TEST(Bindings, OutputsHaveTheirOwnMemory) {
  Memory m("forward q2 k3 d8");
  m.bound.data[TESSERA_OUT] = m.bound.data[TESSERA_K];
  expect_says(m.check(), TESSERA_INVALID, "out and k are bound to one address");
}

TEST(Bindings, EmptyOperandsNeedNoMemory) {
  Memory m("forward q2 k0 d8");
  m.bound.data[TESSERA_K] = m.bound.data[TESSERA_V] = nullptr;
  EXPECT_EQ(m.check().message, "");
  Memory none("forward b0 q2 k3 d8");
  std::memset(none.bound.data, 0, sizeof none.bound.data);
  EXPECT_EQ(none.check().message, "");
}

TEST(Bindings, ElementsStandAtMultiplesOfTheirSize) {
  Memory m("forward q2 k3 d8");
  m.bound.data[TESSERA_V] = m.bytes + 2;
  expect_says(m.check(), TESSERA_INVALID, "v is at address 0x");
  expect_says(m.check(), TESSERA_INVALID, "a f32 must stand at a multiple of 4 bytes");
  Memory half("forward bf16 q2 k3 d8");
  half.bound.data[TESSERA_V] = half.bytes + 2;
  EXPECT_EQ(half.check().message, "");
  half.bound.data[TESSERA_V] = half.bytes + 1;
  expect_says(half.check(), TESSERA_INVALID, "a bf16 must stand at a multiple of 2 bytes");
}

TEST(Bindings, Workspace) {
  Memory m("forward q2 k3 d8");
  m.bound.workspace_bytes = 100;
  expect_says(m.check(), TESSERA_INVALID, "workspace_bytes is 100; the plan needs 1152");
  m.bound.workspace_bytes = 4000;
  m.bound.workspace = m.bytes + 16;
  expect_says(m.check(), TESSERA_INVALID, "it must stand at a multiple of 64 bytes");
  m.bound.workspace = nullptr;
  expect_says(m.check(), TESSERA_INVALID, "workspace is at address 0x0");
  Memory none("forward q2 k3 d7");  // a plan without one
  none.bound.workspace = nullptr;
  none.bound.workspace_bytes = 0;
  EXPECT_EQ(none.check().message, "");
}

TEST(Bindings, LengthsAreChecked) {
  Memory m("forward d8 varlen=q[2,1]");
  int32_t cu[] = {0, 2, 1};
  m.bound.data[TESSERA_CU_SEQLENS_Q] = cu;
  expect_says(m.check(), TESSERA_INVALID, "cu_seqlens_q[2] is 1 after 2");
}

}  // namespace
TEST(Devices, RatesAreThoseOfTheNameAndNoOther) {
  const auto rate = [](const char* name, int sm_arch, int sms) {
    Device d = {};
    std::snprintf(d.name, sizeof d.name, "%s", name);
    d.sm_arch = sm_arch;
    d.sms = sms;
    fill_rates(d);
    return d.flops_16;
  };
  EXPECT_EQ(rate("NVIDIA H200", 90, 132), find_device("h200").flops_16);
  EXPECT_EQ(rate("NVIDIA H100 80GB HBM3", 90, 132), find_device("h100").flops_16);
  EXPECT_EQ(rate("NVIDIA A100-SXM4-80GB", 80, 108), find_device("a100").flops_16);
  EXPECT_EQ(rate("NVIDIA GeForce RTX 4090", 89, 128), find_device("rtx4090").flops_16);
  EXPECT_EQ(rate("NVIDIA GeForce RTX 4090 Laptop GPU", 89, 76), 0);
  EXPECT_EQ(rate("NVIDIA H100 PCIe", 90, 114), 0);
  EXPECT_EQ(rate("NVIDIA GH200 480GB", 90, 132), 0);
  EXPECT_EQ(rate("NVIDIA L40", 89, 58), 0);
  EXPECT_EQ(rate("NVIDIA A10G", 86, 72), 0);
}

}  // namespace tessera::core
