// Masks for a person: the keep-grid and the dropout mask of one (batch, head).
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "calls.h"

namespace tessera::test {
namespace {

// The grid of (batch, head) as rows of 0 and 1, with "/" between rows.
std::string grid_of(const tessera_line* line, const tessera_bindings& b, int64_t batch = 0, int64_t head = 0) {
  const tessera_problem* p = tessera_line_problem(line);
  std::vector<uint8_t> grid(static_cast<size_t>(p->len_q * p->len_k), 9);
  expect_ok([&](tessera_error* e) { return tessera_mask_grid(p, &b, batch, head, grid.data(), e); });
  std::string text;
  for (size_t n = 0; n < grid.size(); ++n)
    text += std::string(n && n % static_cast<size_t>(p->len_k) == 0 ? "/" : "") + static_cast<char>('0' + grid[n]);
  return text;
}
std::string grid_of(const char* text, int64_t batch = 0) {
  const Line line = parse(text);
  return grid_of(line.get(), bindings_of(line.get()), batch);
}

TEST(MaskGrid, Bands) {
  EXPECT_EQ(grid_of("forward f32 q2 k5 d1 mask=causal"), "11110/11111");
  EXPECT_EQ(grid_of("forward f32 q2 k5 d1 mask=causal@top_left"), "10000/11000");
  EXPECT_EQ(grid_of("forward f32 q5 k2 d1 mask=causal"), "00/00/00/10/11");
  EXPECT_EQ(grid_of("forward f32 q2 k3 d1"), "111/111");
  EXPECT_EQ(grid_of("forward q3 k3 d1 mask=window(1,0)"), "100/110/011");
  EXPECT_EQ(grid_of("forward q3 k3 d1 mask=window(0,0)&first(1)"), "100/110/101");
  EXPECT_EQ(grid_of("forward q3 k3 d1 mask=prefix(2)"), "110/110/111");
  EXPECT_EQ(grid_of("forward q4 k4 d1 mask=chunk(2)"), "1100/1100/0011/0011");
  EXPECT_EQ(grid_of("forward q2 k3 d1 mask=causal@at[0,-1]", 1), "000/100");
}

TEST(MaskGrid, RowsAndKeysThatAreNotUsed) {
  EXPECT_EQ(grid_of("forward b2 q2 k3 d1 seqused=q[1,2]k[2,3]", 0), "110/000");
  EXPECT_EQ(grid_of("forward d1 varlen=q[1,2]k[3,1]", 0), "111/000");
  EXPECT_EQ(grid_of("forward d1 varlen=q[1,2]k[3,1]", 1), "100/100");
}

TEST(MaskGrid, ElementParts) {
  const Line keep = parse("forward h2 q2 k3 d1 mask=keep(1,h,q,k)");
  tessera_bindings b = bindings_of(keep.get());
  uint8_t kept[] = {1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0};
  b.data[TESSERA_KEEP] = kept;
  EXPECT_EQ(grid_of(keep.get(), b, 0, 0), "101/000");
  EXPECT_EQ(grid_of(keep.get(), b, 0, 1), "111/010");

  const Line exclude = parse("forward d1 varlen=q[1,2]k[3,1] mask=exclude_keys");
  b = bindings_of(exclude.get());
  uint8_t excluded[] = {0, 1, 0, /* of sequence 1 */ 1, 0, 0};  // inside the sequence, even if packed
  b.data[TESSERA_EXCLUDE_KEYS] = excluded;
  EXPECT_EQ(grid_of(exclude.get(), b, 0), "101/000");
  EXPECT_EQ(grid_of(exclude.get(), b, 1), "000/000");

  const Line documents = parse("forward d1 varlen=q[1,2]k[3,1] mask=documents");
  b = bindings_of(documents.get());
  int32_t mine[] = {7, 4, -1}, theirs[] = {7, 4, -1, 4};  // by row
  b.data[TESSERA_DOCUMENTS_Q] = mine;
  b.data[TESSERA_DOCUMENTS_K] = theirs;
  EXPECT_EQ(grid_of(documents.get(), b, 0), "100/000");
  EXPECT_EQ(grid_of(documents.get(), b, 1), "100/000");
  theirs[3] = -1;  // equal, but no document
  EXPECT_EQ(grid_of(documents.get(), b, 1), "000/000");
}

TEST(MaskGrid, BiasOfMinusInfinityExcludesInEveryType) {
  const double d[] = {-INFINITY, -3e38, INFINITY};
  const float f[] = {-INFINITY, -3e38f, INFINITY};
  const uint16_t bf16[] = {0xFF80, 0xFF7F, 0x7F80}, f16[] = {0xFC00, 0xFBFF, 0x7C00};
  const std::pair<const char*, const void*> types[] = {{"f64", d}, {"f32", f}, {"bf16", bf16}, {"f16", f16}};
  for (const auto& [text, data] : types) {
    const Line line = parse(("forward q2 k3 d1 bias=1,1,1,k:" + std::string(text)).c_str());
    tessera_bindings b = bindings_of(line.get());
    EXPECT_EQ(grid_of(line.get(), b), "111/111") << "a bias is no part of the mask; unbound it excludes nothing";
    b.data[TESSERA_BIAS] = const_cast<void*>(data);
    EXPECT_EQ(grid_of(line.get(), b), "011/011") << text;
  }
}

TEST(MaskGrid, Refuses) {
  const auto says = [](const char* what, const char* text, int64_t batch, int64_t head, auto spoil) {
    const Line line = parse(text);
    tessera_bindings b = bindings_of(line.get());
    spoil(b);
    uint8_t grid[64];
    expect_says(TESSERA_INVALID, what, [&](tessera_error* e) {
      return tessera_mask_grid(tessera_line_problem(line.get()), &b, batch, head, grid, e);
    });
  };
  const auto nothing = [](tessera_bindings&) {};
  says("batch is 1; the problem has 1", "forward d1", 1, 0, nothing);
  says("batch is -1", "forward d1", -1, 0, nothing);
  says("head is 2; the problem has 2 query heads", "forward h2 d1", 0, 2, nothing);
  for (const char* part : {"keep", "exclude_keys", "documents"})
    says(" is bound to NULL; the mask needs it", ("forward d1 mask=" + std::string(part)).c_str(), 0, 0, nothing);
  says("corner_offsets is bound to NULL", "forward d1 mask=causal@at", 0, 0, nothing);
  says("cu_seqlens_q is bound to NULL", "forward d1 varlen=q rows=q4 q4", 0, 0, nothing);
  int32_t used[] = {9};
  says("seqused_q[0] is 9", "forward q4 d1 seqused=q", 0, 0,
       [&](tessera_bindings& b) { b.data[TESSERA_SEQUSED_Q] = used; });
}

TEST(DropoutMask, IsPhiloxOfItsPlace) {
  constexpr int64_t rows = 40, keys = 50;
  uint8_t grid[rows * keys], other[rows * keys], whole[rows * keys];
  const auto fill = [&](uint8_t* g, int64_t batch, int64_t head) {
    expect_ok([&](tessera_error* e) { return tessera_dropout_mask(0.25, 11, 1, batch, head, 4, rows, keys, g, e); });
  };
  fill(grid, 1, 2);
  fill(other, 1, 3);
  EXPECT_NE(std::memcmp(grid, other, sizeof grid), 0);
  // Plane 1 * 4 + 2 of four heads is plane 0 * 8 + 6 of eight.
  expect_ok([&](tessera_error* e) { return tessera_dropout_mask(0.25, 11, 1, 0, 6, 8, rows, keys, whole, e); });
  EXPECT_EQ(std::memcmp(grid, whole, sizeof grid), 0);
  expect_ok([&](tessera_error* e) { return tessera_dropout_mask(0, 11, 1, 0, 0, 1, rows, keys, whole, e); });
  for (const uint8_t kept : whole) EXPECT_EQ(kept, 1);
  expect_ok([&](tessera_error* e) { return tessera_dropout_mask(0.5, 0, 0, 0, 0, 1, 0, keys, nullptr, e); });
}

TEST(DropoutMask, Refuses) {
  const auto says = [](const char* what, double p, int64_t batch, int64_t head, int64_t heads, int64_t rows,
                       int64_t keys) {
    uint8_t grid[1];
    expect_says(TESSERA_INVALID, what, [&](tessera_error* e) {
      return tessera_dropout_mask(p, 0, 0, batch, head, heads, rows, keys, grid, e);
    });
  };
  says("dropout is 1; it must be at least 0 and below 1", 1, 0, 0, 1, 1, 1);
  says("dropout is nan", NAN, 0, 0, 1, 1, 1);
  says("heads_q is 0; it must be from 1", 0.5, 0, 0, 0, 1, 1);
  says("head is 3; it must be from 0 to heads_q - 1, 2", 0.5, 0, 3, 3, 1, 1);
  says("batch is -1 with 1 heads", 0.5, -1, 0, 1, 1, 1);
  says("batch is 4294967296 with 1 heads; dropout counts them in 32 bits", 0.5, int64_t{1} << 32, 0, 1, 1, 1);
  says("the mask is -1 x 1", 0.5, 0, 0, 1, -1, 1);
}

}  // namespace
}  // namespace tessera::test
