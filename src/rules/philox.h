// Dropout's random words: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011), laid out so that one call serves four elements of a 16 x 16 block: (i, j), (i, j+8), (i+8, j), (i+8, j+8).
#pragma once
#include "rules/base.h"

namespace tessera::rules {

struct Words4 {
  Word at[4];
};

TESSERA_RULE Words4 philox4x32_10(Words4 counter, Word key_low, Word key_high) {
  for (int round = 0; round < 10; ++round) {
    const unsigned long long a = 0xD2511F53ull * counter.at[0];
    const unsigned long long b = 0xCD9E8D57ull * counter.at[2];
    counter = {{static_cast<Word>(b >> 32) ^ counter.at[1] ^ key_low, static_cast<Word>(b),
                static_cast<Word>(a >> 32) ^ counter.at[3] ^ key_high, static_cast<Word>(a)}};
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}

struct Dropout {
  Word key_low, key_high;
  Word offset_low;
  Word plane;                    // b * Hq + h
  unsigned long long threshold;  // keep iff word >= threshold; up to 2^32, which keeps nothing

  // The four words of elements (i, j), (i, j+8), (i+8, j), (i+8, j+8), where bit 3 of i and of j is clear.
  TESSERA_RULE Words4 words(Index i, Index j) const {
    const auto fold = [](Index x) { return static_cast<Word>((x >> 4) * 8 + (x & 7)); };
    return philox4x32_10({{fold(i), fold(j), plane, offset_low}}, key_low, key_high);
  }
  TESSERA_RULE bool keeps(Index i, Index j) const {
    return words(i & ~Index{8}, j & ~Index{8}).at[((i >> 3) & 1) * 2 + ((j >> 3) & 1)] >= threshold;
  }
};

TESSERA_RULE Dropout make_dropout(double p, unsigned long long seed, unsigned long long offset, Word plane) {
  return {static_cast<Word>(seed), static_cast<Word>(seed >> 32) ^ static_cast<Word>(offset >> 32),
          static_cast<Word>(offset), plane, static_cast<unsigned long long>(p * 4294967296.0 + 0.5)};
}

}  // namespace tessera::rules
