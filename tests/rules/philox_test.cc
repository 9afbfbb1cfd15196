#include "rules/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

namespace tessera::rules {
namespace {

void expect_words(Words4 counter, Word key_low, Word key_high, Words4 want) {
  const Words4 got = philox4x32_10(counter, key_low, key_high);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(got.at[i], want.at[i]) << "word " << i;
}

// The known answers of Random123, the library of the paper's authors.
TEST(Philox, KnownAnswers) {
  expect_words({{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  constexpr Word ones = 0xFFFFFFFF;
  expect_words({{ones, ones, ones, ones}}, ones, ones, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  expect_words({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0,
               {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
}

// Contract section 6, element by element.
bool kept(double p, uint64_t seed, uint64_t offset, uint64_t plane, uint64_t i, uint64_t j) {
  const auto low = [](uint64_t x) { return static_cast<Word>(x & 0xFFFFFFFF); };
  const auto high = [](uint64_t x) { return static_cast<Word>(x >> 32); };
  const Words4 counter = {{low((i / 16) * 8 + i % 8), low((j / 16) * 8 + j % 8), low(plane), low(offset)}};
  const Words4 words = philox4x32_10(counter, low(seed), high(seed) ^ high(offset));
  const double threshold = std::floor(p * std::ldexp(1, 32) + 0.5);
  return static_cast<double>(words.at[(i / 8 % 2) * 2 + j / 8 % 2]) >= threshold;
}

TEST(Dropout, IsTheContractsLayout) {
  constexpr int64_t far = int64_t{1} << 31;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{7}, 0xFEDCBA9876543210u})
    for (const uint64_t offset : {uint64_t{0}, uint64_t{1} << 32, 0x123456789ABCDEFu})
      for (const Word plane : {0u, 5u, 0xFFFFFFFFu})
        for (const int64_t corner : {int64_t{0}, far - 40}) {
          const Dropout d = make_dropout(0.3, seed, offset, plane);
          int wrong = 0;
          for (int64_t i = corner; i < corner + 36; ++i)
            for (int64_t j = 0; j < 52; ++j)
              wrong +=
                  d.keeps(i, j) != kept(0.3, seed, offset, plane, static_cast<uint64_t>(i), static_cast<uint64_t>(j));
          EXPECT_EQ(wrong, 0) << "seed " << seed << " offset " << offset << " plane " << plane << " corner " << corner;
        }
}

TEST(Dropout, OneCallServesFourElements) {
  const Dropout d = make_dropout(0.5, 42, 0, 3);
  for (Index i = 0; i < 32; i = i % 16 == 7 ? i + 9 : i + 1)
    for (Index j = 0; j < 32; j = j % 16 == 7 ? j + 9 : j + 1) {
      const Words4 words = d.words(i, j);
      const bool got[] = {d.keeps(i, j), d.keeps(i, j + 8), d.keeps(i + 8, j), d.keeps(i + 8, j + 8)};
      for (int n = 0; n < 4; ++n) EXPECT_EQ(got[n], words.at[n] >= d.threshold);
    }
}

TEST(Dropout, Thresholds) {
  EXPECT_EQ(make_dropout(0, 1, 0, 0).threshold, 0u);
  EXPECT_EQ(make_dropout(0.5, 1, 0, 0).threshold, 0x80000000u);
  EXPECT_EQ(make_dropout(0x1p-32, 1, 0, 0).threshold, 1u);
  EXPECT_EQ(make_dropout(0x1p-34, 1, 0, 0).threshold, 0u);
  EXPECT_EQ(make_dropout(std::nextafter(1.0, 0.0), 1, 0, 0).threshold, 1ull << 32);  // keeps nothing
}

TEST(Dropout, KeepsItsShare) {
  const Dropout d = make_dropout(0.1, 99, 0, 0);
  int kept = 0;
  for (Index i = 0; i < 1000; ++i)
    for (Index j = 0; j < 1000; ++j) kept += d.keeps(i, j);
  EXPECT_NEAR(kept, 900000, 5 * 300);  // five standard deviations
}

}  // namespace
}  // namespace tessera::rules
