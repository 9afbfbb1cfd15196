// Brute force over every small shape and every combination of parts: what mask.h derives against the contract's
// formulas.
#include "rules/mask.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <vector>

namespace tessera::rules {
namespace {

// The contract, section 3, written again.
struct Formula {
  Index keys = 0, offset = 0;
  bool has_left = false, has_right = false;
  Index left = 0, right = 0;
  bool causal = false, has_prefix = false;
  Index prefix = 0, chunk = 0, first = 0;

  static Index floor(Index a, Index b) {
    Index q = a / b;
    if (a % b != 0 && a < 0) --q;
    return q;
  }
  bool keeps(Index i, Index j) const {
    const Index p = i + offset;
    if (j < 0 || j >= keys) return false;
    const bool in_window = (!has_left || p - left <= j) && (!has_right || j <= p + right);
    if (!in_window && !(j < first)) return false;
    if (causal && !(j <= p)) return false;
    if (has_prefix && !(j < prefix || j <= p)) return false;
    return chunk == 0 || floor(j, chunk) == floor(p, chunk);
  }
  BandMask band() const {
    BandMask m;
    m.keys = keys;
    m.offset = offset;
    if (has_left) m.left = left;
    if (has_right) m.right = right;
    m.causal = causal || has_prefix;
    m.prefix = has_prefix ? prefix : 0;
    m.chunked = chunk > 0;
    if (chunk) m.chunk = chunk;
    m.first = first;
    return m;
  }
  std::string text() const {
    std::ostringstream s;
    s << "keys " << keys << " offset " << offset << " left " << (has_left ? std::to_string(left) : "-") << " right "
      << (has_right ? std::to_string(right) : "-") << " causal " << causal << " prefix "
      << (has_prefix ? std::to_string(prefix) : "-") << " chunk " << chunk << " first " << first;
    return s.str();
  }
};

constexpr Index most_rows = 5, most_keys = 6;

template <class Visit>
void for_every_mask(Visit visit) {
  struct Side {
    bool given;
    Index bound;
  };
  constexpr Side sides[] = {{false, 0}, {true, -3}, {true, -1}, {true, 0}, {true, 1}, {true, 3}};
  Formula f;
  for (f.keys = 0; f.keys <= most_keys; ++f.keys)
    for (f.offset = -most_rows - 2; f.offset <= most_keys + 2; ++f.offset)
      for (const Side left : sides)
        for (const Side right : sides)
          for (const Index first : {0, 1, 3}) {
            if (first && !left.given && !right.given) continue;
            f.has_left = left.given, f.left = left.bound;
            f.has_right = right.given, f.right = right.bound;
            f.first = first;
            for (f.chunk = 0; f.chunk <= 3; ++f.chunk)
              for (const int frontier : {-2, -1, 0, 2, 9}) {  // none, causal, prefix(n)
                f.causal = frontier == -1;
                f.has_prefix = frontier >= 0;
                f.prefix = frontier;
                visit(f);
              }
          }
}

// The first broken promise of one mask, or nothing.
const char* broken(const Formula& f) {
  const BandMask m = f.band();
  bool kept[most_rows][most_keys + 1] = {};
  for (Index i = 0; i < most_rows; ++i)
    for (Index j = -2; j < most_keys + 2; ++j) {
      const bool want = f.keeps(i, j);
      if (m.keeps(i, j) != want) return "keeps";
      if (j >= 0 && j <= most_keys) kept[i][j] = want;
    }
  for (Index i = 1; i < most_rows; ++i)
    for (const bool head : {false, true}) {
      const Range above = head ? m.head(i - 1) : m.near(i - 1), below = head ? m.head(i) : m.near(i);
      if (below.begin < above.begin || below.end < above.end) return "ends that never move left";
    }
  for (Index begin = 0; begin < most_rows; ++begin)
    for (Index end = begin + 1; end <= most_rows; ++end) {
      const Visit v = visit(m, {begin, end});
      if (!Range{0, f.keys}.covers(v.head) || !Range{0, f.keys}.covers(v.near)) return "visited keys exist";
      if (!v.head.empty() && !v.near.empty() && v.head.end > v.near.begin) return "head and near are in order";
      for (Index j = 0; j < f.keys; ++j) {
        bool any = false, all = true;
        for (Index i = begin; i < end; ++i) any |= kept[i][j], all &= kept[i][j];
        const bool visited = v.head.has(j) || v.near.has(j);
        if (any && !visited) return "visited covers kept";
        const bool seen = visited && (!hulls_have_gaps(m) || some_row_sees(m, {begin, end}, j));
        if (seen != any) return "what is seen is exact";
        if (end - begin == 1 && visited != any) return "one row's visit is exact";
        if (v.full.has(j) && !all) return "full implies that all keep";
        if (f.first == 0 && v.full.has(j) != all) return "full is exact without first";
      }
      for (Index j = 0; j < f.keys; ++j)
        for (Index stop = j + 1; stop <= f.keys; ++stop) {
          const Range rows = rows_visiting(m, {begin, end}, {j, stop});
          if (!Range{begin, end}.covers(rows)) return "rows_visiting stays inside";
          for (Index i = begin; i < end; ++i)
            for (Index key = j; key < stop; ++key)
              if (kept[i][key] && !rows.has(i)) return "rows_visiting covers";
        }
    }
  return nullptr;
}

TEST(Mask, EverySmallMaskKeepsItsPromises) {
  int masks = 0, failures = 0;
  for_every_mask([&](const Formula& f) {
    ++masks;
    if (const char* promise = broken(f); promise && ++failures <= 10) ADD_FAILURE() << promise << ": " << f.text();
  });
  EXPECT_EQ(failures, 0);
  EXPECT_GT(masks, 200000);
}

// Promises that say how little is visited, so that speed does not hide behind correctness.
TEST(Mask, VisitsNoMoreThanTheBand) {
  BandMask window;
  window.keys = 1000;
  window.left = 10;
  window.right = 0;
  const Visit v = visit(window, {500, 516});
  EXPECT_EQ(v.near.begin, 490);
  EXPECT_EQ(v.near.end, 516);
  EXPECT_TRUE(v.head.empty());
  window.first = 4;
  const Visit with_first = visit(window, {500, 516});
  EXPECT_EQ(with_first.head.size(), 4);
  EXPECT_EQ(with_first.near.begin, 490);
  const Range rows = rows_visiting(BandMask{.keys = 1000, .left = 10, .right = 0}, {0, 1000}, {100, 116});
  EXPECT_EQ(rows.begin, 100);
  EXPECT_EQ(rows.end, 126);
}

TEST(Mask, BoundsSaturateAndNeverWrap) {
  EXPECT_EQ(saturate(INT64_MAX), far_away);
  EXPECT_EQ(saturate(INT64_MIN), -far_away);
  EXPECT_EQ(saturate(-7), -7);
  constexpr Index last = (Index{1} << 31) - 1;  // the longest sequence's last row and key
  constexpr Index farthest = Index{1} << 31;    // offsets are int32
  for (const Index offset : {Index{0}, farthest, -farthest})
    for (const Index left : {INT64_MAX, INT64_MIN})
      for (const Index right : {INT64_MAX, INT64_MIN}) {
        BandMask m;
        m.keys = last + 1;
        m.offset = offset;
        m.left = saturate(left);
        m.right = saturate(right);
        for (const Index row : {Index{0}, last})
          for (const Index key : {Index{0}, last})
            EXPECT_EQ(m.keeps(row, key), left > 0 && right > 0) << offset << " " << left << " " << right;
        EXPECT_EQ(visit(m, {0, last + 1}).near.size(), left > 0 && right > 0 ? last + 1 : 0);
      }
}

// The same text in 32 bits: small masks whole, and corners, windows and chunks as far as they go at both ends of the
// longest sequence. (UBSan sees a sum that wraps.)
TEST(Mask, SaysTheSameIn32Bits) {
  const auto same = [](const auto& narrow, const auto& wide) {
    return narrow.empty() ? wide.empty() : narrow.begin == wide.begin && narrow.end == wide.end;
  };
  int differ = 0;
  for_every_mask([&](const Formula& f) {
    const BandMask wide = f.band();
    const NarrowBand narrow = narrowed(wide);
    bool alike = can_narrow(wide);
    for (int row = 0; row < most_rows; ++row)
      alike = alike && same(narrow.near(row), wide.near(row)) && same(narrow.head(row), wide.head(row));
    const auto small = visit_of<int>(narrow, {0, most_rows});
    const Visit large = visit(wide, {0, most_rows});
    alike = alike && same(small.near, large.near) && same(small.head, large.head) && same(small.full, large.full);
    if (!alike && ++differ <= 10) ADD_FAILURE() << f.text();
  });
  EXPECT_EQ(differ, 0);

  constexpr Index most = narrow_length, last = most - 1;
  for (const Index offset : {Index{0}, Index{5}, most, -most, Index{1} << 31, -(Index{1} << 31)})
    for (const Index left : {Index{0}, most, far_away})
      for (const Index right : {Index{0}, most, far_away})
        for (const Index chunk : {Index{0}, Index{3}, most})
          for (const Index prefix : {Index{0}, most, far_away})
            for (const Index first : {Index{0}, Index{4}, far_away})
              for (const bool causal : {false, true}) {
                const BandMask wide = {.keys = most,
                                       .offset = offset,
                                       .left = left,
                                       .right = right,
                                       .chunk = chunk ? chunk : far_away,
                                       .prefix = prefix,
                                       .first = first,
                                       .causal = causal,
                                       .chunked = chunk > 0};
                ASSERT_TRUE(can_narrow(wide));
                const NarrowBand narrow = narrowed(wide);
                for (const Index row : {Index{0}, last})
                  for (const Index key : {Index{0}, last})
                    EXPECT_EQ(narrow.keeps(static_cast<int>(row), static_cast<int>(key)), wide.keeps(row, key))
                        << offset << " " << left << " " << right << " " << chunk << " " << prefix << " " << first << " "
                        << causal << ", row " << row << " key " << key;
              }
  EXPECT_FALSE(can_narrow({.left = most + 1}));
  EXPECT_FALSE(can_narrow({.right = far_away - 1}));
  EXPECT_FALSE(can_narrow({.chunk = most + 1}));
}

TEST(Mask, FloorDivisionGoesDown) {
  for (Index a = -20; a <= 20; ++a)
    for (Index b = 1; b <= 7; ++b) {
      EXPECT_EQ(floor_div(a, b), Formula::floor(a, b));
      EXPECT_EQ(ceil_div(a, b), -Formula::floor(-a, b));
      EXPECT_EQ(round_up(a, b) % b, 0);
      EXPECT_GE(round_up(a, b), a);
      EXPECT_LT(round_up(a, b), a + b);
    }
}

static_assert(BandMask{.keys = 5, .offset = 3, .causal = true}.keeps(0, 3));
static_assert(!BandMask{.keys = 5, .offset = 3, .causal = true}.keeps(0, 4));

}  // namespace
}  // namespace tessera::rules
