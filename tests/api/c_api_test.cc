// The C interface: sizes, NULLs, messages and codes; answers are judged elsewhere.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"

namespace tessera::test {
namespace {

// ---------------------------------------------------------------------------------------------------------- sizes

TEST(Sizes, InitSetsThem) {
  tessera_problem problem;
  tessera_hints hints;
  tessera_bindings bindings;
  tessera_merge merge;
  std::memset(static_cast<void*>(&problem), 0xFF, sizeof problem);
  tessera_problem_init(&problem);
  tessera_hints_init(&hints);
  tessera_bindings_init(&bindings);
  tessera_merge_init(&merge);
  EXPECT_EQ(problem.size, sizeof problem);
  EXPECT_EQ(problem.operand[47].stride[3], 0);
  EXPECT_EQ(hints.size, sizeof hints);
  EXPECT_EQ(bindings.size, sizeof bindings);
  EXPECT_EQ(merge.size, sizeof merge);
  tessera_problem_init(nullptr);  // nothing to do, nothing to crash on
}

TEST(Sizes, OfInputs) {
  const Line line = parse("forward d8");
  struct {
    tessera_problem problem;
    int64_t beyond[2];
  } newer = {*tessera_line_problem(line.get()), {0, 0}};
  const auto check = [&](tessera_error* e) { return tessera_check(&newer.problem, e); };
  expect_ok(check);
  for (const size_t bad :
       {size_t{0}, size_t{8}, sizeof(tessera_problem) - 4, sizeof(tessera_problem) + 1, SIZE_MAX, size_t{1} << 40}) {
    newer.problem.size = bad;
    expect_says(TESSERA_INVALID, "problem.size is " + std::to_string(bad) + "; it must be a multiple of 8 from", check);
  }
  // A newer caller that uses nothing new is understood; one that does is not.
  newer.problem.size = sizeof newer;
  expect_ok(check);
  newer.beyond[1] = 1;
  expect_says(TESSERA_INVALID,
              "problem.size is " + std::to_string(sizeof newer) + " and this library knows " +
                  std::to_string(sizeof(tessera_problem)),
              check);
  // An older caller knew fewer operands: those beyond its size are absent, whatever lies there.
  newer.beyond[1] = 0;
  newer.problem.size = offsetof(tessera_problem, operand) + sizeof(tessera_operand) * TESSERA_DQ;
  newer.problem.operand[TESSERA_DQ].dtype = 99;
  expect_ok(check);
}

TEST(Sizes, OfBindingsHintsAndDevice) {
  const Plan plan = make("forward d8");
  tessera_bindings b;
  tessera_bindings_init(&b);
  b.size = 16;
  expect_says(TESSERA_INVALID, "bindings.size is 16",
              [&](tessera_error* e) { return tessera_run(plan.get(), &b, nullptr, e); });
  const Line line = parse("forward d8");
  tessera_device device = find_device("host");
  tessera_hints hints = allowing(nullptr);
  tessera_plan* made = nullptr;
  const auto make_plan = [&](tessera_error* e) {
    made = reinterpret_cast<tessera_plan*>(1);
    const int32_t code = tessera_plan_make(tessera_line_problem(line.get()), &device, &hints, &made, e);
    EXPECT_EQ(made, nullptr) << "handles are NULL on failure";
    return code;
  };
  hints.size = 0;
  expect_says(TESSERA_INVALID, "hints.size is 0", make_plan);
  hints.size = sizeof hints;
  device.size = 8;
  expect_says(TESSERA_INVALID, "device.size is 8", make_plan);
  device.size = sizeof device;
  device.isa = 77;
  expect_says(TESSERA_INVALID, "device.isa is 77; it must be a tessera_isa (0 to 3)", make_plan);
  device.isa = 0;
  device.kind = 5;
  expect_says(TESSERA_INVALID, "device.kind is 5", make_plan);
  device.kind = TESSERA_CPU;
  device.threads = -1;
  expect_says(TESSERA_INVALID, "device.threads is -1", make_plan);
}

TEST(Sizes, OutputsAreWrittenAsFarAsTheCallerGoes) {
  const Plan plan = make("forward d8");
  tessera_plan_facts facts;
  std::memset(static_cast<void*>(&facts), 0x5A, sizeof facts);
  facts.size = offsetof(tessera_plan_facts, workspace_bytes);
  expect_ok([&](tessera_error* e) { return tessera_plan_get(plan.get(), &facts, e); });
  EXPECT_EQ(facts.size, offsetof(tessera_plan_facts, workspace_bytes));
  EXPECT_EQ(facts.reserved, 0);
  EXPECT_EQ(facts.workspace_bytes, 0x5A5A5A5A5A5A5A5A);
  facts.size = 3;
  expect_says(TESSERA_INVALID, "facts.size is 3",
              [&](tessera_error* e) { return tessera_plan_get(plan.get(), &facts, e); });

  tessera_device device;
  std::memset(static_cast<void*>(&device), 0x5A, sizeof device);
  device.size = offsetof(tessera_device, memory);
  expect_ok([&](tessera_error* e) { return tessera_device_find("h200", &device, e); });
  EXPECT_EQ(device.sms, 132);
  EXPECT_EQ(device.memory, 0x5A5A5A5A5A5A5A5A);
  device.size = 0;
  expect_says(TESSERA_INVALID, "device.size is 0",
              [&](tessera_error* e) { return tessera_device_find("h200", &device, e); });
}

TEST(Sizes, DeclaringBeyondTheCallersStructIsRefused) {
  tessera_problem p = *tessera_line_problem(parse("forward d8").get());
  p.size = offsetof(tessera_problem, operand) + sizeof(tessera_operand) * TESSERA_SINKS;
  expect_says(TESSERA_INVALID, "the operand lies beyond it",
              [&](tessera_error* e) { return tessera_declare(&p, TESSERA_SINKS, TESSERA_F32, 0, e); });
}

TEST(Errors, AreCutToTheCallersSize) {
  struct {
    tessera_error error;
    char guard[16];
  } e;
  const char* full = "the line is empty; it begins with forward, backward, decode or append.";
  for (size_t size = 0; size <= sizeof e; ++size) {
    std::memset(static_cast<void*>(&e), 0x5A, sizeof e);
    e.error.size = size;
    tessera_line* line = nullptr;
    EXPECT_EQ(tessera_line_parse("", &line, &e.error), TESSERA_INVALID);
    EXPECT_EQ(e.error.size, size);
    constexpr size_t begin = offsetof(tessera_error, message);
    EXPECT_EQ(e.error.code, size >= begin ? TESSERA_INVALID : 0x5A5A5A5A);
    const size_t end = std::min(size, sizeof(tessera_error));
    const size_t room = end > begin ? end - begin - 1 : 0;
    if (end > begin) {
      EXPECT_EQ(std::string(e.error.message), std::string(full).substr(0, room));
    }
    const auto* bytes = reinterpret_cast<const char*>(&e);
    for (size_t n = std::max(end, size_t{12}); n < sizeof e; ++n)
      ASSERT_EQ(bytes[n], 0x5A) << "byte " << n << " of size " << size;
  }
}

TEST(Errors, AreCutBetweenCharacters) {
  const std::string text = "forward d8 \xC3\xA9\xC3\xA9\xC3\xA9\xC3\xA9";
  tessera_line* line = nullptr;
  for (size_t room = 1; room <= 12; ++room) {
    tessera_error error = fresh_error();
    error.size = offsetof(tessera_error, message) + room;
    EXPECT_EQ(tessera_line_parse(text.c_str(), &line, &error), TESSERA_INVALID);
    const std::string message = error.message;  // a quote, then characters of two bytes
    EXPECT_EQ(std::count(message.begin(), message.end(), '\xC3'), std::count(message.begin(), message.end(), '\xA9'));
    EXPECT_GE(message.size() + 2, room);
  }
}

TEST(Errors, LongMessagesFit) {
  tessera_error error = fresh_error();
  tessera_line* line = nullptr;
  EXPECT_EQ(tessera_line_parse(("forward d8 " + std::string(1 << 20, 'x')).c_str(), &line, &error), TESSERA_INVALID);
  EXPECT_EQ(std::strlen(error.message), sizeof error.message - 1);
}

TEST(Errors, SuccessClearsThem) {
  tessera_error error = fresh_error();
  std::strcpy(error.message, "old");
  error.code = TESSERA_FAILED;
  tessera_line* line = nullptr;
  EXPECT_EQ(tessera_line_parse("forward d8", &line, &error), TESSERA_OK);
  EXPECT_EQ(error.code, TESSERA_OK);
  EXPECT_STREQ(error.message, "");
  tessera_line_free(line);
}

// ---------------------------------------------------------------------------------------------------------- NULLs

TEST(Nulls, AreRefusedInWords) {
  using E = tessera_error*;
  const Line line = parse("forward d8");
  const tessera_problem* problem = tessera_line_problem(line.get());
  const tessera_device device = find_device("host");
  const Plan plan = make("forward d8");
  tessera_plan* made = nullptr;
  tessera_line* parsed = nullptr;
  tessera_plan_facts facts = {};
  facts.size = sizeof facts;
  uint8_t grid[1];
  tessera_bindings b = bindings_of(line.get());
  const auto says = [](const std::string& what, auto call) {
    expect_says(TESSERA_INVALID, what + " is NULL; it must be given", call);
  };
  says("problem", [&](E e) { return tessera_check(nullptr, e); });
  says("problem", [&](E e) { return tessera_declare(nullptr, TESSERA_Q, TESSERA_F32, 0, e); });
  says("problem", [&](E e) { return tessera_declare_all(nullptr, TESSERA_F32, 0, e); });
  says("text", [&](E e) { return tessera_line_parse(nullptr, &parsed, e); });
  says("line", [&](E e) { return tessera_line_parse("forward d8", nullptr, e); });
  says("name", [&](E e) { return tessera_device_find(nullptr, nullptr, e); });
  says("device", [&](E e) { return tessera_device_find("host", nullptr, e); });
  says("plan", [&](E e) { return tessera_plan_make(problem, &device, nullptr, nullptr, e); });
  says("problem", [&](E e) { return tessera_plan_make(nullptr, &device, nullptr, &made, e); });
  says("device", [&](E e) { return tessera_plan_make(problem, nullptr, nullptr, &made, e); });
  says("plan", [&](E e) { return tessera_plan_get(nullptr, &facts, e); });
  says("facts", [&](E e) { return tessera_plan_get(plan.get(), nullptr, e); });
  says("plan", [&](E e) { return tessera_run(nullptr, &b, nullptr, e); });
  says("bindings", [&](E e) { return tessera_run(plan.get(), nullptr, nullptr, e); });
  says("problem", [&](E e) { return tessera_mask_grid(nullptr, &b, 0, 0, grid, e); });
  says("bindings", [&](E e) { return tessera_mask_grid(problem, nullptr, 0, 0, grid, e); });
  says("grid", [&](E e) { return tessera_mask_grid(problem, &b, 0, 0, nullptr, e); });
  says("grid", [&](E e) { return tessera_dropout_mask(0.1, 0, 0, 0, 0, 1, 1, 1, nullptr, e); });
  says("problem", [&](E e) { return tessera_verify(nullptr, &b, 0, nullptr, 0, nullptr, e); });
  says("bindings", [&](E e) { return tessera_verify(problem, nullptr, 0, nullptr, 0, nullptr, e); });
  says("merge", [&](E e) { return tessera_merge_run(nullptr, e); });

  tessera_line_free(nullptr);
  tessera_plan_free(nullptr);
  tessera_bindings_init(nullptr);
  tessera_hints_init(nullptr);
  tessera_merge_init(nullptr);
  EXPECT_EQ(tessera_line_problem(nullptr), nullptr);
  EXPECT_EQ(tessera_line_seed(nullptr), 0u);
  int64_t count = 5;
  EXPECT_EQ(tessera_line_values(nullptr, TESSERA_Q, &count), nullptr);
  EXPECT_EQ(count, 0);
  EXPECT_EQ(tessera_line_print(nullptr, nullptr, 0), 1u);
  EXPECT_EQ(tessera_problem_print(nullptr, nullptr, 0), 1u);
  EXPECT_EQ(tessera_plan_print(nullptr, nullptr, 0), 1u);
  EXPECT_EQ(tessera_plan_step(nullptr, 0), nullptr);
  EXPECT_EQ(tessera_plan_reason(nullptr, 0, nullptr), nullptr);
}

// --------------------------------------------------------------------------------------------------- names, texts

TEST(Texts, NamesAndTypes) {
  EXPECT_STREQ(tessera_name_text(TESSERA_Q), "q");
  EXPECT_STREQ(tessera_name_text(TESSERA_DSINKS), "dsinks");
  EXPECT_EQ(tessera_name_text(-1), nullptr);
  EXPECT_EQ(tessera_name_text(TESSERA_NAMES), nullptr);
  EXPECT_STREQ(tessera_dtype_text(TESSERA_ABSENT), "absent");
  EXPECT_STREQ(tessera_dtype_text(TESSERA_BF16), "bf16");
  EXPECT_EQ(tessera_dtype_text(8), nullptr);
  EXPECT_EQ(tessera_dtype_text(-1), nullptr);
  EXPECT_EQ(tessera_dtype_bytes(TESSERA_F64), 8u);
  EXPECT_EQ(tessera_dtype_bytes(TESSERA_BOOL), 1u);
  EXPECT_EQ(tessera_dtype_bytes(TESSERA_ABSENT), 0u);
  EXPECT_EQ(tessera_dtype_bytes(99), 0u);
  EXPECT_STREQ(tessera_device_known(0), "host");
  EXPECT_EQ(tessera_device_known(1000), nullptr);
}

TEST(Texts, PrintingIntoAnyCapacity) {
  const Line line = parse("forward q2 k3 d8 mask=causal");
  const std::string whole = "forward f32 b1 h1 q2 k3 d8 mask=causal@bottom_right";
  EXPECT_EQ(tessera_line_print(line.get(), nullptr, 0), whole.size() + 1);
  EXPECT_EQ(tessera_problem_print(tessera_line_problem(line.get()), nullptr, 0), whole.size() + 1);
  for (size_t capacity = 0; capacity < whole.size() + 3; ++capacity) {
    std::vector<char> buffer(capacity + 1, 'Z');
    EXPECT_EQ(tessera_line_print(line.get(), buffer.data(), capacity), whole.size() + 1);
    EXPECT_EQ(buffer[capacity], 'Z');
    if (capacity > 0) {
      EXPECT_EQ(std::string(buffer.data()), whole.substr(0, capacity - 1));
    }
  }
}

TEST(Texts, WhatIsNoProblemHasNoText) {
  tessera_problem p;
  tessera_problem_init(&p);
  char buffer[8] = "old";
  p.operand[TESSERA_Q].dtype = 1000000;
  EXPECT_EQ(tessera_problem_print(&p, buffer, sizeof buffer), 1u);
  EXPECT_STREQ(buffer, "");
}

TEST(Texts, VersionAndBuild) {
  EXPECT_EQ(std::string(tessera_version()), std::to_string(TESSERA_VERSION_MAJOR) + "." +
                                                std::to_string(TESSERA_VERSION_MINOR) + "." +
                                                std::to_string(TESSERA_VERSION_PATCH));
  const std::string info = tessera_build_info();
  for (const char* fact :
       {"compiler\t", "build\t", "OpenMP\t", "kernels\t", "cuda.portable", "reference.oracle", "gpu engine\t"})
    EXPECT_NE(info.find(fact), std::string::npos) << info;
}

TEST(Lines, ValuesAndSeed) {
  const Line line = parse("forward d8 varlen=q[3,0]k[1,1] dropout=0.5@seed77");
  int64_t count = 0;
  const int32_t* cu = tessera_line_values(line.get(), TESSERA_CU_SEQLENS_Q, &count);
  ASSERT_EQ(count, 3);
  EXPECT_EQ(cu[1], 3);
  EXPECT_EQ(tessera_line_values(line.get(), TESSERA_Q, &count), nullptr);
  EXPECT_EQ(count, 0);
  EXPECT_EQ(tessera_line_seed(line.get()), 77u);
}

// ------------------------------------------------------------------------------------------------------- declaring

TEST(Declare, RefusesWhatIsNoDeclaration) {
  using E = tessera_error*;
  tessera_problem p = *tessera_line_problem(parse("forward d8").get());
  const auto says = [](const char* what, auto call) { expect_says(TESSERA_INVALID, what, call); };
  says("name is 39; it must be a tessera_name (0 to 38)",
       [&](E e) { return tessera_declare(&p, TESSERA_NAMES, TESSERA_F32, 0, e); });
  says("name is -1", [&](E e) { return tessera_declare(&p, -1, TESSERA_F32, 0, e); });
  says("dtype is 0; it must be a tessera_dtype (1 to 7)", [&](E e) { return tessera_declare(&p, TESSERA_Q, 0, 0, e); });
  says("dtype is 9", [&](E e) { return tessera_declare_all(&p, 9, 0, e); });
  says("layout is 4; it must be a tessera_layout (0 to 3)",
       [&](E e) { return tessera_declare(&p, TESSERA_Q, TESSERA_F32, 4, e); });
  says("dtype is i32; that of q, k and v must be f64, f32, bf16 or f16",
       [&](E e) { return tessera_declare_all(&p, TESSERA_I32, 0, e); });
  tessera_problem empty;
  tessera_problem_init(&empty);
  says("heads are 0/0 and dims 0/0; extents are made of them",
       [&](E e) { return tessera_declare_all(&empty, TESSERA_F32, 0, e); });
  p.len_q = -4;
  says("a size of the problem is -4; sizes are from 0",
       [&](E e) { return tessera_declare_all(&p, TESSERA_F32, 0, e); });
  p.len_q = INT64_MAX;
  says("a size of the problem is 9223372036854775807", [&](E e) { return tessera_declare_all(&p, TESSERA_F32, 0, e); });
}

TEST(Declare, AllThatThePassNeeds) {
  tessera_problem p;
  tessera_problem_init(&p);
  p.pass = TESSERA_BACKWARD;
  p.batch = 2, p.heads_q = 4, p.heads_kv = 2, p.len_q = 3, p.len_k = 5, p.dim = 8, p.dim_v = 6;
  for (const int32_t layout : {TESSERA_BSHD, TESSERA_BHSD, TESSERA_QKV, TESSERA_KV}) {
    expect_ok([&](tessera_error* e) { return tessera_declare_all(&p, TESSERA_BF16, layout, e); });
    expect_ok([&](tessera_error* e) { return tessera_check(&p, e); });
    EXPECT_EQ(p.operand[TESSERA_LSE].dtype, TESSERA_F32);
    EXPECT_EQ(p.operand[TESSERA_DV].extent[3], 6);
    const int64_t row[] = {4 * 8, 8, 4 * 8 + 2 * 8 + 2 * 6, 4 * 8};  // q's step from token to token
    EXPECT_EQ(p.operand[TESSERA_Q].stride[1], row[layout]);
  }
}

// ------------------------------------------------------------------------------------------------------------ plans

TEST(Plans, FactsStepsAndReasons) {
  const Plan plan = make("forward q4 k4 d8");
  tessera_plan_facts facts = {};
  facts.size = sizeof facts;
  expect_ok([&](tessera_error* e) { return tessera_plan_get(plan.get(), &facts, e); });
  EXPECT_STREQ(facts.engine, "cpu");
  EXPECT_STREQ(facts.device, "host");
  EXPECT_EQ(std::string(facts.kernel).substr(0, 4), "cpu.");
  EXPECT_GE(facts.steps, 1);
  EXPECT_DOUBLE_EQ(facts.flops, 2.0 * 4 * 4 * 16);
  for (int32_t i = 0; i < facts.steps; ++i) EXPECT_NE(tessera_plan_step(plan.get(), i), nullptr);
  EXPECT_EQ(tessera_plan_step(plan.get(), facts.steps), nullptr);
  EXPECT_EQ(tessera_plan_step(plan.get(), -1), nullptr);
  bool oracle = false;
  for (int32_t i = 0; i < facts.reasons; ++i) {
    const char* why = nullptr;
    const char* kernel = tessera_plan_reason(plan.get(), i, &why);
    ASSERT_TRUE(kernel && why);
    EXPECT_STRNE(kernel, facts.kernel);
    EXPECT_STRNE(why, "");
    oracle |= std::string(kernel) == "reference.oracle" && std::string(why) == "never chosen unless named";
  }
  EXPECT_TRUE(oracle);
  const char* why = "old";
  EXPECT_EQ(tessera_plan_reason(plan.get(), facts.reasons, &why), nullptr);
  EXPECT_EQ(why, nullptr);
  std::vector<char> text(tessera_plan_print(plan.get(), nullptr, 0));
  tessera_plan_print(plan.get(), text.data(), text.size());
  EXPECT_NE(std::string(text.data()).find("forward f32 b1 h1 q4 k4 d8\n"), std::string::npos);
}

TEST(Plans, HintsDecide) {
  const tessera_hints oracle = allowing("reference.oracle");
  const Plan plan = make("forward q4 k4 d8", &oracle);
  tessera_plan_facts facts = {};
  facts.size = sizeof facts;
  expect_ok([&](tessera_error* e) { return tessera_plan_get(plan.get(), &facts, e); });
  EXPECT_STREQ(facts.kernel, "reference.oracle");
  const Line line = parse("forward d8");
  const tessera_device device = find_device("host");
  const tessera_hints none = allowing("nobody");
  tessera_plan* made = nullptr;
  expect_says(TESSERA_INVALID, "kernels is \"nobody\"; it must name some of", [&](tessera_error* e) {
    return tessera_plan_make(tessera_line_problem(line.get()), &device, &none, &made, e);
  });
}

// --------------------------------------------------------------------------------------------------------- running

// Small dense memory for a line's q, k, v, out and lse.
struct Small {
  alignas(64) float q[64] = {}, k[64] = {}, v[64] = {}, out[64] = {}, lse[64] = {};
  std::vector<std::byte> memory;
  tessera_bindings b;

  explicit Small(const tessera_plan* plan) {
    tessera_plan_facts facts = {};
    facts.size = sizeof facts;
    (void)tessera_plan_get(plan, &facts, nullptr);
    memory.resize(static_cast<size_t>(facts.workspace_bytes) + 64);
    tessera_bindings_init(&b);
    float* const places[] = {q, k, v};
    for (int name = 0; name < 3; ++name) b.data[name] = places[name];
    b.data[TESSERA_OUT] = out;
    b.data[TESSERA_LSE] = lse;
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    b.workspace = memory.data() + (64 - address % 64) % 64;
    b.workspace_bytes = facts.workspace_bytes;
  }
};

TEST(Run, AveragesWhatARowSees) {
  const Plan plan = make("forward q2 k5 d8 mask=causal");
  Small m(plan.get());
  for (int j = 0; j < 5; ++j)
    for (int d = 0; d < 8; ++d) m.v[8 * j + d] = static_cast<float>(j);
  expect_ok([&](tessera_error* e) { return tessera_run(plan.get(), &m.b, nullptr, e); });
  EXPECT_FLOAT_EQ(m.out[0], 1.5f);
  EXPECT_FLOAT_EQ(m.out[15], 2.0f);
  EXPECT_FLOAT_EQ(m.lse[0], std::log(4.0f));
  EXPECT_FLOAT_EQ(m.lse[1], std::log(5.0f));
}

TEST(Run, RefusesWhatIsNotBound) {
  const Plan plan = make("forward q2 k5 d8");
  Small m(plan.get());
  m.b.data[TESSERA_K] = nullptr;
  expect_says(TESSERA_INVALID, "k is bound to NULL",
              [&](tessera_error* e) { return tessera_run(plan.get(), &m.b, nullptr, e); });
  m.b.data[TESSERA_K] = m.k;
  expect_says(TESSERA_INVALID, "a plan for a CPU runs in the calling thread",
              [&](tessera_error* e) { return tessera_run(plan.get(), &m.b, m.k, e); });
}

TEST(Run, RefusesPlansForProcessorsThatAreNotHere) {
  const Line line = parse("forward q2 k5 d8");
  tessera_device device = find_device("host");
  const int32_t host = device.isa;
  for (int32_t isa = host; isa <= TESSERA_ISA_AVX512BF16; ++isa) {
    device.isa = isa;
    tessera_plan* plan = nullptr;
    expect_ok([&](tessera_error* e) {
      return tessera_plan_make(tessera_line_problem(line.get()), &device, nullptr, &plan, e);
    });
    const Plan owner(plan);
    Small m(plan);
    const auto run = [&](tessera_error* e) { return tessera_run(plan, &m.b, nullptr, e); };
    if (isa == host) expect_ok(run);
    else expect_says(TESSERA_INVALID, "; this processor has ", run);
  }
}

TEST(Run, OnePlanManyThreads) {
  const Plan plan = make("forward q2 k5 d8 mask=causal");
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int n = 0; n < 50; ++n) {
        Small m(plan.get());
        for (int j = 0; j < 5; ++j) m.v[8 * j] = static_cast<float>(j * (t + 1));
        tessera_error error = fresh_error();
        right += tessera_run(plan.get(), &m.b, nullptr, &error) == TESSERA_OK &&
                 std::abs(m.out[0] - 1.5f * static_cast<float>(t + 1)) < 1e-5f;
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(right, 200);
}

// ---------------------------------------------------------------------------------------------------------- verify

TEST(Verify, JudgesAndNamesWhatIsWrong) {
  const Line line = parse("forward q2 k5 d8 mask=causal");
  const Plan plan = make("forward q2 k5 d8 mask=causal");
  Small m(plan.get());
  for (int n = 0; n < 64; ++n) m.q[n] = m.k[n] = m.v[n] = static_cast<float>(n % 11) - 5;
  expect_ok([&](tessera_error* e) { return tessera_run(plan.get(), &m.b, nullptr, e); });
  const tessera_problem* p = tessera_line_problem(line.get());
  // An older caller's verdicts are shorter and lie closer together.
  constexpr size_t shorter = offsetof(tessera_verdict, naive_rms);
  alignas(8) char verdicts[2 * sizeof(tessera_verdict)];
  for (const size_t size : {sizeof(tessera_verdict), shorter}) {
    std::memset(verdicts, 0x5A, sizeof verdicts);
    std::memcpy(verdicts, &size, sizeof size);
    int32_t count = 0;
    expect_ok([&](tessera_error* e) {
      return tessera_verify(p, &m.b, 0, reinterpret_cast<tessera_verdict*>(verdicts), 2, &count, e);
    });
    ASSERT_EQ(count, 2);
    for (int i = 0; i < 2; ++i) {
      tessera_verdict v = {};
      std::memcpy(&v, verdicts + size * static_cast<size_t>(i), size);
      EXPECT_EQ(v.size, size);
      EXPECT_EQ(v.name, i == 0 ? TESSERA_OUT : TESSERA_LSE);
      EXPECT_EQ(v.ok, 1);
      EXPECT_EQ(v.elements, i == 0 ? 16 : 2);
    }
    for (size_t n = 2 * size; n < sizeof verdicts; ++n) EXPECT_EQ(verdicts[n], 0x5A);
  }
  m.out[3] += 1;
  expect_says(TESSERA_WRONG, "out: inf and nan in place, largest error",
              [&](tessera_error* e) { return tessera_verify(p, &m.b, 0, nullptr, 0, nullptr, e); });
  m.out[3] = NAN;
  expect_says(TESSERA_WRONG, "out: inf or nan out of place",
              [&](tessera_error* e) { return tessera_verify(p, &m.b, 0, nullptr, 0, nullptr, e); });
  expect_says(TESSERA_INVALID, "sample_pairs is -1",
              [&](tessera_error* e) { return tessera_verify(p, &m.b, -1, nullptr, 0, nullptr, e); });
  expect_says(TESSERA_INVALID, "capacity is -1",
              [&](tessera_error* e) { return tessera_verify(p, &m.b, 0, nullptr, -1, nullptr, e); });
  expect_says(TESSERA_INVALID, "verdicts[0] is NULL",
              [&](tessera_error* e) { return tessera_verify(p, &m.b, 0, nullptr, 1, nullptr, e); });
  m.b.data[TESSERA_LSE] = nullptr;
  expect_says(TESSERA_INVALID, "lse is bound to NULL",
              [&](tessera_error* e) { return tessera_verify(p, &m.b, 0, nullptr, 0, nullptr, e); });
}

// ------------------------------------------------------------------------------------------------------------ merge

TEST(Merge, TwoHalvesAndTheIdentity) {
  float out_a[] = {1, 2}, out_b[] = {3, 6}, out_none[] = {0, 0}, out[2];
  float lse_a = 0, lse_b = std::log(3.0f), lse_none = -INFINITY, lse;
  const void* outs[] = {out_a, out_none, out_b};
  const void* lses[] = {&lse_a, &lse_none, &lse_b};
  tessera_merge m;
  tessera_merge_init(&m);
  m.parts = 3, m.batch = m.len = m.heads = 1, m.dim = 2;
  m.out = m.part_out = {TESSERA_F32, 0, {1, 1, 1, 2}, {2, 2, 2, 1}};
  m.lse = m.part_lse = {TESSERA_F32, 0, {1, 1, 1, 1}, {1, 1, 1, 1}};
  m.part_out_data = outs, m.part_lse_data = lses;
  m.out_data = out, m.lse_data = &lse;
  expect_ok([&](tessera_error* e) { return tessera_merge_run(&m, e); });
  EXPECT_FLOAT_EQ(out[0], 2.5f);
  EXPECT_FLOAT_EQ(out[1], 5.0f);
  EXPECT_FLOAT_EQ(lse, std::log(4.0f));
  m.parts = 0;
  expect_says(TESSERA_INVALID, "parts is 0", [&](tessera_error* e) { return tessera_merge_run(&m, e); });
  m.size = 40;
  expect_says(TESSERA_INVALID, "merge.size is 40", [&](tessera_error* e) { return tessera_merge_run(&m, e); });
}

}  // namespace
}  // namespace tessera::test
