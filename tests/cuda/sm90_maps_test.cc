// Hopper's forward kernel: what its copy engine is told of operands, through the fake driver.
#include <fmt/format.h>

#include <array>
#include <cstring>

#include "on_fake.h"

namespace tessera::cuda {
namespace {

using test::Case;
using test::with_driver;

void expect_map(const rules::TensorMap& map, const void* address, std::array<uint64_t, 4> extents,
                std::array<uint64_t, 3> strides, uint32_t rows, int dtype = map_bf16) {
  FakeMap made;
  ASSERT_TRUE(fake_map(map, &made));
  EXPECT_EQ(made.address, address);
  EXPECT_EQ(made.dtype, dtype);
  EXPECT_EQ(std::to_array(made.extents), extents);
  EXPECT_EQ(std::to_array(made.strides), strides);
  EXPECT_EQ(std::to_array(made.box), (std::array<uint32_t, 4>{64, rows, 1, 1}));
  EXPECT_EQ(made.interleave, map_no_interleave);
  EXPECT_EQ(made.swizzle, map_swizzle_128);
  EXPECT_EQ(made.promotion, map_promote_256);
  EXPECT_EQ(made.fill, map_fill_zeros);
}
bool is_zeros(const rules::TensorMap& map) {
  constexpr rules::TensorMap zeros = {};
  return std::memcmp(&map, &zeros, sizeof map) == 0;
}

TEST(Sm90Maps, OfLayouts) {
  with_driver([] {
    const auto expect = [](const Case& c, std::array<uint64_t, 3> q, std::array<uint64_t, 3> k) {
      const rules::Sm90ForwardParams p = c.launch().sm90;
      expect_map(p.q_map, c.bindings.data[TESSERA_Q], {128, 300, 4, 2}, q, 64);
      expect_map(p.k_map, c.bindings.data[TESSERA_K], {128, 300, 2, 2}, k, 128);
      expect_map(p.v_map, c.bindings.data[TESSERA_V], {128, 300, 2, 2}, k, 128);
    };
    expect(Case("forward bf16 b2 h4/2 q300 k300 d128"), {1024, 256, 307200}, {512, 256, 153600});
    expect(Case("forward bf16 b2 h4/2 q300 k300 d128 layout=bhsd"), {256, 76800, 307200}, {256, 76800, 153600});
    expect(Case("forward bf16 b2 h4/2 q300 k300 d128 layout=qkv"), {2048, 256, 614400}, {2048, 256, 614400});

    const Case half("forward f16 h3/1 q2 k5 d64");
    const rules::Sm90ForwardParams p = half.launch().sm90;
    expect_map(p.q_map, half.bindings.data[TESSERA_Q], {64, 2, 3, 1}, {384, 128, 128}, 64, map_f16);
    expect_map(p.v_map, half.bindings.data[TESSERA_V], {64, 5, 1, 1}, {128, 128, 128}, 128, map_f16);

    // The operands' own dims: what the kernel has more is out of bounds, and zeros. 192 x 80 tiles.
    const Case odd("forward bf16 b56 h5/1 q2 k7000 d120/104");
    const rules::Sm90ForwardParams o = odd.launch().sm90;
    expect_map(o.q_map, odd.bindings.data[TESSERA_Q], {120, 2, 5, 56}, {1200, 240, 2400}, 64);
    expect_map(o.k_map, odd.bindings.data[TESSERA_K], {120, 7000, 1, 56}, {240, 240, 1680000}, 80);
    expect_map(o.v_map, odd.bindings.data[TESSERA_V], {104, 7000, 1, 56}, {208, 208, 1456000}, 80);
  });
}

// (key, query, head, batch), of which one that repeats has one element and is never stepped along.
TEST(Sm90Maps, OfBiasesAndKeepMasks) {
  const struct {
    const char* line;
    int name;
    std::array<uint64_t, 4> extents;
    std::array<uint64_t, 3> strides;
    std::array<uint32_t, 4> box;
    int type, swizzle;
    std::array<int, 3> steps;  // query, head, batch
    int bytes;
  } rows[] = {
      {"forward bf16 b2 h3 q100 k264 d64 bias=b,h,q,k",
       TESSERA_BIAS,
       {264, 100, 3, 2},
       {528, 52800, 158400},
       {64, 64, 1, 1},
       map_bf16,
       map_swizzle_128,
       {1, 1, 1},
       64 * 128 * 2},
      {"forward f16 b2 h3 q100 k7 d64 bias=1,1,1,k",
       TESSERA_BIAS,
       {7, 1, 1, 1},
       {16, 16, 16},
       {64, 1, 1, 1},
       map_f16,
       map_swizzle_128,
       {0, 0, 0},
       128 * 2},
      {"forward bf16 b2 h3 q5 k8 d256 bias=b,h,q,k strides=bias[0,40,8,1]",
       TESSERA_BIAS,
       {8, 5, 3, 1},
       {16, 80, 16},
       {64, 64, 1, 1},
       map_bf16,
       map_swizzle_128,
       {1, 1, 0},
       64 * 64 * 2},
      {"forward bf16 b2 h3 q100 k272 d64 mask=keep(b,1,q,k)",
       TESSERA_KEEP,
       {272, 100, 1, 2},
       {272, 272, 27200},
       {128, 64, 1, 1},
       map_u8,
       map_swizzle_128,
       {1, 0, 1},
       64 * 128},
      {"forward bf16 b2 h3 q100 k272 d256 mask=keep(1,h,q,k)",
       TESSERA_KEEP,
       {272, 100, 3, 1},
       {272, 27200, 272},
       {64, 64, 1, 1},
       map_u8,
       map_swizzle_64,
       {1, 1, 0},
       64 * 64},
  };
  with_driver([&] {
    for (const auto& row : rows) {
      const Case c(row.line);
      const rules::Sm90PairParams p = c.launch().sm90.pairs;
      const rules::GridMap &grid = row.name == TESSERA_BIAS ? p.bias : p.keep,
                           &other = row.name == TESSERA_BIAS ? p.keep : p.bias;
      FakeMap made;
      ASSERT_TRUE(fake_map(grid.map, &made)) << row.line;
      EXPECT_EQ(made.address, c.bindings.data[row.name]) << row.line;
      EXPECT_EQ(made.dtype, row.type) << row.line;
      EXPECT_EQ(std::to_array(made.extents), row.extents) << row.line;
      EXPECT_EQ(std::to_array(made.strides), row.strides) << row.line;
      EXPECT_EQ(std::to_array(made.box), row.box) << row.line;
      EXPECT_EQ(made.swizzle, row.swizzle) << row.line;
      EXPECT_EQ((std::array{grid.query, grid.head, grid.batch}), row.steps) << row.line;
      EXPECT_EQ(grid.bytes, row.bytes) << row.line;
      EXPECT_TRUE(is_zeros(other.map)) << row.line;
      EXPECT_EQ(other.bytes, 0) << row.line;
    }
  });
}

// A box is what both a page and a tile are multiples of.
TEST(Sm90Maps, OfPages) {
  with_driver([] {
    for (const auto& [page, rows] : {std::pair(7, 1), std::pair(16, 16), std::pair(48, 16), std::pair(100, 4),
                                     std::pair(128, 128), std::pair(256, 128)}) {
      const Case c(fmt::format("decode bf16 b2 h4/2 q64 k100 d64 page={} pages=9", page).c_str());
      const rules::Sm90ForwardParams p = c.launch().sm90;
      EXPECT_EQ(p.page_rows, rows);
      const auto size = static_cast<uint64_t>(page);
      expect_map(p.k_map, c.bindings.data[TESSERA_K], {64, size, 2, 9}, {256, 128, size * 256},
                 static_cast<uint32_t>(rows));
      expect_map(p.v_map, c.bindings.data[TESSERA_V], {64, size, 2, 9}, {256, 128, size * 256},
                 static_cast<uint32_t>(rows));
      EXPECT_EQ(p.cache.table, c.bindings.data[TESSERA_PAGE_TABLE]);
      EXPECT_EQ(p.cache.page, page);
      EXPECT_EQ(p.cache.pages, 9);
    }
  });
}

// A map has a stride for each dimension, and some would be refused that nobody reads.
TEST(Sm90Maps, StridesOfOneElementAreNotRead) {
  with_driver([] {
    const Case c("forward bf16 b1 h1 q1 k4 d64 strides=q[3,5,0,1]k[0,72,7,1]");
    const rules::Sm90ForwardParams p = c.launch().sm90;
    expect_map(p.q_map, c.bindings.data[TESSERA_Q], {64, 1, 1, 1}, {128, 128, 128}, 64);
    expect_map(p.k_map, c.bindings.data[TESSERA_K], {64, 4, 1, 1}, {144, 128, 128}, 128);
  });
}

TEST(Sm90Maps, PackedOperandsHaveOnePlane) {
  with_driver([] {
    const Case c("forward bf16 h4/2 d64 varlen=q[100,200,0]k[50,60,70]");
    const std::vector<FakeLaunch> all = c.launches();
    ASSERT_FALSE(all.empty());
    const rules::Sm90ForwardParams& p = all[0].sm90;
    expect_map(p.q_map, c.bindings.data[TESSERA_Q], {64, 300, 4, 1}, {512, 128, 128}, 64);
    expect_map(p.k_map, c.bindings.data[TESSERA_K], {64, 180, 2, 1}, {256, 128, 128}, 128);
  });
}

TEST(Sm90Maps, OfNoKeys) {
  with_driver([] {
    const Case c("forward bf16 b2 h4 q300 k0 d128");
    const rules::Sm90ForwardParams p = c.launch().sm90;
    EXPECT_EQ(c.bindings.data[TESSERA_K], nullptr);
    EXPECT_FALSE(is_zeros(p.q_map));
    EXPECT_TRUE(is_zeros(p.k_map));
    EXPECT_TRUE(is_zeros(p.v_map));
  });
}

TEST(Sm90Maps, AMapThatTheDriverRefuses) {
  with_driver({{"FAKE_CUDA_MAP", "1"}}, [] {
    const Case c("forward bf16 b2 h4/2 q300 k200 d128");
    c.expect_refused(TESSERA_FAILED,
                     "making a tensor map of q, extents 128 300 4 2 and strides 1024 256 307200 in bytes: "
                     "the CUDA driver says 1 (invalid argument)");
    ::unsetenv("FAKE_CUDA_MAP");
    EXPECT_EQ(c.launch().grid[0], 24u);
  });
}

}  // namespace
}  // namespace tessera::cuda
