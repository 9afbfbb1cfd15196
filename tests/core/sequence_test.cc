#include "core/sequence.h"

#include <array>

#include "core/line.h"
#include "refusal.h"

namespace tessera::core {
namespace {

// A line with the values that it gives bound.
struct Bound {
  Line line;
  Bindings bindings = {};

  explicit Bound(const char* text) : line(parse(text)) {
    for (auto& [name, values] : line.values) bindings.data[name] = values.data();
  }
  const Problem& problem() const { return line.problem; }
  int32_t& value(int name, size_t at) { return line.values.at(name)[at]; }
  Sequence at(int64_t batch) const { return sequence(problem(), bindings, batch); }
};

void expect_rows(const Rows& got, std::array<int64_t, 4> want) {
  const std::array<int64_t, 4> rows = {got.plane, got.first, got.used, got.stored};
  EXPECT_EQ(rows, want);
}

TEST(Sequence, Dense) {
  const Bound b("forward b3 q4 k7 d8 mask=causal");
  expect_rows(b.at(2).q, {2, 0, 4, 4});
  expect_rows(b.at(2).k, {2, 0, 7, 7});
  EXPECT_EQ(b.at(2).offset, 3);
  EXPECT_EQ(tail_q(b.problem(), b.bindings).stored, 0);
}

TEST(Sequence, DenseWithUsedLengths) {
  const Bound b("forward b2 q4 k7 d8 mask=causal seqused=q[1,4]k[7,0]");
  expect_rows(b.at(0).q, {0, 0, 1, 4});
  expect_rows(b.at(1).k, {1, 0, 0, 7});
  EXPECT_EQ(b.at(0).offset, 6);
  EXPECT_EQ(b.at(1).offset, -4);
}

TEST(Sequence, Packed) {
  const Bound b("forward d8 varlen=q[3,0,2]k[1,4,4] rows=q9k9 seqused=k[1,2,4] mask=causal");
  expect_rows(b.at(0).q, {0, 0, 3, 3});
  expect_rows(b.at(1).q, {0, 3, 0, 0});
  expect_rows(b.at(2).q, {0, 3, 2, 2});
  expect_rows(b.at(1).k, {0, 1, 2, 4});
  expect_rows(tail_q(b.problem(), b.bindings), {0, 5, 0, 4});
  expect_rows(tail_k(b.problem(), b.bindings), {0, 9, 0, 0});
  EXPECT_EQ(b.at(0).offset, -2);
  EXPECT_EQ(b.at(1).offset, 2);
}

TEST(Sequence, Corners) {
  EXPECT_EQ(Bound("forward q2 k5 d8 mask=causal@top_left").at(0).offset, 0);
  EXPECT_EQ(Bound("forward q2 k5 d8 mask=causal@at(-7)").at(0).offset, -7);
  EXPECT_EQ(Bound("forward q2 k5 d8 mask=causal@at[4,-9]").at(1).offset, -9);
  EXPECT_EQ(Bound("forward q2 k5 d8").at(0).offset, 0);
}

struct Wrong {
  const char* line;
  int name;
  size_t at;
  int32_t value;
  const char* says;
};
const Wrong wrongs[] = {
    {"forward d8 varlen=q[3,2]", TESSERA_CU_SEQLENS_Q, 0, 1, "cu_seqlens_q[0] is 1; it must be 0"},
    {"forward d8 varlen=k[3,2]", TESSERA_CU_SEQLENS_K, 0, -1, "cu_seqlens_k[0] is -1; it must be 0"},
    {"forward d8 varlen=q[3,2]", TESSERA_CU_SEQLENS_Q, 1, -2,
     "cu_seqlens_q[1] is -2 after 0; offsets must not decrease"},
    {"forward d8 varlen=k[3,2]", TESSERA_CU_SEQLENS_K, 2, 2, "cu_seqlens_k[2] is 2 after 3; offsets must not decrease"},
    {"forward d8 varlen=q[3,2]", TESSERA_CU_SEQLENS_Q, 1, 4,
     "cu_seqlens_q makes sequence 0 4 long; len_q promised at most 3"},
    {"forward d8 varlen=k[3,2]", TESSERA_CU_SEQLENS_K, 2, INT32_MAX,
     "cu_seqlens_k[2] is 2147483647; the operand has 5 rows"},
    {"forward d8 varlen=q[3,2]", TESSERA_CU_SEQLENS_Q, 2, 6, "cu_seqlens_q[2] is 6; the operand has 5 rows"},
    {"forward q4 d8 seqused=q[3,2]", TESSERA_SEQUSED_Q, 1, 5,
     "seqused_q[1] is 5; it must be from 0 to the sequence's 4 rows"},
    {"forward k4 d8 seqused=k[3,2]", TESSERA_SEQUSED_K, 0, -1, "seqused_k[0] is -1; it must be from 0"},
    {"forward d8 varlen=k[3,2] seqused=k[3,2]", TESSERA_SEQUSED_K, 1, 3,
     "seqused_k[1] is 3; it must be from 0 to the sequence's 2"},
};

TEST(Sequence, MalformedLengthsAreRefused) {
  for (const Wrong& w : wrongs) {
    Bound b(w.line);
    EXPECT_EQ(refusal([&] { check_lengths(b.problem(), b.bindings); }).message, "") << w.line;
    b.value(w.name, w.at) = w.value;
    expect_says(refusal([&] { check_lengths(b.problem(), b.bindings); }), TESSERA_INVALID, w.says);
  }
}

TEST(Sequence, LooserBoundsAndUnusedRowsAreLegal) {
  const Bound b("forward d8 varlen=q[3,2]k[1,1] q100 k100 rows=q50k60");
  EXPECT_EQ(refusal([&] { check_lengths(b.problem(), b.bindings); }).message, "");
}

TEST(Sequence, BandMasks) {
  const auto keeps = [](const char* line, int64_t row, int64_t key) {
    const Bound b(line);
    return band_mask(b.problem(), b.at(0)).keeps(row, key);
  };
  EXPECT_TRUE(keeps("forward q2 k5 d8 mask=causal", 0, 3));
  EXPECT_FALSE(keeps("forward q2 k5 d8 mask=causal", 0, 4));
  EXPECT_FALSE(keeps("forward q2 k5 d8 mask=causal@top_left", 0, 1));
  EXPECT_TRUE(keeps("forward q5 k5 d8 mask=window(1,0)&first(1)", 4, 0));
  EXPECT_FALSE(keeps("forward q5 k5 d8 mask=window(1,0)&first(1)", 4, 1));
  EXPECT_TRUE(keeps("forward q5 k5 d8 mask=prefix(3)", 0, 2));
  EXPECT_FALSE(keeps("forward q5 k5 d8 mask=prefix(3)", 0, 3));
  EXPECT_FALSE(keeps("forward q5 k5 d8 mask=chunk(2)", 2, 1));
  EXPECT_TRUE(keeps("forward q5 k5 d8 mask=window(9223372036854775807,9223372036854775807)", 4, 0));
  EXPECT_FALSE(keeps("forward q5 k5 d8 mask=window(-9223372036854775808,unbounded)", 4, 4));
  EXPECT_FALSE(keeps("forward q5 k5 d8 mask=window(unbounded,-9223372036854775808)", 4, 0));
  EXPECT_TRUE(keeps("forward q5 k5 d8 mask=prefix(9223372036854775807)", 0, 4));
  EXPECT_TRUE(keeps("forward q5 k5 d8 mask=chunk(9223372036854775807)", 0, 4));
  EXPECT_FALSE(keeps("forward q5 k5 d8 mask=causal seqused=k[3]", 4, 3));
}

}  // namespace
}  // namespace tessera::core
