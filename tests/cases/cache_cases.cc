// KV caches: pages, appends, what is refused, rotation, shared prefixes.
#include <set>

#include "caches.h"

namespace tessera::test {
namespace {

// Any page size holds the same keys: the bits are those of a contiguous cache and of a plain tensor.
TEST(Cases, G01_PageSizes) {
  for (const int64_t page : {1, 2, 3, 8, 16, 17, 64, 128, 256})
    for (const int64_t keys : std::set<int64_t>{1, page - 1, page, page + 1, 257})
      for (const std::string& dtype : dtypes) {
        if (sanitized && dtype != dtypes[static_cast<size_t>(page) % dtypes.size()]) continue;
        const std::string head = fmt::format("{} b2 h4/2 k{} d16", dtype, keys);
        expect_one_answer({fmt::format("decode {} page={}", head, page), "decode " + head, "forward " + head});
        if (keys == 0) continue;
        const int64_t rows = std::min<int64_t>(keys, 3);
        expect_one_answer({fmt::format("decode {} q{} append page={} mask=causal", head, rows, page),
                           fmt::format("decode {} q{} append mask=causal", head, rows),
                           fmt::format("forward {} q{} mask=causal", head, rows)});
      }
}

// K and V pools in any layout, each with strides of its own.
TEST(Cases, G01_PoolsHaveTheirOwnStrides) {
  for (const std::string& dtype : dtypes)
    for (const char* pass : {"decode {} b2 h2 q3 k37 d8/24 append mask=causal", "append {} b2 h2 n3 k37 d8/24"}) {
      const std::string line = fmt::format(fmt::runtime(pass), dtype);
      expect_one_answer({line, line + " page=4", line + " layout=bhsd", line + " layout=bhsd page=4",
                         line + " layout=kv", line + " layout=kv page=4",
                         line + " page=4 strides=k[104,26,13,1]v[300,24,150,1]",
                         line + " strides=k[800,20,9,1]v[2000,50,25,1]k_new[99,8,31,1]v_new[144,24,72,1]"});
    }
}

// A tile of 192 keys takes in 12 pages and a piece.
TEST(Cases, G02_PagesThatNoTileDivides) {
  for (const std::string& dtype : dtypes)
    for (const char* mask : {"", " mask=causal"}) {
      const std::string head = fmt::format("{} h4 q65 k257 d64{}", dtype, mask);
      expect_one_answer({fmt::format("decode {} page=16", head), "forward " + head}, {192, 0, 100});
    }
}

// Entries of the table that no visible key needs hold anything: no id, or pages of others, where NaN lies.
TEST(Cases, G04_StaleEntriesOfTheTable) {
  for (const std::string& dtype : dtypes)
    for (const char* mask : {"", " mask=causal&window(5,0)"}) {
      const std::string line =
          fmt::format("decode {} b2 h2 q2 k64 d8 page=8 pages=12 cache_lens=[19,41]{}", dtype, mask);
      Exam c(line + " page_table=[4,2,7,0,0,0,0,0,1,3,5,6,8,9,0,0]");
      tools::poison(c);  // fills what is not needed with -1 and the largest numbers of either sign
      for (const std::string& kernel : kernels_for(line)) {
        std::optional<std::vector<std::vector<std::byte>>> bits;
        for (const int32_t stale : {0, -1, INT32_MAX, INT32_MIN, 10, 1, 4}) {  // 10: nobody's page, all NaN
          if (stale)
            for (int64_t column = 0; column < 8; ++column) {
              const bool first = column < 3 && (*mask == 0 || column > 0),
                         second = column < 6 && (*mask == 0 || column > 3);
              if (!first) c.set(TESSERA_PAGE_TABLE, {0, column, 0, 0}, stale);
              if (!second) c.set(TESSERA_PAGE_TABLE, {1, column, 0, 0}, stale);
            }
          run_all(c, {kernel, 2});
          expect_all_finite(c, TESSERA_OUT);
          const std::vector got = {result_bits(c, 0), result_bits(c, 1)};
          if (!bits) bits = got;
          EXPECT_TRUE(got == *bits) << kernel << " " << stale;
        }
        expect_right(c, kernel);
      }
    }
}

TEST(Cases, G05_LengthsBeyondTheCapacity) {
  expect_invalid(parse("decode k64 d8 page=16 page_table=[0,1,2,3] cache_lens=[65]"),
                 {"cache_lens[0] is 65", "64 slots"});
  expect_invalid(parse("decode k64 d8 page=16 append page_table=[0,1,2,3] cache_lens=[64]"),
                 {"cache_lens[0] is 64 and 1 are new"});
  for (const std::string& dtype : dtypes)
    for (const char* line :
         {"decode {} b2 h2/1 k64 d8 page=16 status", "decode {} b2 h2/1 k64 d8 page=16 append status",
          "append {} b2 h2 k64 d8 page=16 status", "append {} b2 h2 k64 d8 status", "decode {} b2 h2/1 k64 d8 status"})
      for (const int32_t length : {65, INT32_MAX}) {
        SCOPED_TRACE(line);
        Exam c = poisoned(fmt::format(fmt::runtime(line), dtype));
        c.value(TESSERA_CACHE_LENS, 1) = length;
        expect_refused(c, TESSERA_STATUS_CAPACITY, {"cache_lens[1]", "64 slots"});
      }
  // Slots there are, but the plan was made for fewer keys.
  Exam c = poisoned("decode f32 b2 k40 d8 page=16 slots=64 status");
  c.value(TESSERA_CACHE_LENS, 0) = 41;
  expect_refused(c, TESSERA_STATUS_LENGTH, {"cache_lens[0] makes 41 keys", "len_k"});
  // Without cache_lens, seqused_k says how many there are; a ring may be outgrown.
  Exam used = poisoned("forward f32 b2 k40 d8 page=16 seqused=k status");
  used.value(TESSERA_SEQUSED_K, 1) = 41;
  expect_refused(used, TESSERA_STATUS_CAPACITY, {"seqused_k[1] is 41"});
  expect_line_right("decode f32 k64 d8 page=16 ring slots=32 append cache_lens=[63] mask=causal&window(20,0)");
}

// One number that must not be: what was wrong is known by the status word, and nothing else is written. (Lengths and
// ids are int32, so no slot can be named beyond 2^31.)
struct Spoilt {
  const char* line;  // behind the pass and the dtype
  int name;
  Index index;
  std::vector<int32_t> values;
  int32_t status;
};
const Spoilt spoilt[] = {
    {"b3 h2 {}2 k9 d8 cache_lens=[7,0,3]", TESSERA_CACHE_LENS, {0}, {8, 9, INT32_MAX}, TESSERA_STATUS_CAPACITY},
    {"b3 h2 {}2 k9 d8 cache_lens=[7,0,3]", TESSERA_CACHE_LENS, {2}, {-1, -2, INT32_MIN}, TESSERA_STATUS_LENGTH},
    {"b3 h2 {}2 k9 d8 cache_lens=[7]", TESSERA_CACHE_LENS, {0}, {-1, INT32_MIN}, TESSERA_STATUS_LENGTH},
    {"b3 h2 {}2 k9 d8 cache_lens=[7]", TESSERA_CACHE_LENS, {0}, {8, INT32_MAX}, TESSERA_STATUS_CAPACITY},
    {"b3 h2 {}2 k9 d8 cache_lens=[7,4,3] left_pad=[0,4,3]",
     TESSERA_LEFT_PAD,
     {1},
     {5, -1, INT32_MAX, INT32_MIN},
     TESSERA_STATUS_LENGTH},
    {"b3 h2 {}2 k9 d8 cache_rows=5 cache_batch_idx=[4,0,2] cache_lens=[7,0,3]",
     TESSERA_CACHE_BATCH_IDX,
     {1},
     {5, -1, INT32_MAX, INT32_MIN},
     TESSERA_STATUS_PAGE},
    {"b3 h2 {}2 k9 d8 cache_rows=5 cache_batch_idx=[4,0,2] cache_lens=[7,3,3]",
     TESSERA_CACHE_BATCH_IDX,
     {1},
     {2},
     TESSERA_STATUS_TARGET},
    {"b3 h2 {}2 k9 d8 cache_rows=5 cache_batch_idx=[4,0,2] cache_lens=[7,2,3]",
     TESSERA_CACHE_BATCH_IDX,
     {1},
     {2},
     TESSERA_STATUS_TARGET},  // slots 2, 3 and 3, 4
    {"b2 h2 {}3 k12 d8 page=4 pages=7 page_table=[6,0,3,2,5,4] cache_lens=[3,9]",
     TESSERA_PAGE_TABLE,
     {0, 1},
     {7, -1, INT32_MAX, INT32_MIN},
     TESSERA_STATUS_PAGE},
    {"b2 h2 {}3 k12 d8 page=4 pages=7 page_table=[6,0,3,2,5,4] cache_lens=[4,8]",
     TESSERA_PAGE_TABLE,
     {0, 1},
     {4},
     TESSERA_STATUS_TARGET},
    {"b2 h2 {}6 k12 d8 page=4 pages=7 page_table=[6,0,3,2,5,4] cache_lens=[3,6]",
     TESSERA_PAGE_TABLE,
     {0, 2},
     {0},
     TESSERA_STATUS_TARGET},  // tokens of one sequence: page 0 is full and begins again
    {"h2 {}2 k9 d8 varlen=n[1,2,1] b3 cache_lens=[0,5,7]",
     TESSERA_CU_SEQLENS_NEW,
     {1},
     {4, -1, INT32_MAX},
     TESSERA_STATUS_LENGTH},
    {"h2 {}2 k9 d8 varlen=n[1,2,1] b3 cache_lens=[0,5,7]", TESSERA_CU_SEQLENS_NEW, {0}, {-1, 1}, TESSERA_STATUS_LENGTH},
    {"h2 {}2 k9 d8 varlen=n[1,2,1] b3 cache_lens=[0,5,7]",
     TESSERA_CU_SEQLENS_NEW,
     {3},
     {5, 2, INT32_MIN},
     TESSERA_STATUS_LENGTH},
    {"b3 h2 {}2 k9 d8 seqused=n[1,2,0] cache_lens=[7,0,3]",
     TESSERA_SEQUSED_NEW,
     {2},
     {3, -1, INT32_MAX, INT32_MIN},
     TESSERA_STATUS_LENGTH},
    {"b3 h2 {}2 k19 d8 rotary=6 positions=9 cache_lens=[7,0,3]",
     TESSERA_CACHE_LENS,
     {1},
     {8, 17},
     TESSERA_STATUS_POSITION},
};
TEST(Cases, G06_NothingIsWrittenIfRefused) {
  for (const std::string& dtype : dtypes)
    for (const Spoilt& row : spoilt)
      for (const bool attends : {false, true}) {
        if (sanitized && attends && dtype != dtypes[0]) continue;
        const std::string what = fmt::format(fmt::runtime(row.line), attends ? "q" : "n");
        for (const int32_t value : row.values) {
          SCOPED_TRACE(fmt::format("{} {} = {}", what, tessera_name_text(row.name), value));
          Exam c = poisoned(fmt::format("{} {} {} status", attends ? "decode append" : "append", dtype, what));
          c.set(row.name, row.index, value);
          expect_refused(c, row.status, {});
        }
      }
}

// The same without a status word; and a sound run leaves the word as it is.
TEST(Cases, G06_TheStatusWordIsOptional) {
  for (const char* status : {"", " status"}) {
    Exam c = poisoned(std::string("append bf16 h2 n1 k9 d8") + status);
    c.value(TESSERA_CACHE_LENS, 0) = 9;
    expect_refused(c, TESSERA_STATUS_CAPACITY, {"cache_lens[0] is 9 and 1 are new; the sequence has 9 slots"});
  }
  Exam c = poisoned("append bf16 h2 n1 k9 d8 status");
  c.value(TESSERA_STATUS, 0) = 64;
  run_all(c, {});
  EXPECT_EQ(c.value(TESSERA_STATUS, 0), 64);
}

// The last slot of a cache that ends where memory does, and no byte beside those of the new tokens.
TEST(Cases, G06_TheLastSlotIsWritten) {
  for (const char* options : {"", " page=4 pages=2 page_table=[0,1]", " ring", " layout=bhsd", " cache_rows=1 page=8"})
    on_engines([&](const How& how) {
      SCOPED_TRACE(options);
      const std::string ids = std::string(options).find("cache_rows") == std::string::npos ? "" : " page_table=[0]";
      const Guarded g(fmt::format("append bf16 h3 n2 k8 d5 cache_lens=[6]{}{}", options, ids));
      if (!g.given) GTEST_SKIP() << "no address space";
      for (const int name : {TESSERA_K_NEW, TESSERA_V_NEW})
        tools::for_each_index(tools::extents(g.problem.operand[name]), [&](const Index& i) { g.set(name, i, 2); });
      expect_ok(attempt(g.problem, g.bindings, how));
      for (const int name : {TESSERA_K, TESSERA_V}) {
        const tessera_operand& o = g.problem.operand[name];
        tools::for_each_index(tools::extents(o), [&](const Index& i) {
          ASSERT_EQ(g.get(name, i), i[0] * o.extent[1] + i[1] >= 6 ? 2 : 0) << i[0] << " " << i[1];
        });
      }
    });
}

// A batch padded with requests that have no new token, no keys or one, and tables that name one shared page: that page
// stays as it is, and the real requests get the bits that they get alone.
TEST(Cases, G07_PaddedRowsWriteNothing) {
  for (const std::string& dtype : dtypes)
    for (const char* options : {" mask=causal", " mask=causal&window(6,0)", " mask=causal rotary=8"})
      for (const int padded_length : {0, 1}) {
        const std::string head = fmt::format("decode {} h4/2 k32 d16 page=8 pages=21 append{}", dtype, options);
        std::string real_table = "[", padded_table;
        const int lengths[] = {9, 17, 31, 5, 12};
        for (int b = 0; b < 5; ++b)
          for (int column = 0; column < 4; ++column)  // columns that are not needed name the shared page
            real_table += fmt::format("{}{}", b + column ? "," : "", column * 8 <= lengths[b] ? 1 + b * 4 + column : 0);
        for (int n = 0; n < 12; ++n) padded_table += ",0";
        const std::string pad = fmt::format(",{0},{0},{0}]", padded_length);
        Exam real(head + " b5 cache_lens=[9,17,31,5,12] page_table=" + real_table + "]"),
            padded(head + " b8 seqused=n[1,1,1,1,1,0,0,0] cache_lens=[9,17,31,5,12" + pad +
                   " page_table=" + real_table + padded_table + "]");
        for (int64_t b = 0; b < 5; ++b) {
          copy_keys(real, b, padded, b);
          copy_queries(real, b, 0, padded, b);
        }
        tools::poison(real);
        tools::poison(padded);  // NaN into the new tokens that there are not
        // The tables as they were: page 0 where nobody looks.
        for (int64_t b = 0; b < 8; ++b)
          for (int64_t column = 0; column < 4; ++column)
            if (b >= 5 || column * 8 > lengths[b]) padded.set(TESSERA_PAGE_TABLE, {b, column, 0, 0}, 0);
        for (const std::string& kernel : kernels_for(head)) {
          run_all(real, {kernel, 1});
          run_all(padded, {kernel, 2});  // with a guard around what may be written
          for (int64_t b = 0; b < 5; ++b) {
            ASSERT_TRUE(result_bits(real, b) == result_bits(padded, b)) << head << b;
            ASSERT_TRUE(appended_bits(real, b) == appended_bits(padded, b)) << head << b;
          }
          for (int64_t b = 5; b < 8; ++b)
            for (int64_t h = 0; h < 4; ++h) {
              if (padded_length == 0) {
                EXPECT_EQ(padded.get(TESSERA_OUT, {b, 0, h, 3}), 0);
                EXPECT_EQ(padded.get(TESSERA_LSE, {b, 0, h, 0}), -infinity);
              } else {
                EXPECT_EQ(padded.get(TESSERA_OUT, {b, 0, h, 3}), padded.get(TESSERA_V, {0, 0, h / 2, 3}));
              }
            }
          expect_right(padded, head);
        }
      }
}

// The page size is a number of the problem: pools and tables that were made for another are refused.
TEST(Cases, G09_PagesOfAnotherSize) {
  for (const char* pass : {"decode bf16 b2 h2 k64 d8", "append bf16 b2 h2 k64 d8"}) {
    const tessera_problem sixteen = tools::Line(fmt::format("{} page=16", pass)).problem(),
                          four = tools::Line(fmt::format("{} page=4", pass)).problem();
    tessera_problem p = sixteen;
    for (const int name : {TESSERA_K, TESSERA_V}) p.operand[name] = four.operand[name];
    expect_invalid(attempt(p, {}), {"k.extent"});
    p.cache.pages = four.cache.pages;
    expect_invalid(attempt(p, {}), {"k.extent[1]", "is 4", "must be 16"});
    p = four;
    p.operand[TESSERA_PAGE_TABLE] = sixteen.operand[TESSERA_PAGE_TABLE];
    expect_invalid(attempt(p, {}), {"page_table.extent[1]", "is 4", "must be 16"});
  }
  // Ids of small pages against a pool of large ones: those that it has not are refused.
  Exam c = poisoned("append bf16 b2 h2 k64 d8 page=16 status cache_lens=[63,63]");
  c.set(TESSERA_PAGE_TABLE, {1, 3, 0, 0}, 8);
  expect_refused(c, TESSERA_STATUS_PAGE, {"page_table names page 8", "pages 0 to 7"});
}

// One length for all sequences is that of every sequence, however many pages there are.
TEST(Cases, G10_OneLengthForAll) {
  for (const std::string& dtype : dtypes) {
    for (const char* rest :
         {"page=8 pages=7", "page=32 pages=7", "", "left_pad=[3,9]", "cache_rows=7 cache_batch_idx=[5,1]"}) {
      const std::string head = fmt::format("decode {} b2 h4/2 k32 d16 {}", dtype, rest);
      expect_one_answer({head + " cache_lens=[20]", head + " cache_lens=[20,20]"});
      expect_one_answer(
          {head + " q2 append mask=causal cache_lens=[20]", head + " q2 append mask=causal cache_lens=[20,20]"});
    }
    expect_one_answer({fmt::format("append {} b2 h2 n3 k32 d16 page=8 pages=7 cache_lens=[20]", dtype),
                       fmt::format("append {} b2 h2 n3 k32 d16 cache_lens=[20,20]", dtype)});
    expect_one_answer({fmt::format("decode {} b1 h2 k32 d16 page=8 pages=7 cache_lens=[20]", dtype),
                       fmt::format("forward {} b1 h2 k20 d16", dtype)});
  }
}

// Packed queries, pages and keys split between threads.
TEST(Cases, G11_PackedPagedAndSplit) {
  for (const std::string& dtype : dtypes)
    for (const char* lengths : {"512,1024", "1,1300"}) {
      const std::string head = fmt::format("{} h4/2 d{}", dtype, dtype == dtypes[0] ? 64 : 16),
                        cache = fmt::format("decode {} k1400 cache_lens=[{}]", head, lengths),
                        paged = cache + " varlen=q[1,1] page=256";
      expect_one_answer({paged, cache + " b2 q1", fmt::format("forward {} varlen=q[1,1]k[{}]", head, lengths)});
      const std::string appending = cache + " varlen=q[2,1]n[2,1] append mask=causal";
      expect_one_answer({appending + " page=256", appending});
      tools::Choice choice;
      choice.threads = 3;
      EXPECT_TRUE(has_step(tools::Plan(tools::Line(paged).problem(), choice), "combine"));
      EXPECT_TRUE(bits_of(paged) == bits_of(paged, {"", 1})) << "what the planner chooses";
    }
}

// A length is a number of keys, not of pages and a rest: 240 and 256 keys are 15 and 16 pages, and 0 is none.
TEST(Cases, G12_FullLastPages) {
  for (const std::string& dtype : dtypes)
    for (const int keys : {0, 15, 16, 17, 240, 241, 256}) {
      const std::string line = fmt::format("decode {} k256 d8 out=f32 page=16 cache_lens=[{}]", dtype, keys);
      on_kernels(line, [&](const How& how) {
        Exam c(line);
        average_cached_keys(c);
        tools::poison(c);
        run_all(c, how);
        expect_value(c.get(TESSERA_OUT, {}), keys ? (keys - 1) / 2.0 : 0, 1e-4);
        expect_value(c.get(TESSERA_LSE, {}), std::log(keys), 1e-5);
      });
    }
}

// The length bounds the keys, whatever the mask.
TEST(Cases, G14_NotCausalAndNotAligned) {
  for (const std::string& dtype : dtypes)
    for (const char* mask : {"", " mask=keep", " mask=window(300,300)", " mask=prefix(300)"})
      for (const int keys : {16, 64, 255, 257}) {
        const std::string line = fmt::format("decode {} k512 d8 page=256 cache_lens=[{}]{}", dtype, keys, mask);
        on_kernels(line, [&](const How& how) {
          Exam c(line);
          c.put(TESSERA_Q, 0);
          if (c.has(TESSERA_KEEP)) c.put(TESSERA_KEEP, 1);
          put_keys(c, TESSERA_V, [](int64_t, int64_t, int64_t, int64_t) { return 1; });
          tools::poison(c);
          run_all(c, how);
          for (int64_t d = 0; d < 8; ++d) expect_value(c.get(TESSERA_OUT, {0, 0, 0, d}), 1, 1e-6);
          expect_value(c.get(TESSERA_LSE, {}), std::log(keys), 1e-5);
        });
      }
}

double rounding(int32_t dtype) {
  return dtype == TESSERA_BF16 ? 0x1p-8 : dtype == TESSERA_F16 ? 0x1p-11 : 0x1p-23;
}
// `x` rotated by the case's tables as stands at `position`.
std::vector<double> rotated(const Exam& c, std::vector<double> x, int64_t position) {
  const int64_t pairs = c.problem().cache.rotary_dim / 2;
  for (int64_t n = 0; n < pairs; ++n) {
    const bool interleaved = c.problem().cache.rotary_interleaved != 0;
    double &one = x[static_cast<size_t>(interleaved ? 2 * n : n)],
           &two = x[static_cast<size_t>(interleaved ? 2 * n + 1 : n + pairs)];
    const double cos = c.get(TESSERA_COS, {0, position, 0, n}), sin = c.get(TESSERA_SIN, {0, position, 0, n}),
                 was = one;
    one = was * cos - two * sin;
    two = two * cos + was * sin;
  }
  return x;
}
std::vector<double> row_of(const Exam& c, int name, int64_t b, int64_t i, int64_t h) {
  std::vector<double> x;
  for (int64_t d = 0; d < c.operand(name).extent[3]; ++d) x.push_back(c.get(name, {b, i, h, d}));
  return x;
}

// Three new tokens behind 5 keys stand at 5, 6 and 7, the last that the tables have; left padding does not count.
// Numbers that are not rotated are copied. Queries stand where their tokens do.
TEST(Cases, G15_RotationBehindCachedKeys) {
  for (const std::string& dtype : dtypes)
    for (const char* place : {"", " page=3", " layout=bhsd"})
      for (const char* rotary : {"16", "8", "6", "16:interleaved", "8:interleaved", "6:interleaved", "8:own"}) {
        std::string angles = rotary;
        if (const size_t own = angles.find("own"); own != std::string::npos) angles.replace(own, 3, dtype);
        const std::string line = fmt::format(
            "decode {} b2 h4/2 q3 k8 d16 slots=10 append mask=causal rotary={} positions=8 cache_lens=[5,7] "
            "left_pad=[0,2]{}",
            dtype, angles, place);
        SCOPED_TRACE(line);
        Exam c = poisoned(line);
        std::vector<std::string> all = kernels_for(line);
        all.push_back("reference.oracle");
        for (const std::string& kernel : all) {
          run_all(c, {kernel});
          Exam plain("forward f32 b2 h4/2 q3 k8 d16 mask=causal");
          for (int64_t b = 0; b < 2; ++b) {
            const tools::CacheRow row = tools::cache_row(c, b);
            ASSERT_EQ(row.old_keys, 5);
            for (int64_t n = 0; n < 3; ++n)
              for (int64_t h = 0; h < 2; ++h) {
                const std::vector<double> was = row_of(c, TESSERA_K_NEW, b, n, h), want = rotated(c, was, 5 + n);
                const tools::Place at = tools::place_of(c, row, 5 + n);
                for (int64_t d = 0; d < 16; ++d) {
                  const double got = c.get(TESSERA_K, {at.plane, at.row, h, d}), x = want[static_cast<size_t>(d)];
                  const bool turned = d < c.problem().cache.rotary_dim;
                  expect_value(got, x, turned ? 4 * rounding(c.operand(TESSERA_K).dtype) : 0);
                  EXPECT_EQ(c.get(TESSERA_V, {at.plane, at.row, h, d}), c.get(TESSERA_V_NEW, {b, n, h, d}));
                }
              }
            for (int64_t i = 0; i < 3; ++i)
              for (int64_t h = 0; h < 4; ++h) {
                const std::vector<double> q = rotated(c, row_of(c, TESSERA_Q, b, i, h), 5 + i);
                for (int64_t d = 0; d < 16; ++d) plain.set(TESSERA_Q, {b, i, h, d}, q[static_cast<size_t>(d)]);
              }
            for (int64_t j = 0; j < 8; ++j)
              for (int64_t h = 0; h < 2; ++h)
                for (int64_t d = 0; d < 16; ++d)
                  for (const int name : {TESSERA_K, TESSERA_V}) {
                    const tools::Place at = tools::place_of(c, row, j);
                    plain.set(name, {b, j, h, d}, c.get(name, {at.plane, at.row, h, d}));
                  }
          }
          run_all(plain, {"cpu"});
          const bool f32 = c.operand(TESSERA_Q).dtype == TESSERA_F32;
          expect_values(c, TESSERA_OUT, plain.values(TESSERA_OUT), f32 ? 1e-5 : 0.02);
          expect_values(c, TESSERA_LSE, plain.values(TESSERA_LSE), kernel == "cpu.avx512bf16" ? 0.02 : 1e-5);
          expect_right(c, kernel);
        }
      }
}

TEST(Cases, G15_TablesAndDimsAreChecked) {
  const std::string line = "decode bf16 q3 k8 d16 append cache_lens=[5] rotary=";
  expect_invalid(parse(line + "18"), {"rotary_dim is 18", "at most dim, 16"});
  for (const char* odd : {"5", "15", "17"}) expect_invalid(parse(line + odd), {"rotary_dim", odd, "even"});
  expect_invalid(parse(line + "-2"), {"-2"});
  expect_invalid(parse(line + "8 positions=7"), {"positions 5 to 7", "0 to 6"});
  for (const char* pass : {"decode bf16 q3 k8 d16 append", "append bf16 n3 k8 d16"}) {
    Exam c = poisoned(fmt::format("{} rotary=8 positions=7 status cache_lens=[4]", pass));
    c.value(TESSERA_CACHE_LENS, 0) = 5;
    expect_refused(c, TESSERA_STATUS_POSITION, {"new tokens stand at positions 5 to 7; cos and sin have 0 to 6"});
  }
  Exam c = poisoned("decode bf16 q3 n1 k8 d16 append rotary=8 status cache_lens=[5]");
  c.value(TESSERA_CACHE_LENS, 0) = 1;  // 2 keys, so the first of 3 queries stands before them
  expect_refused(c, TESSERA_STATUS_POSITION, {"queries stand at positions -1 to 1"});
  on_engines([](const How& how) {  // tables of just as many rows, at the end of memory
    for (const char* rotary : {"6", "16:interleaved", "2:bf16"}) {
      const Guarded g(fmt::format("decode bf16 q3 k8 d16 append rotary={} positions=8 cache_lens=[5]", rotary));
      if (!g.given) GTEST_SKIP() << "no address space";
      expect_ok(attempt(g.problem, g.bindings, how));
    }
  });
}

// Tokens that are appended together or one by one, to any kind of cache: the cache holds the same bytes.
TEST(Cases, G15_TokensOneByOne) {
  for (const std::string& dtype : dtypes)
    for (const char* options :
         {"", " rotary=6:interleaved", " kv=e4m3:head", " kv=e4m3:token_head/token rotary=8", " v_in_k"}) {
      const std::string line =
          fmt::format("append {} h2 k12 d8{} page=5 page_table=[2,0,1] cache_lens=[4] n", dtype, options);
      for (const std::string& kernel : kernels_for(line + "8")) {
        Exam together(line + "8"), single(line + "1");
        run_all(together, {kernel, 1});
        for (int32_t n = 0; n < 8; ++n) {
          single.value(TESSERA_CACHE_LENS, 0) = 4 + n;
          for (const int name : {TESSERA_K_NEW, TESSERA_V_NEW})
            if (single.has(name))
              single.put(name, [&](const Index& i) { return together.get(name, {0, n, i[2], i[3]}); });
          run_all(single, {kernel, 1});
        }
        EXPECT_TRUE(stored_bits(together, 0, 0) == stored_bits(single, 0, 0)) << line << kernel;
      }
    }
}

// Requests that share pages of a prefix: each gets the bits that it gets with pages of its own, windows or not, and
// appends to its own last page.
TEST(Cases, G17_SharedPrefixes) {
  for (const std::string& dtype : dtypes)
    for (const char* mask : {"", " mask=causal", " mask=causal&window(40,0)", " mask=causal&window(9,0)&first(20)"}) {
      std::string table, lengths;
      for (int b = 0; b < 16; ++b) {  // 8 with the prefix of pages 0 to 5
        for (int column = 0; column < 9; ++column)
          table += fmt::format("{}{}", b + column ? "," : "", b % 2 == 0 && column < 6 ? column : 6 + b * 9 + column);
        lengths += fmt::format("{}{}", b ? "," : "", 96 + 3 * b);
      }
      const std::string line = fmt::format("decode {} b16 h4/2 k144 d16{} page=16 pages=160 cache_lens=[{}]", dtype,
                                           mask, lengths),
                        shared = fmt::format(" page_table=[{}]", table);
      expect_one_answer({line + shared, line});
      expect_one_answer({line + " q2 append" + shared, line + " q2 append"});
    }
}

// A shared page may be read by all but appended to by one.
TEST(Cases, G17_TwoTokensForOneSharedSlot) {
  for (const char* pass : {"decode {} append", "append {}"})
    for (const std::string& dtype : dtypes) {
      const std::string line = fmt::format(fmt::runtime(pass), dtype) + " b3 h2 k48 d8 page=16 pages=6 status";
      Exam c(line + " page_table=[0,1,5,0,1,4,0,1,3] cache_lens=[32,33,34]");
      expect_ok(attempt(c.problem(), c.bindings()));
      c.set(TESSERA_PAGE_TABLE, {2, 2, 0, 0}, 5);  // slots 0 and 2 of page 5
      expect_ok(attempt(c.problem(), c.bindings()));
      c.value(TESSERA_CACHE_LENS, 2) = 32;
      expect_refused(c, TESSERA_STATUS_TARGET, {"slot 0 of page 5", "each needs a slot of its own"});
    }
}

// A ring holds what a cache without end holds, as far as the window sees.
TEST(Cases, G_RingsHoldTheWindow) {
  for (const std::string& dtype : dtypes)
    for (const char* options : {"mask=causal&window(9,0)", "mask=causal&chunk(10)", "mask=window(9,2) sink"})
      for (const char* ring : {" ring slots=12", " ring slots=16 page=4", " ring slots=13 page=5"}) {
        const std::string line = fmt::format("decode {} b3 h4/2 q3 k70 d16 append {}", dtype, options);
        for (const char* lengths : {"[0,1,2]", "[9,10,11]", "[12,13,14]", "[15,16,17]", "[66,67,60]"})
          expect_one_answer(
              {fmt::format("{} cache_lens={}", line, lengths), fmt::format("{} cache_lens={}{}", line, lengths, ring)});
      }
}

// Every byte of pages between large strides lies where 64 bits say.
TEST(Cases, D09_AppendToCachesFarApart) {
  for (const char* options : {"", " page=4 pages=5 page_table=[0,1,2,3,4]"})
    on_engines([&](const How& how) {
      constexpr int64_t far = int64_t{1} << 29;
      const bool paged = *options != 0;
      const Guarded g(
          fmt::format("append f16 b5 h2 n3 k4 d8 cache_lens=[1]{0} strides=k[{1},16,8,1]v[{1},16,8,1]", options, far));
      if (!g.given) GTEST_SKIP() << "no address space";
      for (const int name : {TESSERA_K_NEW, TESSERA_V_NEW})
        tools::for_each_index(tools::extents(g.problem.operand[name]),
                              [&](const Index& i) { g.set(name, i, static_cast<double>(1 + i[0] * 3 + i[1])); });
      expect_ok(attempt(g.problem, g.bindings, how));
      for (int64_t b = 0; b < 5; ++b)
        for (int64_t t = 0; t < 4; ++t)
          for (const int name : {TESSERA_K, TESSERA_V})
            for (int64_t n = 0; n < 16; ++n)
              ASSERT_EQ(g.get(name, {b, t, n / 8, n % 8}), t ? b * 3 + t : 0) << paged << b << t;
    });
}

}  // namespace
}  // namespace tessera::test
