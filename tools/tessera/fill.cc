// Random inputs. Every value is a function of (seed, operand, logical index), so that layouts do not change it.
#include <algorithm>
#include <cmath>

#include "cache.h"
#include "number.h"

namespace tessera::tools {
namespace {

// splitmix64's output function; http://xoshiro.di.unimi.it/splitmix64.c
constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// One stream for each operand; `bits(n, lane)` is its n-th value.
class Stream {
 public:
  Stream(uint64_t seed, int name) : key_(mix(seed ^ mix(static_cast<uint64_t>(name)))) {}

  uint64_t bits(uint64_t n, uint64_t lane = 0) const { return mix(key_ ^ mix(n * 8 + lane)); }
  double uniform(uint64_t n) const { return static_cast<double>(bits(n) >> 11) * 0x1p-53; }
  int64_t below(uint64_t n, int64_t bound) const {
    return bound <= 1 ? 0 : static_cast<int64_t>(bits(n) % static_cast<uint64_t>(bound));
  }
  // Normal by the sum of twelve uniforms: integers, so that every machine gets the same bits, which the logarithm and
  // cosine of Box-Muller do not promise. A thirteenth, tiny one fills the last bits of a double.
  double normal(uint64_t n) const {
    constexpr uint64_t mask = (1 << 21) - 1;
    int64_t sum = 0;
    for (uint64_t lane = 0; lane < 4; ++lane) {
      const uint64_t x = bits(n, lane);
      sum += static_cast<int64_t>((x & mask) + (x >> 21 & mask) + (x >> 42 & mask));
    }
    const auto fine = static_cast<int32_t>(bits(n, 4) >> 32);
    return (static_cast<double>(sum) - 6.0 * mask) * 0x1p-21 + fine * 0x1p-53;
  }

 private:
  uint64_t key_;
};

// Visits each element of memory once: a dimension of stride 0 has one. `n` counts as if it had all.
template <class Value>
void fill(Case& c, int name, Value value) {
  if (!c.has(name)) return;
  const tessera_operand& o = c.operand(name);
  Index distinct = extents(o);
  for (size_t d = 0; d < 4; ++d)
    if (o.stride[d] == 0) distinct[d] = std::min<int64_t>(distinct[d], 1);
  for_each_index(distinct, [&](const Index& i) {
    const int64_t n = ((i[0] * o.extent[1] + i[1]) * o.extent[2] + i[2]) * o.extent[3] + i[3];
    store(c.at(name, i), o.dtype, value(static_cast<uint64_t>(n), i));
  });
}

// Four documents of about equal length, so that those of queries and keys meet, and a token in sixteen of none.
void fill_documents(Case& c, int name, const Stream& stream) {
  fill(c, name, [&](uint64_t n, const Index& i) {
    if (stream.uniform(n) < 1.0 / 16) return -1.0;
    const double place = 4.0 * static_cast<double>(i[1]) / static_cast<double>(c.operand(name).extent[1]);
    double id = 0;
    for (uint64_t cut = 1; cut < 4; ++cut)
      id += place >=
            static_cast<double>(cut) + stream.uniform(cut + 1'000'000'007 * static_cast<uint64_t>(i[0] + 1)) - 0.5;
    return id;
  });
}

void fill_lengths(Case& c, int cu, int seqused, Side side, uint64_t seed) {
  const tessera_problem& p = c.problem();
  const int64_t longest = side == Side::query ? p.len_q : side == Side::key ? p.len_k : p.len_new;
  if (c.has(cu)) {
    int64_t left = side == Side::query ? p.rows_q : side == Side::key ? p.rows_k : p.rows_new, end = 0;
    const Stream stream(seed, cu);
    for (int64_t b = 0; b <= p.batch; ++b) {
      const int64_t length = b == 0 ? 0 : std::min(left, stream.below(static_cast<uint64_t>(b), longest + 1));
      end += length;
      left -= length;
      const auto& given = c.given(cu);
      c.value(cu, b) = given.empty() ? static_cast<int32_t>(end) : given[static_cast<size_t>(b)];
    }
  }
  if (c.has(seqused)) {
    const Stream stream(seed, seqused);
    for (int64_t b = 0; b < p.batch; ++b) c.value(seqused, b) = INT32_MAX;  // until known: all of the sequence
    const std::vector<Sequence> all = sequences(c, side);
    for (size_t b = 0; b < all.size(); ++b) {
      const auto& given = c.given(seqused);
      c.value(seqused, static_cast<int64_t>(b)) =
          given.empty() ? static_cast<int32_t>(stream.below(b, all[b].length + 1)) : given[b];
    }
  }
}

}  // namespace

void fill_random(Case& c, uint64_t seed) {
  const tessera_problem& p = c.problem();
  fill_lengths(c, TESSERA_CU_SEQLENS_Q, TESSERA_SEQUSED_Q, Side::query, seed);
  fill_lengths(c, TESSERA_CU_SEQLENS_K, TESSERA_SEQUSED_K, Side::key, seed);
  fill_lengths(c, TESSERA_CU_SEQLENS_NEW, TESSERA_SEQUSED_NEW, Side::fresh, seed);
  fill_cache(c, seed);
  fill(c, TESSERA_STATUS, [](uint64_t, const Index&) { return 0.0; });
  for (const int name : {TESSERA_K_SCALE, TESSERA_V_SCALE}) {
    const Stream stream(seed, name);
    fill(c, name, [&](uint64_t n, const Index&) { return std::exp2(2 * stream.uniform(n) - 1); });
  }
  for (const int name : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_K_NEW, TESSERA_V_NEW, TESSERA_BIAS, TESSERA_SINKS,
                         TESSERA_DOUT, TESSERA_DLSE}) {
    const Stream stream(seed, name);
    fill(c, name, [&](uint64_t n, const Index&) { return stream.normal(n); });
  }
  for (const auto& [name, probability] : {std::pair(TESSERA_KEEP, 0.7), std::pair(TESSERA_EXCLUDE_KEYS, 0.25)}) {
    const Stream stream(seed, name);
    fill(c, name, [&, chance = probability](uint64_t n, const Index&) { return stream.uniform(n) < chance; });
  }
  for (const int name : {TESSERA_DOCUMENTS_Q, TESSERA_DOCUMENTS_K}) fill_documents(c, name, Stream(seed, name));
  fill(c, TESSERA_SLOPES, [&](uint64_t, const Index& i) {
    return std::exp2(-8.0 * static_cast<double>(i[2] + 1) / static_cast<double>(p.heads_q));
  });
  const Stream corners(seed, TESSERA_CORNER_OFFSETS);
  fill(c, TESSERA_CORNER_OFFSETS, [&](uint64_t n, const Index& i) {
    const auto& given = c.given(TESSERA_CORNER_OFFSETS);
    return static_cast<double>(given.empty() ? corners.below(n, p.len_k + 1) : given[static_cast<size_t>(i[0])]);
  });
}

}  // namespace tessera::tools
