// The CPU engine against the oracle on random problems: every instruction set, any tiles, any number of threads, with
// NaN in every byte that cannot matter and tight allocations.
#include <cstdlib>

#include "engine.h"
#include "random_line.h"

namespace tessera::test {
namespace {

void check_lines(const std::string& pass, uint64_t seed, int count) {
  Draw draw(seed);
  for (int n = 0; n < count; ++n) {
    const std::string line = random_line(draw, pass);
    SCOPED_TRACE(line);
    tools::Case c = make_case(line, static_cast<uint64_t>(n));
    for (const std::string& kernel : kernels()) {
      How how = {kernel, static_cast<int>(draw.below(4))};
      if (draw.one_in(2)) how.tile_rows = static_cast<int>(draw.of<int64_t>({1, 3, 16, 64, 200}));
      if (draw.one_in(2)) how.tile_keys = static_cast<int>(draw.of<int64_t>({1, 5, 16, 32, 64, 100, 128}));
      // The bf16 products refuse what they cannot do; then there is nothing to check.
      const bool bf16 = line.find(" bf16") != std::string::npos && pass == "forward";
      if (kernel == "cpu.avx512bf16" && !bf16) continue;
      run_all(c, how);
      expect_right(
          c, fmt::format("{} on {} threads {} tiles {}x{}", line, kernel, how.threads, how.tile_rows, how.tile_keys));
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(Property, Forward) {
  check_lines("forward", 1, 300);
}
TEST(Property, Backward) {
  check_lines("backward", 2, 200);
}

// Whatever the number of threads, twice the same bits; and what NaN poison may not touch, other rubbish may not either.
TEST(Property, BitsDoNotDependOnThreadsOrRubbish) {
  Draw draw(3);
  for (int n = 0; n < 60; ++n) {
    const std::string line = random_line(draw, n % 2 ? "backward" : "forward");
    SCOPED_TRACE(line);
    tools::Case poisoned = make_case(line, 5), plain = make_case(line, 5, false);
    run_all(poisoned, {"cpu", 1});
    const std::vector<std::byte> bits = output_bits(poisoned);
    run_all(poisoned, {"cpu", 3});
    EXPECT_EQ(bits, output_bits(poisoned));
    run_all(plain, {"cpu", 2});
    EXPECT_EQ(bits, output_bits(plain));
  }
}

}  // namespace
}  // namespace tessera::test
