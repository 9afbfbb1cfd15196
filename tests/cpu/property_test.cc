// The CPU engine against the oracle on random problems: every instruction set, any tiles, any number of threads, with
// NaN in every byte that cannot matter and tight allocations.
#include <cstdio>

#include "engine.h"
#include "tests/random_line.h"

namespace tessera::test {
namespace {

#ifdef TESSERA_SANITIZED
constexpr int scale = 8;  // sanitized runs are that much slower
#else
constexpr int scale = 1;
#endif

// Other lines: --gtest_shuffle --gtest_random_seed=N.
uint64_t other_lines() {
  if (!GTEST_FLAG_GET(shuffle)) return 0;  // the seed is the clock's then
  return static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed()) * 1000;
}

template <class RandomLine>
void check_lines(RandomLine&& random, uint64_t seed, int count) {
  Draw draw(seed + other_lines());
  int runs = 0, luck = 0;
  for (int n = 0; n < count; ++n) {
    const std::string line = random(draw);
    SCOPED_TRACE(line);
    tools::Case c = make_case(line, static_cast<uint64_t>(n));
    for (const std::string& kernel : kernels()) {
      How how = {kernel, static_cast<int>(draw.below(4))};
      if (draw.one_in(2)) how.tile_rows = static_cast<int>(draw.of<int64_t>({1, 3, 16, 64, 200}));
      if (draw.one_in(2)) how.tile_keys = static_cast<int>(draw.of<int64_t>({1, 5, 16, 32, 64, 100, 128}));
      // The bf16 products refuse what they cannot do; then there is nothing to check.
      const bool bf16 = line.find(" bf16 ") != std::string::npos && !line.starts_with("backward") &&
                        !line.starts_with("append") && line.find("e4m3") == std::string::npos;
      if (kernel == "cpu.avx512bf16" && !bf16) continue;
      run_all(c, how);
      const tools::Judgement judged = tools::judge(c, 0);
      ++runs;
      if (!judged.ok && tools::judge_with_others(tools::Line(line), how, 0, judged).ok) ++luck;
      else
        expect_right(judged, fmt::format("{} on {} threads {} tiles {}x{}", line, kernel, how.threads, how.tile_rows,
                                         how.tile_keys));
      if (testing::Test::HasFailure()) return;
    }
  }
  // One may be bad luck in any number of runs; sanitized builds make few.
  EXPECT_LE(luck, std::max(1, runs / 100)) << "more bad luck than luck explains";
  std::printf("%d runs judged, %d past the bound by luck\n", runs, luck);
}

TEST(Property, Forward) {
  check_lines([](Draw& draw) { return random_line(draw, "forward"); }, 1, 1200 / scale);
}
TEST(Property, Backward) {
  check_lines([](Draw& draw) { return random_line(draw, "backward"); }, 2, 300 / scale);
}
TEST(Property, Caches) {
  check_lines(random_cache_line, 4, 1200 / scale);
}

// Whatever the number of threads, twice the same bits; and what NaN poison may not touch, other rubbish may not either.
TEST(Property, BitsDoNotDependOnThreadsOrRubbish) {
  Draw draw(3 + other_lines());
  for (int n = 0; n < 360 / scale; ++n) {
    const std::string line =
        n % 3 == 2 ? random_cache_line(draw) : random_line(draw, n % 3 == 1 ? "backward" : "forward");
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
