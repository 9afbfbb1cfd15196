// Caches in the oracle: where keys lie, what an append writes, rotation and e4m3, against dense attention on the same
// keys and against numbers worked out by hand.
#include <functional>

#include "case.h"

namespace tessera::reference {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// One number for each (tensor, sequence, position, head, dim), wherever it lies.
double number(int name, At i) {
  const double x = static_cast<double>(name) + 7.1 * static_cast<double>(i[0]) + 0.93 * static_cast<double>(i[1]) +
                   3.3 * static_cast<double>(i[2]) + 1.7 * static_cast<double>(i[3]);
  return std::sin(x * x);
}
void fill_queries(Case& c) {
  c.each_is(TESSERA_Q, [](At i) { return number(TESSERA_Q, i); });
}

using Places = std::function<Slot(int64_t b, int64_t j)>;
Slot row_and_slot(int64_t b, int64_t j) {
  return {b, j};
}

void put_key(Case& c, int64_t b, int64_t j, Slot at) {
  for (const int name : {TESSERA_K, TESSERA_V})
    for (int64_t h = 0; h < c.p.heads_kv; ++h)
      for (int64_t d = 0; d < c.p.operand[name].extent[3]; ++d)
        c.set(name, {at.plane, at.row, h, d}, number(name, {b, j, h, d}));
}
// What `put_key` put, or the append?
bool holds_key(const Case& c, int64_t b, int64_t j, Slot at) {
  for (const int name : {TESSERA_K, TESSERA_V})
    for (int64_t h = 0; h < c.p.heads_kv; ++h)
      for (int64_t d = 0; d < c.p.operand[name].extent[3]; ++d)
        if (c.get(name, {at.plane, at.row, h, d}) != number(name, {b, j, h, d})) return false;
  return true;
}
// Keys [0, before[b]) in their places, all else NaN; the keys after them are new.
void fill_cache(Case& c, const std::vector<int64_t>& before, const Places& place) {
  fill_queries(c);
  c.all(TESSERA_K, nan);
  c.all(TESSERA_V, nan);
  for (int64_t b = 0; b < c.p.batch; ++b)
    for (int64_t j = 0; j < before[static_cast<size_t>(b)]; ++j) put_key(c, b, j, place(b, j));
  for (const auto& [fresh, of] : {std::pair{TESSERA_K_NEW, TESSERA_K}, std::pair{TESSERA_V_NEW, TESSERA_V}})
    for (int64_t b = 0; b < c.p.batch && core::has(c.p, fresh) && !core::packed_new(c.p); ++b)
      for (int64_t n = 0; n < c.p.len_new; ++n)
        for (int64_t h = 0; h < c.p.heads_kv; ++h)
          for (int64_t d = 0; d < c.p.operand[fresh].extent[3]; ++d)
            c.set(fresh, {b, n, h, d}, number(of, {b, before[static_cast<size_t>(b)] + n, h, d}));
}
void fill_dense(Case& c) {
  fill_queries(c);
  for (const int name : {TESSERA_K, TESSERA_V}) c.each_is(name, [&](At i) { return number(name, i); });
}
void expect_same_answer(Case& cache, Case& dense) {
  cache.run();
  dense.run();
  EXPECT_EQ(cache.values(TESSERA_OUT), dense.values(TESSERA_OUT));
  EXPECT_EQ(cache.values(TESSERA_LSE), dense.values(TESSERA_LSE));
  for (const double x : dense.values(TESSERA_OUT)) ASSERT_TRUE(std::isfinite(x));
}

// ------------------------------------------------------------------------------------------ where keys lie

TEST(Cache, AppendAndAttendIsDenseAttentionOnAllKeys) {
  Case dense("forward f64 b2 h4/2 q3 k7 d4/3 mask=causal seqused=k[7,4]");
  Case cache("decode f64 b2 h4/2 q3 k7 d4/3 mask=causal append cache_lens=[4,1]");
  fill_dense(dense);
  fill_cache(cache, {4, 1}, row_and_slot);
  expect_same_answer(cache, dense);
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t j = 0; j < 7; ++j) {
      const bool is_used = j < (b == 0 ? 7 : 4);
      EXPECT_EQ(holds_key(cache, b, j, {b, j}), is_used) << b << " " << j;
      EXPECT_EQ(std::isnan(cache.get(TESSERA_K, {b, j, 0, 0})), !is_used);
    }
}
TEST(Cache, AppendAloneWritesTheSame) {
  Case both("decode f64 b2 h4/2 q3 k7 d4/3 append cache_lens=[4,1]");
  Case alone("append f64 b2 h2 n3 k7 d4/3 cache_lens=[4,1]");
  fill_cache(both, {4, 1}, row_and_slot);
  fill_cache(alone, {4, 1}, row_and_slot);
  both.run();
  alone.run();
  for (const int name : {TESSERA_K, TESSERA_V})
    EXPECT_EQ(both.memory[static_cast<size_t>(name)], alone.memory[static_cast<size_t>(name)]);
  EXPECT_TRUE(holds_key(alone, 1, 3, {1, 3}));
}
TEST(Cache, LengthsWithoutAnAppend) {
  Case dense("forward f64 b2 h2 q2 k6 d4 seqused=k[5,2] mask=causal");
  Case lens("decode f64 b2 h2 q2 k6 d4 cache_lens=[5,2] slots=9 mask=causal");
  Case one("decode f64 b2 h2 q2 k6 d4 cache_lens=[5] mask=causal"), fives("forward f64 b2 h2 q2 k5 d4 mask=causal");
  Case seqused("forward f64 b2 h2 q2 k6 d4 seqused=k[5,2] slots=9 mask=causal");
  Case full("forward f64 b2 h2 q2 k6 d4 slots=6 mask=causal"), sixes("forward f64 b2 h2 q2 k6 d4 mask=causal");
  for (Case* c : {&dense, &fives, &sixes}) fill_dense(*c);
  fill_cache(lens, {5, 2}, row_and_slot);
  fill_cache(seqused, {5, 2}, row_and_slot);
  fill_cache(one, {5, 5}, row_and_slot);
  fill_cache(full, {6, 6}, row_and_slot);
  expect_same_answer(lens, dense);
  expect_same_answer(seqused, dense);
  expect_same_answer(one, fives);
  expect_same_answer(full, sixes);
}

class Pages : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(, Pages, testing::Values(1, 2, 3, 16));
TEST_P(Pages, AreTheSameKeys) {
  const int64_t size = GetParam(), columns = (9 + size - 1) / size, pages = 2 * columns + 3;
  std::string table;  // pages from the last down, those of the two sequences in turn
  const auto page = [&](int64_t b, int64_t column) { return pages - 1 - 2 * column - b; };
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t column = 0; column < columns; ++column)
      table += (table.empty() ? "" : ",") + std::to_string(page(b, column));
  Case dense("forward f64 b2 h2/1 q3 k9 d4/3 mask=causal seqused=k[9,5]");
  Case paged("decode f64 b2 h2/1 q3 k9 d4/3 mask=causal append cache_lens=[6,2] page=" + std::to_string(size) +
             " pages=" + std::to_string(pages) + " page_table=[" + table + "]");
  const auto slot = [&](int64_t b, int64_t j) { return Slot{page(b, j / size), j % size}; };
  fill_dense(dense);
  fill_cache(paged, {6, 2}, slot);
  expect_same_answer(paged, dense);
  for (int64_t j = 0; j < 9; ++j) EXPECT_TRUE(holds_key(paged, 0, j, slot(0, j))) << j;
  for (int64_t j = 0; j < 9; ++j) EXPECT_EQ(holds_key(paged, 1, j, slot(1, j)), j < 5) << j;
}
TEST(Cache, PagesThatNoRowSeesAreNotRead) {
  const std::string huge = "2000000000";  // its address is none
  Case dense("forward f64 h2 q2 k12 d4 mask=window(2,0)");
  Case paged("decode f64 h2 q2 k12 d4 mask=window(2,0) cache_lens=[12] slots=20 page=2 pages=6 page_table=[-1," + huge +
             ",-1,-1,4,1," + huge + ",-1,-1,-1]");
  fill_dense(dense);
  fill_cache(paged, {0}, row_and_slot);
  // Row 0 stands at 10 and sees 8 to 10.
  for (int64_t j = 8; j < 12; ++j) put_key(paged, 0, j, {j < 10 ? 4 : 1, j % 2});
  expect_same_answer(paged, dense);
}
TEST(Cache, MemoryThatNoRowSeesMayHoldAnything) {
  Case dense("forward f64 h2 q2 k12 d4 mask=window(2,0)&first(1)");
  Case cache("decode f64 h2 q2 k12 d4 mask=window(2,0)&first(1) cache_lens=[12]");
  fill_dense(dense);
  fill_cache(cache, {12}, row_and_slot);
  for (int64_t j = 1; j < 8; ++j)
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t d = 0; d < 4; ++d)
        for (const int name : {TESSERA_K, TESSERA_V}) cache.set(name, {0, j, h, d}, d % 2 ? nan : infinity);
  expect_same_answer(cache, dense);
}

TEST(Cache, RingIsTheSameWindow) {
  for (const char* step : {"q1 n1", "q2 n2", "q3 n3"})
    for (const int64_t before : {0, 1, 4, 5, 6, 7, 11, 25}) {
      const std::string length = std::to_string(before), sizes = std::string(step) + " k40 d4 mask=window(3,0)";
      Case plain("decode f64 h2 " + sizes + " append cache_lens=[" + length + "]");
      Case ring("decode f64 h2 " + sizes + " append ring slots=6 cache_lens=[" + length + "]");
      fill_cache(plain, {before}, row_and_slot);
      fill_cache(ring, {before}, [](int64_t, int64_t j) { return Slot{0, j % 6}; });
      expect_same_answer(ring, plain);
      EXPECT_TRUE(holds_key(ring, 0, before, {0, before % 6}));
    }
}
TEST(Cache, LeftPaddingIsNoKey) {
  Case dense("forward f64 b2 h2 q3 k8 d4 mask=causal seqused=k[8,4] alibi");
  Case cache("decode f64 b2 h2 q3 k8 d4 mask=causal append cache_lens=[7,6] left_pad=[2,5] slots=12 alibi");
  fill_dense(dense);
  fill_cache(cache, {5, 1}, [](int64_t b, int64_t j) { return Slot{b, j + (b == 0 ? 2 : 5)}; });
  cache.each_is(TESSERA_SLOPES, [&](At i) { return dense.get(TESSERA_SLOPES, i); });
  expect_same_answer(cache, dense);
  EXPECT_TRUE(holds_key(cache, 1, 3, {1, 8}));
}
TEST(Cache, LeftPaddingInPagesOfARing) {
  Case plain("decode f64 q1 n1 k40 d4 mask=window(3,0) append cache_lens=[9]");
  Case ring(
      "decode f64 q1 n1 k40 d4 mask=window(3,0) append ring slots=6 cache_lens=[11] left_pad=[2] page=4 pages=3 "
      "page_table=[2,0]");
  const auto place = [](int64_t, int64_t j) { return Slot{(j + 2) % 6 < 4 ? 2 : 0, (j + 2) % 6 % 4}; };
  fill_cache(plain, {9}, row_and_slot);
  fill_cache(ring, {9}, place);
  expect_same_answer(ring, plain);
  EXPECT_TRUE(holds_key(ring, 0, 9, {0, 1}));  // slot 11 % 6 = 5, on the second page
}
TEST(Cache, RowsInAnyOrder) {
  Case dense("forward f64 b2 h2 q2 k6 d4 mask=causal seqused=k[6,4]");
  Case cache("decode f64 b2 h2 q2 k6 d4 mask=causal append cache_lens=[4,2] cache_batch_idx=[3,1] cache_rows=5");
  Case paged(
      "decode f64 b2 h2 q2 k6 d4 mask=causal append cache_lens=[4,2] cache_batch_idx=[2,0] cache_rows=3 page=4 "
      "pages=6 page_table=[5,-1,-1,-1,0,3]");
  fill_dense(dense);
  fill_cache(cache, {4, 2}, [](int64_t b, int64_t j) { return Slot{b == 0 ? 3 : 1, j}; });
  fill_cache(paged, {4, 2}, [](int64_t b, int64_t j) { return Slot{b == 1 ? 5 : j < 4 ? 0 : 3, j % 4}; });
  expect_same_answer(cache, dense);
  expect_same_answer(paged, dense);
}
TEST(Cache, NewTokensOfDifferentNumbers) {
  Case dense("forward f64 b3 h2 q3 k6 d4 mask=causal seqused=q[2,3,1]k[4,6,2]");
  Case padded("decode f64 b3 h2 q3 n3 k6 d4 mask=causal append cache_lens=[2,3,2] seqused=q[2,3,1]n[2,3,0]");
  Case packed("decode f64 b3 h2 q3 k6 d4 mask=causal append cache_lens=[2,3,2] seqused=q[2,3,1] varlen=n[2,3,0]");
  fill_dense(dense);
  fill_cache(padded, {2, 3, 2}, row_and_slot);
  fill_cache(packed, {2, 3, 2}, row_and_slot);
  for (int64_t row = 0; row < 5; ++row)
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t d = 0; d < 4; ++d) {
        const At key = row < 2 ? At{0, 2 + row, h, d} : At{1, 3 + row - 2, h, d};
        packed.set(TESSERA_K_NEW, {0, row, h, d}, number(TESSERA_K, key));
        packed.set(TESSERA_V_NEW, {0, row, h, d}, number(TESSERA_V, key));
      }
  expect_same_answer(padded, dense);
  expect_same_answer(packed, dense);
  EXPECT_TRUE(std::isnan(packed.get(TESSERA_K, {2, 2, 0, 0})));
}
TEST(Cache, MasksCountInsideTheSequence) {
  const std::string mask = "mask=causal&keep(b,1,q,k)&exclude_keys&documents bias=b,1,q,k";
  Case dense("forward f64 b2 h2 q3 k8 d4 seqused=k[8,4] " + mask);
  Case cache("decode f64 b2 h2 q3 k8 d4 append cache_lens=[7,6] left_pad=[2,5] cache_batch_idx=[1,0] slots=12 " + mask);
  fill_dense(dense);
  fill_cache(cache, {5, 1}, [](int64_t b, int64_t j) { return Slot{1 - b, j + (b == 0 ? 2 : 5)}; });
  for (const int name : {TESSERA_KEEP, TESSERA_EXCLUDE_KEYS, TESSERA_DOCUMENTS_Q, TESSERA_DOCUMENTS_K, TESSERA_BIAS})
    cache.each_is(name, [&](At i) { return dense.get(name, i); });
  expect_same_answer(cache, dense);
}
TEST(Cache, NothingAtAll) {
  Case none("decode f64 b2 h2 q2 n2 k4 d4 mask=causal append cache_lens=[0,3] left_pad=[0,3] seqused=n[0,0]");
  fill_cache(none, {0, 0}, row_and_slot);
  none.run();
  for (const double x : none.values(TESSERA_OUT)) EXPECT_EQ(x, 0);
  for (const double x : none.values(TESSERA_LSE)) EXPECT_EQ(x, -infinity);
}
TEST(Cache, AppendIsInEveryHeadOfASample) {
  Case c("decode f64 b2 h2 q1 k4 d4 append cache_lens=[2,2]");
  fill_cache(c, {2, 2}, row_and_slot);
  c.run({.sample_pairs = 1});
  EXPECT_TRUE(holds_key(c, 0, 2, {0, 2}));
  EXPECT_TRUE(holds_key(c, 1, 2, {1, 2}));
  EXPECT_TRUE(std::isnan(c.get(TESSERA_OUT, {1, 0, 0, 0})));
}

TEST(Cache, ValuesInKeys) {
  Case dense("forward f64 h4/1 q2 k6 d6/4 mask=causal");
  Case cache("decode f64 h4/1 q2 k6 d6/4 mask=causal append v_in_k cache_lens=[4]");
  fill_dense(dense);
  dense.each_is(TESSERA_V, [](At i) { return number(TESSERA_K, i); });
  fill_queries(cache);
  for (int64_t d = 0; d < 6; ++d) {
    for (int64_t j = 0; j < 4; ++j) cache.set(TESSERA_K, {0, j, 0, d}, number(TESSERA_K, {0, j, 0, d}));
    for (int64_t n = 0; n < 2; ++n) cache.set(TESSERA_K_NEW, {0, n, 0, d}, number(TESSERA_K, {0, 4 + n, 0, d}));
  }
  expect_same_answer(cache, dense);
}

// ------------------------------------------------------------------------------------------------- rotation

// A new key of numbers 1 to 6 after `before` keys, with cos and sin of a quarter turn at position 1 and of none at 0.
std::vector<double> turned(const std::string& options, const std::string& before) {
  Case c("append f64 n1 k8 d6 cache_lens=[" + before + "] " + options);
  c.each_is(TESSERA_COS, [](At i) { return i[1] == 1 ? 0 : 1; });
  c.each_is(TESSERA_SIN, [](At i) { return i[1] == 1 ? 1 : 0; });
  c.each_is(TESSERA_K_NEW, [](At i) { return static_cast<double>(i[3]) + 1; });
  c.each_is(TESSERA_V_NEW, [](At i) { return static_cast<double>(i[3]) + 1; });
  c.run();
  const auto slot = std::stoll(before);
  std::vector<double> row;
  for (int64_t d = 0; d < 6; ++d) {
    row.push_back(c.get(TESSERA_K, {0, slot, 0, d}));
    EXPECT_EQ(c.get(TESSERA_V, {0, slot, 0, d}), static_cast<double>(d + 1));  // values are not turned
  }
  return row;
}
TEST(Rotary, QuarterTurns) {
  using Row = std::vector<double>;
  EXPECT_EQ(turned("rotary=6", "1"), (Row{-4, -5, -6, 1, 2, 3}));
  EXPECT_EQ(turned("rotary=6:interleaved", "1"), (Row{-2, 1, -4, 3, -6, 5}));
  EXPECT_EQ(turned("rotary=4", "1"), (Row{-3, -4, 1, 2, 5, 6}));
  EXPECT_EQ(turned("rotary=4:interleaved", "1"), (Row{-2, 1, -4, 3, 5, 6}));
  EXPECT_EQ(turned("rotary=2", "1"), (Row{-2, 1, 3, 4, 5, 6}));
  for (const char* other : {"0", "2"}) EXPECT_EQ(turned("rotary=6", other), (Row{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(turned("rotary=6 left_pad=[2]", "3"), (Row{-4, -5, -6, 1, 2, 3}));  // position 1 in slot 3
  EXPECT_EQ(turned("rotary=6 left_pad=[1]", "1"), (Row{1, 2, 3, 4, 5, 6}));
}

double angle(int64_t position, int64_t pair) {
  return static_cast<double>(position) * std::pow(0.3, static_cast<double>(pair));
}
void fill_angles(Case& c) {
  c.each_is(TESSERA_COS, [](At i) { return std::cos(angle(i[1], i[3])); });
  c.each_is(TESSERA_SIN, [](At i) { return std::sin(angle(i[1], i[3])); });
}
// Number d of a row of 6 turned by hand: its first 4 numbers, pairs (0,2) (1,3), or (0,1) (2,3).
double turned_number(int name, At i, int64_t position, bool interleaved) {
  const int64_t d = i[3];
  if (d >= 4) return number(name, i);
  const int64_t pair = interleaved ? d / 2 : d % 2, other = interleaved ? d ^ 1 : (d + 2) % 4;
  const bool is_first = other > d;
  const double mine = number(name, i), its = number(name, {i[0], i[1], i[2], other});
  const double c = std::cos(angle(position, pair)), s = std::sin(angle(position, pair));
  return is_first ? mine * c - its * s : its * s + mine * c;
}
TEST(Rotary, QueriesAndNewKeysAtTheirPositions) {
  for (const bool interleaved : {false, true})
    for (const int64_t before : {0, 3}) {
      const std::string sizes = "f64 b1 h4/2 q3 k9 d6 mask=causal", keys = std::to_string(before + 3);
      Case dense("forward " + sizes + " seqused=k[" + keys + "]");
      Case cache("decode " + sizes + " append cache_lens=[" + std::to_string(before + 2) + "] left_pad=[2] slots=12 " +
                 (interleaved ? "rotary=4:interleaved:f64" : "rotary=4:half:f64"));
      fill_angles(cache);
      fill_dense(dense);
      dense.each_is(TESSERA_Q, [&](At i) { return turned_number(TESSERA_Q, i, i[1] + before, interleaved); });
      dense.each_is(TESSERA_K, [&](At i) {  // old keys were turned as they came
        return i[1] < before ? number(TESSERA_K, i) : turned_number(TESSERA_K, i, i[1], interleaved);
      });
      fill_cache(cache, {before}, [](int64_t b, int64_t j) { return Slot{b, j + 2}; });
      expect_same_answer(cache, dense);
    }
}
TEST(Rotary, QueriesFollowTheCorner) {
  Case dense("forward f64 b2 q2 k4 d6 mask=causal@at[1,5]");
  Case cache("decode f64 b2 q2 k4 d6 mask=causal@at[1,5] cache_lens=[4] rotary=4:f64 positions=7");
  fill_angles(cache);
  fill_dense(dense);
  dense.each_is(TESSERA_Q, [&](At i) { return turned_number(TESSERA_Q, i, i[1] + (i[0] == 0 ? 1 : 5), false); });
  fill_cache(cache, {4, 4}, row_and_slot);
  expect_same_answer(cache, dense);
}
TEST(Rotary, WithoutKeysTheTablesAreNotRead) {
  Case c("decode f64 q3 k4 d4 mask=causal@at(2147483647) cache_lens=[0] rotary=4 positions=2");
  c.run();
  for (const double x : c.values(TESSERA_OUT)) EXPECT_EQ(x, 0);
}
TEST(Rotary, IsRoundedOnceAsItIsStored) {
  Case c("append bf16 n1 k1 d2 cache_lens=[0] rotary=2");
  c.set(TESSERA_K_NEW, {0, 0, 0, 0}, 1.5);
  c.set(TESSERA_K_NEW, {0, 0, 0, 1}, 1.25);
  c.all(TESSERA_COS, 0.4);
  c.all(TESSERA_SIN, 0.3);
  c.run();
  const double cos = static_cast<float>(0.4), sin = static_cast<float>(0.3);
  EXPECT_EQ(c.get(TESSERA_K, {0, 0, 0, 0}), rounded(TESSERA_BF16, 1.5 * cos - 1.25 * sin));
  EXPECT_EQ(c.get(TESSERA_K, {0, 0, 0, 1}), rounded(TESSERA_BF16, 1.5 * sin + 1.25 * cos));
}
TEST(Rotary, NaiveRoundsTheTurnedQuery) {
  // The turned query is (1 + 2^-9, 0, ..), which bf16 has not; with one key, out is v and lse the score.
  Case c("decode bf16 h1 q1 k1 d2 cache_lens=[1] rotary=2 scale=1");
  c.set(TESSERA_Q, {0, 0, 0, 0}, 1);
  c.set(TESSERA_Q, {0, 0, 0, 1}, 0);
  c.all(TESSERA_COS, 1 + 0x1p-9);
  c.all(TESSERA_SIN, 0);
  c.all(TESSERA_K, 1);
  c.run();
  EXPECT_EQ(c.get(TESSERA_LSE, {0, 0, 0, 0}), 1 + 0x1p-9);
  naive(c.p, c.bound, {});
  EXPECT_EQ(c.get(TESSERA_LSE, {0, 0, 0, 0}), 1);
}

// ----------------------------------------------------------------------------------------------------- e4m3

TEST(Quantised, KeysAndValuesAreNumbersTimesScales) {
  for (const char* scales : {"e4m3", "e4m3:tensor", "e4m3:head", "e4m3:token", "e4m3:token_head", "e4m3:head/token"})
    for (const char* pages : {"", " page=2 pages=4 page_table=[1,3,2,0]"}) {
      Case dense("forward f64 b2 h4/2 q2 k4 d4/3 mask=causal");
      Case cache(std::string("decode f64 b2 h4/2 q2 k4 d4/3 mask=causal cache_lens=[4,4] kv=") + scales + pages);
      fill_queries(dense);
      fill_queries(cache);
      constexpr int64_t table[2][2] = {{1, 3}, {2, 0}};
      for (const auto& [name, scale] : {std::pair{TESSERA_K, TESSERA_K_SCALE}, std::pair{TESSERA_V, TESSERA_V_SCALE}}) {
        const int number_name = name, scale_name = scale;
        dense.each_is(number_name, [&](At i) {
          const At at = *pages ? At{table[i[0]][i[1] / 2], i[1] % 2, i[2], i[3]} : i;
          const double factor = core::has(cache.p, scale_name) ? cache.get(scale_name, {at[0], at[1], at[2], 0}) : 1;
          return factor * cache.get(number_name, at);
        });
      }
      expect_same_answer(cache, dense);
    }
}
TEST(Quantised, AppendDividesByTheScaleOfItsSlot) {
  Case c("append f32 h2 n2 k4 d2/1 cache_lens=[1] kv=e4m3:token/head");
  c.each_is(TESSERA_K_SCALE, [](At i) { return i[1] == 1 ? 0.5 : 4; });
  c.each_is(TESSERA_V_SCALE, [](At i) { return i[2] == 0 ? 2 : 0.25; });
  c.all(TESSERA_K_NEW, 3.3);
  c.all(TESSERA_V_NEW, -20);
  c.run();
  EXPECT_EQ(c.get(TESSERA_K, {0, 1, 1, 1}), 6.5);     // 6.6, steps of 0.5
  EXPECT_EQ(c.get(TESSERA_K, {0, 2, 0, 0}), 0.8125);  // 0.825, steps of 0.0625
  EXPECT_EQ(c.get(TESSERA_V, {0, 1, 0, 0}), -10);
  EXPECT_EQ(c.get(TESSERA_V, {0, 2, 1, 0}), -80);
  c.all(TESSERA_V_NEW, 1000);
  c.run();
  EXPECT_EQ(c.get(TESSERA_V, {0, 1, 0, 0}), 448);  // 500 saturates
}
TEST(Quantised, AttentionReadsWhatIsStored) {
  Case c("decode f32 q1 n1 k1 d2/1 append cache_lens=[0] kv=e4m3 scale=1");
  c.all(TESSERA_Q, 1);
  c.all(TESSERA_K_NEW, 3.3);
  c.all(TESSERA_V_NEW, -20.6);
  for (const auto engine : {oracle, naive}) {
    engine(c.p, c.bound, {});
    EXPECT_EQ(c.get(TESSERA_OUT, {0, 0, 0, 0}), -20);  // steps of 2
    EXPECT_EQ(c.get(TESSERA_LSE, {0, 0, 0, 0}), 6.5);
  }
}

// ---------------------------------------------------------------------------------------- judge and kernels

const tessera_verdict* find(const std::vector<tessera_verdict>& all, int name) {
  for (const tessera_verdict& v : all)
    if (v.name == name) return &v;
  return nullptr;
}
bool is_right(const Case& c, int name, int64_t sample_pairs = 0) {
  const auto all = verify(c.p, c.bound, sample_pairs);
  const tessera_verdict* v = find(all, name);
  EXPECT_NE(v, nullptr) << core::operand_row(name).text;
  return v && v->ok;
}
std::string wrong_ones(const Case& c, int64_t sample_pairs = 0) {
  std::string names;
  for (const tessera_verdict& v : verify(c.p, c.bound, sample_pairs))
    if (!v.ok) names += std::string(core::operand_row(v.name).text) + " ";
  return names;
}

class NaiveWithCache : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    , NaiveWithCache,
    testing::Values(
        "decode f32 b2 h4/2 q1 k40 d16 append cache_lens=[39,20]",
        "decode bf16 b2 h4/2 q5 k40 d16/8 mask=causal append cache_lens=[35,0] rotary=16 sink max",
        "decode f16 b2 h4/2 q5 k40 d16/8 mask=causal append cache_lens=[35,0] rotary=8:interleaved:f16 layout=kv",
        "decode f64 b2 h4/2 q5 k40 d16/8 mask=causal append cache_lens=[35,1] rotary=16 layout=bhsd left_pad=[3,1]",
        "decode bf16 b2 h4/2 q5 k40 d16/8 mask=causal append cache_lens=[35,0] rotary=16 kv=e4m3:token_head",
        "decode f32 b2 h8/1 q2 k40 d24/16 mask=causal append cache_lens=[38,9] v_in_k kv=e4m3:tensor",
        "decode bf16 h4/1 q3 k80 d16 mask=window(7,0) append ring slots=10 cache_lens=[71] rotary=16 page=3 pages=5 "
        "page_table=[4,2,0,1]",
        "decode f32 b2 h2 q2 k8 d4 cache_lens=[6,8] cache_batch_idx=[1,1] kv=e4m3",
        "append f32 h2 n3 k8 d4 cache_lens=[5]", "append bf16 b2 h2 n3 k8 d4/6 cache_lens=[5,0] rotary=4 kv=e4m3:head",
        "append f16 h2 k80 d64 cache_lens=[5] varlen=n[70] rotary=64"));
TEST_P(NaiveWithCache, IsRight) {
  for (const auto engine : {naive, oracle}) {
    Case c(GetParam());
    engine(c.p, c.bound, {});
    EXPECT_EQ(wrong_ones(c), "");
    EXPECT_EQ(wrong_ones(c, 1), "");
    const auto all = verify(c.p, c.bound, 0);
    EXPECT_EQ(find(all, TESSERA_K) != nullptr, core::appends(c.p));
    EXPECT_EQ(find(all, TESSERA_V) != nullptr, core::appends(c.p) && !c.p.cache.v_in_k);
  }
}
TEST(VerifyCache, LeavesTheCacheAsItIs) {
  Case c("decode bf16 h2 q2 k8 d4 append cache_lens=[5] rotary=4");
  c.run();
  c.set(TESSERA_K, {0, 6, 1, 2}, 100);
  const auto before = c.memory;
  EXPECT_FALSE(is_right(c, TESSERA_K));
  EXPECT_EQ(c.memory, before);
}
TEST(VerifyCache, FindsAWrongAppendedRow) {
  for (const char* kv : {"", " kv=e4m3", " kv=e4m3:head", " page=2 pages=5 page_table=[4,1,0,2]"}) {
    Case c(std::string("append bf16 b1 h2 n2 k8 d4 cache_lens=[5]") + kv);
    c.run();
    ASSERT_EQ(wrong_ones(c), "") << kv;
    const At last = *kv == ' ' && kv[1] == 'p' ? At{2, 0, 1, 3} : At{0, 6, 1, 3};
    const double x = c.get(TESSERA_V, last);
    c.set(TESSERA_V, last, x + 4);
    EXPECT_EQ(wrong_ones(c), "v ") << kv;
    c.set(TESSERA_V, last, nan);
    EXPECT_EQ(wrong_ones(c), "v ") << kv;
    c.set(TESSERA_V, last, x);
    EXPECT_EQ(wrong_ones(c), "") << kv;
  }
}
TEST(VerifyCache, JudgesAppendedRowsAlone) {
  Case c("append bf16 b2 h2 n2 k8 d4/3 cache_lens=[5,3]");
  c.run();
  const auto all = verify(c.p, c.bound, 0);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].elements, 2 * 2 * 2 * 4);
  EXPECT_EQ(all[1].elements, 2 * 2 * 2 * 3);
  EXPECT_EQ(verify(c.p, c.bound, 1)[0].elements, 2 * 2 * 2 * 4);  // of every head even in a sample
  c.all(TESSERA_K, nan);
  naive(c.p, c.bound, {});
  EXPECT_EQ(wrong_ones(c), "");
}
TEST(VerifyCache, FindsAttentionThatSkippedTheNewTokens) {
  Case c("decode f32 h2 q1 k8 d4 append cache_lens=[5]"), old("decode f32 h2 q1 k8 d4 cache_lens=[5]");
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V}) old.each_is(name, [&](At i) { return c.get(name, i); });
  c.run();
  old.run();
  ASSERT_EQ(wrong_ones(c), "");
  c.each_is(TESSERA_OUT, [&](At i) { return old.get(TESSERA_OUT, i); });
  EXPECT_EQ(wrong_ones(c), "out ");
}
TEST(VerifyCache, AttendsTheRowsThatShouldBeThere) {
  for (const char* v : {"d4", "d4/3 v_in_k"}) {
    Case c(std::string("decode f32 h2 q1 k8 append cache_lens=[5] ") + v);
    c.run();
    c.set(TESSERA_K, {0, 5, 1, 2}, 100);
    EXPECT_EQ(wrong_ones(c), "k ") << v;
  }
}
TEST(VerifyCache, KeysAndValuesInOneBuffer) {
  Case c("decode bf16 b2 h2 q2 k8 d4/3 mask=causal layout=kv append cache_lens=[5,3] rotary=4");
  std::vector<std::byte> pool(2 * 2 * 8 * 2 * 7, std::byte{0xFF});
  c.bound.data[TESSERA_K] = pool.data();
  c.bound.data[TESSERA_V] = pool.data() + 2 * 2 * 4;  // after the keys of both heads
  c.fill(3);
  naive(c.p, c.bound, {});
  EXPECT_EQ(wrong_ones(c), "");
}

TEST(CacheKernels, RefuseTwoTokensForOneSlot) {
  core::Hints hints = {};
  hints.kernels = "reference.naive";
  Case c("decode f32 b2 q1 k4 d2 append cache_lens=[2,2] cache_batch_idx=[1,1] cache_rows=2");
  const auto before = c.memory;
  const core::Plan plan = core::choose(kernels(), c.p, {}, hints);
  EXPECT_THROW(plan.kernel->run(plan, c.bound, nullptr), core::Error);
  EXPECT_THROW(verify(c.p, c.bound, 0), core::Error);
  EXPECT_EQ(c.memory, before);
  c.set(TESSERA_CACHE_LENS, {0, 0, 0, 0}, 3);
  plan.kernel->run(plan, c.bound, nullptr);
  EXPECT_EQ(wrong_ones(c), "");
}
TEST(CacheKernels, StepsAreThoseOfThePass) {
  core::Hints hints = {};
  hints.kernels = "reference.oracle";
  const auto steps = [&](const char* line) {
    std::string names;
    for (const core::Step& step : core::choose(kernels(), core::parse(line).problem, {}, hints).steps)
      names += std::string(step.name) + " ";
    return names;
  };
  EXPECT_EQ(steps("forward f32 q2 k4 d2"), "attend ");
  EXPECT_EQ(steps("decode f32 q2 k4 d2 append"), "append attend ");
  EXPECT_EQ(steps("append f32 n2 k4 d2"), "append ");
}

}  // namespace
}  // namespace tessera::reference
