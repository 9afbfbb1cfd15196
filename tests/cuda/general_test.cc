// The general kernels' plans: how work is cut into blocks, what is refused in which words, what a run launches.
#include <algorithm>
#include <set>

#include "cuda/general_shape.h"
#include "cuda/launch.h"
#include "cuda/loaded.h"
#include "on_fake.h"
#include "plan_of.h"
#include "tests/core/refusal.h"

namespace tessera::cuda {
namespace {

using core::Device;
using core::expect_says;
using core::find_device;
using core::Hints;
using core::parse;
using core::Plan;
using core::Problem;
using core::refusal;
using rules::GeneralSpec;
using rules::Product;
using rules::Task;

const Hints general = test::allowing("cuda.general");

Device with_shared(int64_t kib) {
  Device device = find_device("h200");
  device.shared_per_block = kib * 1024;
  return device;
}
Shape only_shape(const std::string& line, const Device& device = find_device("h200")) {
  const Problem p = parse(line).problem;
  const std::vector<Job> jobs = jobs_of(p, device);
  EXPECT_EQ(jobs.size(), 1u) << line;
  return shape_of(p, device, jobs.front()).value();
}
const Code& step_code(const core::Step& step) {
  return static_cast<const Loaded*>(step.launch.code)->code();
}
std::string names_of(const Plan& plan) {
  std::string names;
  for (const core::Step& step : plan.steps) names += (names.empty() ? "" : " ") + step.name;
  return names;
}

constexpr const char* dtypes[] = {"f32", "f32 allow_tf32", "bf16", "f16"};
constexpr const char* all_gradients = "bias=b,h,q,k alibi sink";

// --------------------------------------------------------------------------------------------------------- one shape

TEST(GeneralShape, FitsTheDeviceOrIsRefusedWithItsBytes) {
  std::vector<std::string> lines;
  for (const char* dtype : dtypes)
    for (const char* dims : {"1", "8", "64", "80", "128", "192/128", "256", "576/512"})
      for (const int len_q : {1, 300}) {
        const std::string sizes = fmt::format("{} b2 h8/2 q{} d{}", dtype, len_q, dims);
        for (const char* options : {"k300", "k9000 out=f32 softcap=3"})
          lines.push_back("forward " + sizes + " " + options);
        for (const char* options : {"", "out=f32"})
          lines.push_back(fmt::format("backward {} k300 {} {}", sizes, all_gradients, options));
      }
  std::set<std::pair<Task, int64_t>> refused;
  for (const int kib : {48, 64, 99, 163, 227})
    for (const std::string& line : lines) {
      const Device device = with_shared(kib);
      const Problem p = parse(line).problem;
      std::string words;
      for (const Job& job : jobs_of(p, device)) {
        int64_t least = 0;
        if (const std::optional<Shape> s = shape_of(p, device, job, &least)) {
          EXPECT_LE(s->shared_bytes, device.shared_per_block) << line;
          EXPECT_EQ(s->spec.task, job.task) << line;
          continue;
        }
        EXPECT_EQ(kib, 48) << line;
        EXPECT_TRUE(job.product == Product::f32 || job.product == Product::tf32) << line;
        refused.insert({job.task, p.dim});
        if (words.empty())
          words = fmt::format(
              "cuda.general: a block needs {} bytes of shared memory for dims {} and {}, device h200 has {}", least,
              p.dim, p.dim_v, device.shared_per_block);
      }
      const core::Refusal got = refusal([&] { plan_of(line, device, general); });
      if (words.empty()) EXPECT_EQ(got.message, "");
      else expect_says(got, TESSERA_UNSUPPORTED, words);
    }
  // Wide gradients in float32, and those of 48 KiB alone.
  EXPECT_EQ(refused, (std::set<std::pair<Task, int64_t>>{{Task::keys, 576}, {Task::queries, 576}, {Task::bias, 576}}));
}

// A header of 896 bytes, 64 for each query at hand, then rows of panels of 128 bytes; each warp's scratch is 16 rows.
TEST(GeneralShape, BytesByHand) {
  constexpr int rows = 64, scratch_64 = 16 * (64 + 8) * 4, scratch_32 = 16 * (32 + 8) * 4;
  constexpr int forward = 896 + rows * 64 + (rows * 2 + 64 * 2 + 64 * 2) * 128;  // q; k and v, of 128 columns
  EXPECT_EQ(only_shape("forward bf16 q300 k300 d128").shared_bytes, forward);
  EXPECT_EQ(only_shape("forward bf16 q300 k300 d128 alibi").shared_bytes, forward + 4 * scratch_64);
  EXPECT_EQ(only_shape("forward bf16 q300 k5000 d128 out=f32").shared_bytes, forward + rows * 128 * 4);
  constexpr int keys = 896 + 32 * 64 + (rows * 2 + 32 * 2) * 128;  // k and v of the block; q and dO of 32 queries
  EXPECT_EQ(only_shape("backward bf16 q300 k300 d64 grads=dk,dv").shared_bytes, keys + 4 * 2 * scratch_32);
}

TEST(GeneralShape, WhatShipsIsWhatIsChosen) {
  std::set<std::string> chosen, shipped;
  for (const int kib : {48, 227})
    for (const char* dtype : dtypes)
      for (const char* dims : {"64", "128", "480", "640", "1056"})
        for (const char* line : {"forward {} q300 k300 d{}", "backward {} q300 k300 d{} bias=1,h,q,k"}) {
          const Problem p = parse(fmt::format(fmt::runtime(line), dtype, dims)).problem;
          const Device device = with_shared(kib);
          for (const Job& job : jobs_of(p, device))
            if (const std::optional<Shape> s = shape_of(p, device, job)) chosen.insert(code_of(s->spec).text);
        }
  for (const GeneralSpec& spec : shipped_general())
    if (spec.product != Product::any) shipped.insert(code_of(spec).text);
  EXPECT_EQ(chosen, shipped);
}

// How many columns and keys a step has decides a row's bits, so dims and device alone choose them.
TEST(GeneralShape, TheSpecDoesNotDependOnTheQueriesOrTheBatch) {
  for (const char* dtype : dtypes)
    for (const char* dims : {"8", "64", "80", "128", "192/128", "256", "576/512", "1000"})
      for (const char* line :
           {"forward {} h8/2 k300 d{} batch_invariant softcap=3", "backward {} h8/2 k300 d{} batch_invariant"})
        for (int kib = 40; kib <= 228; ++kib) {
          const Device device = with_shared(kib);
          Problem p = parse(fmt::format(fmt::runtime(line), dtype, dims)).problem;
          std::set<std::string> chosen;
          for (const int64_t batch : {1, 70000})
            for (const int64_t len_q : {1, 2, 9, 16, 17, 40, 63, 64, 5000}) {
              p.batch = batch;
              p.len_q = len_q;
              std::string texts;
              for (const Job& job : jobs_of(p, device)) {
                const std::optional<Shape> s = shape_of(p, device, job);
                texts += s ? code_of(s->spec).text + "; " : "none; ";
              }
              chosen.insert(texts);
            }
          EXPECT_EQ(chosen.size(), 1u) << core::print(p) << " of " << kib << " KiB: " << testing::PrintToString(chosen);
        }
}

// len_k is the longest sequence's, and another sequence's rows must not show it.
TEST(GeneralShape, BatchInvariantSumsDoNotDependOnTheLongestSequence) {
  const auto flushes = [](const char* outputs, int len_k) {
    return only_shape(fmt::format("forward {} b2 q8 k{} d128 batch_invariant", outputs, len_k)).cut.flushes;
  };
  EXPECT_EQ(flushes("bf16 out=f32", 4000), flushes("bf16 out=f32", 5000));
  EXPECT_EQ(flushes("f16", 4000), flushes("f16", 200000));
}

// ------------------------------------------------------------------------------------------------------ splits of keys

TEST(GeneralPlan, FewRowsSplitTheKeysUnlessTheBatchMustNotShow) {
  const std::string decode = "decode bf16 h8/2 k8192 d128";
  const Plan split = plan_of(decode);
  EXPECT_EQ(names_of(split), "attend combine");
  EXPECT_EQ(split.steps[0].launch.blocks, 2 * 32);  // KV heads; splits of 256 keys
  EXPECT_EQ(split.workspace_bytes, 8 * 32 * (128 + 2) * 4);
  const Plan whole = plan_of(decode + " batch_invariant");
  EXPECT_EQ(names_of(whole), "attend");
  EXPECT_EQ(whole.steps[0].launch.blocks, 2);
  EXPECT_EQ(whole.workspace_bytes, 0);
  EXPECT_EQ(names_of(plan_of("decode bf16 b66 h8/2 k8192 d128")), "attend");  // a block for each multiprocessor
  EXPECT_EQ(names_of(plan_of("decode bf16 h8/2 k256 d128")), "attend");
  EXPECT_EQ(names_of(plan_of("decode bf16 h8/2 k257 d128")), "attend combine");
}

TEST(GeneralPlan, SplitsFitTheWorkspaceLimit) {
  const char* const decode = "decode bf16 k8192 d64";
  Hints hints = {};
  hints.has_workspace_limit = 1;
  int64_t last = 0;
  for (hints.workspace_limit = 0; hints.workspace_limit <= 9000; hints.workspace_limit += 40) {
    const core::Refusal got = refusal([&] {
      const Plan plan = plan_of(decode, "h200", hints);
      EXPECT_GE(plan.workspace_bytes, last);
      last = plan.workspace_bytes;
    });
    ASSERT_EQ(got.message, "") << "fewer splits need less";
  }
  EXPECT_EQ(last, plan_of(decode).workspace_bytes) << "with more than enough, all splits";
  EXPECT_GT(last, 0);
}

// --------------------------------------------------------------------------------------------------------------- grids

TEST(GeneralPlan, GridsOfMoreBlocksThanALaunchHas) {
  constexpr struct {
    const char* line;
    int64_t items;
  } rows[] = {
      {"forward f32 b70000 h2 d64", 140'000},
      {"forward f32 h70000 d64", 70'000},
      {"forward f32 b70000 h70000 d64", 4'900'000'000},
      {"forward f32 b70000 h70000/35000 q3 k3 d64/320", 3 * 2'450'000'000},  // two heads share a tile; three slices
      {"backward f32 b70000 h70000/7000 d64 grads=dk", 490'000'000},
      {"backward f32 b70000 h70000 q100 k100 d64 grads=dv", 2 * 4'900'000'000},
      {"backward f32 b70000 h70000 q100 k100 d64 grads=dq", 2 * 4'900'000'000},
      {"backward f32 b70000 h70000 q2 k2 d64 bias=b,h,q,k grads=dbias", 4'900'000'000},
      {"backward f32 b70000 h70000 q100 k100 d64 bias=1,h,q,1 grads=dbias", 2 * 70'000},
      {"backward f32 b70000 h70000 q100 k100 d64 bias=b,1,1,k grads=dbias", 4 * 70'000},
  };
  for (const auto& [line, items] : rows) {
    EXPECT_EQ(only_shape(line).cut.items, items) << line;
    const Plan plan = plan_of(line, "h200", general);
    int64_t most = 0;
    for (const core::Step& step : plan.steps) {
      EXPECT_GE(step.launch.blocks, 1) << line << ": " << step.name;
      if (step_code(step).shared_bytes == any_shared) most = step.launch.blocks;
      else EXPECT_LE(step.launch.blocks, 16 * 132) << line << ": " << step.name;
    }
    EXPECT_EQ(most, std::min(items, most_blocks)) << line;
  }
}

// --------------------------------------------------------------------------------------------------------------- steps

TEST(GeneralPlan, StepsByName) {
  constexpr struct {
    const char *line, *names;
  } rows[] = {
      {"forward f32 b8 h16 q300 k300 d64", "attend"},
      {"forward f32 k300 d64", "attend combine"},
      {"decode bf16 k8192 d64", "attend combine"},
      {"decode bf16 k100 d64 append", "append attend"},
      {"append bf16 k100 n2 d64", "append"},
      {"forward f32 b2 d64 varlen=q[3,0]k[4,1]", "attend clear"},
      {"forward f32 d64 varlen=q[3,5]k[400,600]", "attend combine clear"},
      {"backward f32 q4 k5 d64", "terms keys queries"},
      {"backward f32 q4 k5 d64 grads=dv", "terms keys"},
      {"backward f32 q4 k5 d64 grads=dq", "terms queries"},
      {"backward f32 q4 k5 d64 sink grads=dsinks", "terms reduce"},
      {"backward f32 q4 k5 d64 alibi grads=dslopes", "terms queries reduce"},
      {"backward bf16 b2 h4/2 q4 k5 d64 bias=b,h,q,k alibi sink", "terms keys queries queries bias reduce"},
      {"backward f32 d64 varlen=q[3,0]k[4,1]", "terms keys queries clear"},
  };
  std::set<std::string> shipped_texts;
  for (const Code& code : shipped()) shipped_texts.insert(code.text);
  for (const auto& [line, names] : rows) {
    const Plan plan = plan_of(line, "h200", general);
    EXPECT_EQ(names_of(plan), names) << line;
    for (const core::Step& step : plan.steps) {
      EXPECT_TRUE(shipped_texts.contains(step_code(step).text)) << step_code(step).text;
      EXPECT_EQ(step.launch.threads % 32, 0) << line;
      EXPECT_LE(step.launch.threads, step_code(step).threads) << line;
    }
  }
}

// dSlopes and few dBias sum what cancels: float32, whatever the operands are.
TEST(GeneralPlan, ProductsOfGradients) {
  const auto products = [](const std::string& line) {
    std::vector<Product> all;
    for (const Job& job : jobs_of(parse(line).problem, find_device("h200"))) all.push_back(job.product);
    return all;
  };
  constexpr auto bf16 = Product::bf16, f32 = Product::f32;
  using Products = std::vector<Product>;
  const std::string line = "backward bf16 h2 q100 k100 d64 alibi bias=";
  EXPECT_EQ(products(line + "1,h,q,k"), (Products{bf16, bf16, f32, bf16}));
  EXPECT_EQ(products(line + "1,h,1,k"), (Products{bf16, bf16, f32, f32}));
  EXPECT_EQ(products(line + "1,h,q,k out=f32"), (Products{f32, f32, f32, f32}));
}

// ------------------------------------------------------------------------------------------------------------ refusals

TEST(GeneralPlan, WhatIsRefused) {
  const auto says = [](const char* line, const Device& device, const char* words) {
    expect_says(refusal([&] { plan_of(line, device); }), TESSERA_UNSUPPORTED,
                fmt::format("\n  cuda.general: {}", words));
  };
  const Device t4 = find_device("t4");
  for (const char* line : {"forward f64 d64", "backward f64 d64", "decode f64 d64", "append f64 k4 n1 d64"})
    says(line, find_device("h200"), "float64 is computed on processors only");
  for (const char* line : {"forward bf16 d64", "backward bf16 d64", "decode bf16 d64 append"})
    says(line, t4, "q is bf16 and device t4 is sm_75; its tensor cores take f16");
  says("forward f32 d64", find_device("avx2"), "device avx2 is a processor, the kernels run on NVIDIA GPUs");
  Device old = t4;
  old.sm_arch = 70;
  says("forward f32 d64", old, "device t4 is sm_70; the kernels' instructions begin with sm_75");
  says("forward f32 b2000000000 d64", find_device("h200"), "a size is over 1073741824");
  says("forward f32 q2000000000 d64", find_device("h200"), "a sequence is longer than 1073741824");
}

TEST(GeneralPlan, TheOldestChipAnswersWithCodeThatItHas) {
  for (const char* line :
       {"forward f16 q300 k300 d128", "forward f32 q300 k300 d128 allow_tf32", "decode f16 k5000 d64 append",
        "append bf16 k100 n2 d64", "backward f16 q30 k30 d64 bias=1,h,q,k alibi sink",
        "backward f32 q30 k30 d576/512 allow_tf32"})
    for (const core::Step& step : plan_of(line, "t4").steps)
      EXPECT_LE(step_code(step).least_arch, 75) << line << ": " << step_code(step).text;
}

// ---------------------------------------------------------------------------------------------------------------- runs

// Is [pointer, + bytes) in the workspace, and nobody else's? It then is the next one's.
struct Workspace {
  const std::byte* next;
  const std::byte* end;
  explicit Workspace(const tessera_bindings& b)
      : next(static_cast<const std::byte*>(b.workspace)), end(next + b.workspace_bytes) {}
  void expect(const float* pointer, int64_t numbers) {
    const auto* const begin = reinterpret_cast<const std::byte*>(pointer);
    EXPECT_GE(begin, next);
    next = begin + numbers * 4;
    EXPECT_LE(next, end);
  }
};

// Every step of the plan in order, each of the kernel that it names and as the plan says.
void expect_launches(const std::vector<FakeLaunch>& launches, const Plan& plan, Stream stream) {
  ASSERT_EQ(launches.size(), plan.steps.size());
  for (size_t n = 0; n < launches.size(); ++n) {
    const FakeLaunch& launch = launches[n];
    const core::Step& step = plan.steps[n];
    EXPECT_STREQ(launch.entry, "tessera_general");
    EXPECT_EQ(launch.image, step_code(step).text + " sm_90");
    EXPECT_EQ(launch.grid[0], step.launch.blocks) << step.name;
    EXPECT_EQ(launch.grid[1] * launch.grid[2], 1u);
    EXPECT_EQ(launch.block[0], step.launch.threads) << step.name;
    EXPECT_EQ(launch.shared_bytes, step.launch.shared_bytes) << step.name;
    EXPECT_EQ(launch.stream, stream) << step.name;
  }
}

TEST(GeneralRun, BackwardInOrder) {
  test::with_driver([] {
    const std::string line = fmt::format("backward bf16 b2 h4/2 q300 k200 d64 dlse status {}", all_gradients);
    const test::Case c(line.c_str(), "cuda", 0, &general);
    auto* const stream = reinterpret_cast<Stream>(0x1234);
    const std::vector<FakeLaunch> launches = c.launches(stream);
    expect_launches(launches, plan_of(line, "h200", general), stream);
    for (size_t n = 0; n < launches.size(); ++n) {
      const rules::GeneralParams& p = launches[n].general;
      EXPECT_EQ(p.sums_slopes, n == 3);
      for (const auto& [view, name] :
           {std::pair(&p.q, TESSERA_Q), std::pair(&p.dout, TESSERA_DOUT), std::pair(&p.dlse, TESSERA_DLSE),
            std::pair(&p.dk, TESSERA_DK), std::pair(&p.dbias, TESSERA_DBIAS), std::pair(&p.dsinks, TESSERA_DSINKS)})
        EXPECT_TRUE(view->present() && view->data == c.bindings.data[name]) << name;
      EXPECT_EQ(p.status, c.bindings.data[TESSERA_STATUS]);
      EXPECT_FALSE(p.k_new.present() || p.keep.present());
      EXPECT_EQ(p.partials, nullptr);
      Workspace workspace(c.bindings);
      for (const float* const kept : {p.row_lse, p.row_term, p.row_slope}) workspace.expect(kept, 2 * 4 * 300);
    }
  });
}

TEST(GeneralRun, SplitsOfADecode) {
  test::with_driver([] {
    const char* const line = "decode bf16 h8/2 k8192 d128 append";
    const test::Case c(line);
    const std::vector<FakeLaunch> launches = c.launches();
    expect_launches(launches, plan_of(line), nullptr);
    ASSERT_EQ(launches.size(), 3u);
    EXPECT_EQ(launches[0].general.k_new.data, c.bindings.data[TESSERA_K_NEW]);
    EXPECT_EQ(launches[1].general.items, 2 * 32);
    for (const size_t n : {size_t{1}, size_t{2}}) {
      EXPECT_EQ(launches[n].general.splits, 32);
      Workspace(c.bindings).expect(launches[n].general.partials, 8 * 32 * (128 + 2));
    }
  });
}

TEST(GeneralRun, TheOldestChipsImagesAreItsOwn) {
  test::with_driver({{"FAKE_CUDA_DEVICE", "Tesla T4:75:40:65536"}}, [] {
    for (const FakeLaunch& launch : test::Case("backward f16 q300 k300 d128").launches())
      EXPECT_TRUE(std::string(launch.image).ends_with(" sm_75")) << launch.image;
  });
}

TEST(GeneralRun, WhatIsEmptyLaunchesNothing) {
  test::with_driver([] {
    for (const char* line : {"forward f32 b0 q3 k3 d64", "forward f32 q0 k3 d64", "backward f32 b0 q3 k3 d64"})
      EXPECT_TRUE(test::Case(line).launches().empty()) << line;
    // Queries that are none: dk and dv are zeros, and someone writes them.
    EXPECT_FALSE(test::Case("backward f32 q0 k3 d64").launches().empty());
  });
}

}  // namespace
}  // namespace tessera::cuda
