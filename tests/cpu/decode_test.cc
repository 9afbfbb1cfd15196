// What serving relies on: a step equals the last row of the full run, identical requests get identical bits however
// they are batched, split and stored, and a cascade equals the concatenated computation.
#include <cstring>

#include "engine.h"
#include "tools/tessera/number.h"

namespace tessera::test {
namespace {

using tools::Case;
using tools::Index;
using tools::Line;

// Copies rows [from, from + count) of an operand to rows of another case's, token by token, all heads.
void copy_tokens(const Case& from, int from_name, int64_t from_batch, int64_t first, Case& to, int to_name,
                 int64_t to_batch, int64_t to_first, int64_t count) {
  const tessera_operand& o = from.operand(from_name);
  for (int64_t n = 0; n < count; ++n)
    for (int64_t h = 0; h < o.extent[2]; ++h)
      for (int64_t d = 0; d < o.extent[3]; ++d)
        std::memcpy(to.at(to_name, {to_batch, to_first + n, h, d}), from.at(from_name, {from_batch, first + n, h, d}),
                    tessera_dtype_bytes(o.dtype));
}

void expect_same_rows(const Case& a, int64_t a_batch, int64_t a_row, const Case& b, int64_t b_batch, int64_t b_row,
                      const std::string& what) {
  for (const int name : {TESSERA_OUT, TESSERA_LSE}) {
    const tessera_operand& o = a.operand(name);
    for (int64_t h = 0; h < o.extent[2]; ++h)
      for (int64_t d = 0; d < o.extent[3]; ++d)
        ASSERT_EQ(std::memcmp(a.at(name, {a_batch, a_row, h, d}), b.at(name, {b_batch, b_row, h, d}),
                              tessera_dtype_bytes(o.dtype)),
                  0)
            << what << " head " << h << " dim " << d;
  }
}

// Every way to take the last tokens of a sequence gives the bits of the full run: any chunking of the queries, any
// page size, one thread or several.
TEST(Decode, StepsAreTheLastRowsOfTheFullRun) {
  for (const std::string& kernel : kernels())
    for (const char* dtype : {"f32", "bf16", "f64"})
      for (const char* options : {"mask=causal", "mask=causal&window(600,0) sink softcap=20", "mask=causal alibi"}) {
        if (kernel == "cpu.avx512bf16" && std::string(dtype) != "bf16") continue;
        constexpr int64_t keys = 1200;
        const std::string shape = fmt::format("{} h6/2 d24 batch_invariant {}", dtype, options);
        Case full = make_case(fmt::format("forward {} q{} k{}", shape, keys, keys), 3, false);
        run_all(full, {kernel, 2});
        for (const int64_t fresh : {1, 3, 17})
          for (const char* cache : {"", " page=16", " page=7 slots=1300"})
            for (const int threads : {1, 3}) {
              const std::string line =
                  fmt::format("decode {} q{} k{} append cache_lens=[{}]{}", shape, fresh, keys, keys - fresh, cache);
              SCOPED_TRACE(fmt::format("{} on {} threads {}", line, kernel, threads));
              Case step = make_case(line, 3, false);
              const int64_t old = keys - fresh;
              const tools::CacheRow row = tools::cache_row(step, 0);
              for (int64_t j = 0; j < old; ++j) {
                const tools::Place place = tools::place_of(step, row, j);
                copy_tokens(full, TESSERA_K, 0, j, step, TESSERA_K, place.plane, place.row, 1);
                copy_tokens(full, TESSERA_V, 0, j, step, TESSERA_V, place.plane, place.row, 1);
              }
              copy_tokens(full, TESSERA_K, 0, old, step, TESSERA_K_NEW, 0, 0, fresh);
              copy_tokens(full, TESSERA_V, 0, old, step, TESSERA_V_NEW, 0, 0, fresh);
              copy_tokens(full, TESSERA_Q, 0, old, step, TESSERA_Q, 0, 0, fresh);
              if (step.has(TESSERA_SINKS))
                std::memcpy(step.at(TESSERA_SINKS, {0, 0, 0, 0}), full.at(TESSERA_SINKS, {0, 0, 0, 0}),
                            full.span(TESSERA_SINKS));
              run_all(step, {kernel, threads});
              for (int64_t i = 0; i < fresh; ++i) expect_same_rows(step, 0, i, full, 0, old + i, "row");
              if (HasFatalFailure()) return;
            }
      }
}

// One request, alone and among others, split by chunks or not: the same bits.
TEST(Decode, IdenticalRequestsGiveIdenticalBits) {
  for (const std::string& kernel : kernels()) {
    if (kernel == "cpu.avx512bf16") continue;
    const std::string shape = "decode f32 h8/2 d40 q2 k3000 append page=16 mask=causal";
    Case crowd = make_case(shape + " b5 cache_lens=[2998,17,2998,900,2998]", 7, false);
    const auto copy_request = [&](int64_t from, Case& to, int64_t to_batch) {
      const tools::CacheRow a = tools::cache_row(crowd, from), b = tools::cache_row(to, to_batch);
      for (int64_t j = 0; j < a.old_keys; ++j) {
        const tools::Place x = tools::place_of(crowd, a, j), y = tools::place_of(to, b, j);
        for (const int name : {TESSERA_K, TESSERA_V})
          copy_tokens(crowd, name, x.plane, x.row, to, name, y.plane, y.row, 1);
      }
      for (const int name : {TESSERA_Q, TESSERA_K_NEW, TESSERA_V_NEW})
        copy_tokens(crowd, name, from, 0, to, name, to_batch, 0, 2);
    };
    copy_request(0, crowd, 2);
    copy_request(0, crowd, 4);
    run_all(crowd, {kernel, 4});
    Case alone = make_case(shape + " b1 cache_lens=[2998]", 8, false);
    copy_request(0, alone, 0);
    for (const int threads : {1, 4}) {
      run_all(alone, {kernel, threads});
      for (const int64_t b : {0, 2, 4})
        for (int64_t i = 0; i < 2; ++i) expect_same_rows(crowd, b, i, alone, 0, i, kernel);
      if (HasFatalFailure()) return;
    }
  }
}

// ------------------------------------------------------------------------------------------------------- cascades

struct Level {
  Case c;
  Level(const std::string& line, uint64_t seed) : c(make_case(line, seed, false)) {}
};

// Levels of 1, 2 and 4 sequences over the same 4 requests, against each request's keys side by side.
TEST(Cascade, EqualsTheConcatenatedComputation) {
  for (const char* dtype : {"f32", "bf16", "f16", "f64"})
    for (const int threads : {1, 3}) {
      const std::string shape = fmt::format("{} h6/2 d24", dtype);
      // All rows share 700 keys; the first two rows 90, the others 0; then each its own.
      Level all(fmt::format("forward {} varlen=q[8] k700 b1", shape), 1);
      Level pairs(fmt::format("forward {} varlen=q[4,4]k[90,0]", shape), 2);
      Level own(fmt::format("decode {} q2 k40 b4 cache_lens=[30,1,38,0] append page=8 mask=causal sink", shape), 3);
      Case whole =
          make_case(fmt::format("forward {} q2 b4 k900 seqused=k[822,793,740,702] mask=causal sink", shape), 4, false);
      // The same q and sinks everywhere.
      for (int64_t b = 0; b < 4; ++b) {
        copy_tokens(own.c, TESSERA_Q, b, 0, whole, TESSERA_Q, b, 0, 2);
        copy_tokens(own.c, TESSERA_Q, b, 0, all.c, TESSERA_Q, 0, 2 * b, 2);
        copy_tokens(own.c, TESSERA_Q, b, 0, pairs.c, TESSERA_Q, 0, 2 * b, 2);
        int64_t end = 0;
        const auto put = [&](const Case& from, int k, int v, int64_t plane, int64_t row, int64_t count) {
          copy_tokens(from, k, plane, row, whole, TESSERA_K, b, end, count);
          copy_tokens(from, v, plane, row, whole, TESSERA_V, b, end, count);
          end += count;
        };
        put(all.c, TESSERA_K, TESSERA_V, 0, 0, 700);
        if (b < 2) put(pairs.c, TESSERA_K, TESSERA_V, 0, 0, 90);
        const tools::CacheRow row = tools::cache_row(own.c, b);
        for (int64_t j = 0; j < row.old_keys; ++j) {
          const tools::Place place = tools::place_of(own.c, row, j);
          put(own.c, TESSERA_K, TESSERA_V, place.plane, place.row, 1);
        }
        put(own.c, TESSERA_K_NEW, TESSERA_V_NEW, b, 0, 2);
        ASSERT_EQ(end, whole.value(TESSERA_SEQUSED_K, b));
      }
      std::memcpy(whole.at(TESSERA_SINKS, {0, 0, 0, 0}), own.c.at(TESSERA_SINKS, {0, 0, 0, 0}),
                  own.c.span(TESSERA_SINKS));

      const tessera_problem* problems[] = {&all.c.problem(), &pairs.c.problem(), &own.c.problem()};
      tessera_plan* plan = nullptr;
      tessera_error error = tools::fresh_error();
      const tessera_device host = tools::find_device("host");
      tessera_hints hints;
      tessera_hints_init(&hints);
      hints.threads = threads;
      ASSERT_EQ(tessera_cascade_make(problems, 3, &host, &hints, &plan, &error), TESSERA_OK) << error.message;
      tessera_plan_facts facts{};
      facts.size = sizeof facts;
      ASSERT_EQ(tessera_plan_get(plan, &facts, &error), TESSERA_OK);
      const tools::Buffer workspace = tools::allocate(static_cast<size_t>(facts.workspace_bytes), 64);
      std::memset(workspace.memory.get(), 0xFF, workspace.bytes);
      tessera_bindings last = own.c.bindings();
      last.workspace = workspace.memory.get();
      last.workspace_bytes = facts.workspace_bytes;
      const tessera_bindings* bound[] = {&all.c.bindings(), &pairs.c.bindings(), &last};
      EXPECT_EQ(tessera_run(plan, &last, nullptr, &error), TESSERA_INVALID) << "a cascade is no single run";
      ASSERT_EQ(tessera_cascade_run(plan, bound, nullptr, &error), TESSERA_OK) << error.message;
      tessera_plan_free(plan);

      for (const int name : {TESSERA_OUT, TESSERA_LSE})
        for (int64_t b = 0; b < 4; ++b) copy_tokens(own.c, name, b, 0, whole, name, b, 0, 2);
      expect_right(whole, fmt::format("{} threads {}", dtype, threads));
    }
}

TEST(Cascade, RefusesWhatItWouldAnswerWrongly) {
  const auto says = [](const std::vector<std::string>& lines, const std::string& words, int code = TESSERA_INVALID) {
    std::vector<Line> parsed(lines.begin(), lines.end());
    std::vector<const tessera_problem*> problems;
    for (const Line& line : parsed) problems.push_back(&line.problem());
    tessera_plan* plan = nullptr;
    tessera_error error = tools::fresh_error();
    const tessera_device host = tools::find_device("host");
    EXPECT_EQ(
        tessera_cascade_make(problems.data(), static_cast<int32_t>(problems.size()), &host, nullptr, &plan, &error),
        code);
    EXPECT_NE(std::string(error.message).find(words), std::string::npos) << error.message << "\nwanted: " << words;
    tessera_plan_free(plan);
  };
  const std::string last = "decode f32 b4 h2 q1 k8 d8";
  const std::string shared = "forward f32 b1 h2 q4 k8 d8";
  says({shared, last}, "", TESSERA_OK);
  says({}, "count is 0; a cascade has 1 to 16 levels");
  says({shared + " mask=causal", last}, "level 0: its 1 sequences hold the rows of 4 requests");
  says({shared + " alibi", last}, "whose positions causal, window, chunk, prefix and slopes cannot tell apart");
  says({"forward f32 b4 h2 q1 k8 d8 mask=window(2,0)@at(9)", last}, "", TESSERA_OK);
  says({"forward f32 b1 h2 q5 k8 d8", last}, "level 0: batch * len_q, or rows_q, is 5 and the last level's is 4");
  says({"forward bf16 b1 h2 q4 k8 d8", last}, "level 0: q's dtype is bf16 and the last level's is f32");
  says({"forward f32 b1 h2 q4 k8 d8/4", last}, "level 0: dim_v is 4");
  says({"forward f32 b1 h1 q4 k8 d8", last}, "level 0: heads_q is 1");
  says({shared + " scale=0.5", last}, "level 0: has_scale is 1");
  says({shared + " softcap=5", last}, "level 0: softcap is 5");
  says({shared + " dropout=0.1", last}, "level 0: dropout is 0.1");
  says({shared + " max", last}, "level 0: max_score is given");
  says({shared, last + " append rotary=4"}, "level 1: rotary_dim is 4");
  says({"decode f32 b1 h2 q4 k8 d8 append", last}, "level 0: k_new is given; only the last level appends");
  says({shared + " sink", last + " sink"}, "2 levels have sinks; a sink belongs to exactly one part");
  says({"backward f32 b1 h2 q4 k8 d8", last}, "level 0: its pass is not forward");
}

}  // namespace
}  // namespace tessera::test
