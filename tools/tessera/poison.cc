#include <algorithm>
#include <cstring>

#include "cache.h"

namespace tessera::tools {
namespace {

// Which rows (first two dimensions) of an operand of this side matter.
std::vector<bool> live_rows(const Case& c, const tessera_operand& o, Side side) {
  std::vector<bool> live(static_cast<size_t>(o.extent[0] * o.extent[1]));
  const std::vector<Sequence> all = sequences(c, side);
  for (size_t b = 0; b < all.size(); ++b)
    for (int64_t row = 0; row < all[b].used; ++row) {
      // exclude_keys counts inside the sequence, packed or not.
      const bool excluded = side == Side::key && c.has(TESSERA_EXCLUDE_KEYS) &&
                            *c.at(TESSERA_EXCLUDE_KEYS, {static_cast<int64_t>(b), row, 0, 0}) != std::byte{0};
      live[static_cast<size_t>(all[b].batch * o.extent[1] + all[b].first + row)] = !excluded;
    }
  return live;
}

// Moves what lives to a fresh buffer, rather than overwrite what does not: with stride 0 they may share memory.
void keep_only(Case& c, int name, const std::vector<bool>& live) {
  const tessera_operand& o = c.operand(name);
  const size_t size = tessera_dtype_bytes(o.dtype);
  const Buffer old = c.renew(name);
  for_each_index(extents(o), [&](const Index& i) {
    if (live[static_cast<size_t>(i[0] * o.extent[1] + i[1])])
      std::memcpy(c.at(name, i), old.memory.get() + static_cast<size_t>(offset_of(o, i)) * size, size);
  });
}

void poison_side(Case& c, Side side, std::initializer_list<int> names) {
  for (const int name : names) {
    if (!c.has(name)) continue;
    const std::vector<bool> live = live_rows(c, c.operand(name), side);
    if (std::find(live.begin(), live.end(), false) != live.end()) keep_only(c, name, live);
  }
}

}  // namespace

void poison(Case& c) {
  poison_side(c, Side::query, {TESSERA_Q, TESSERA_DOUT, TESSERA_DLSE});
  poison_side(c, Side::fresh, {TESSERA_K_NEW, TESSERA_V_NEW});
  if (is_cache(c.problem())) poison_cache(c);
  else poison_side(c, Side::key, {TESSERA_K, TESSERA_V});
  for (const int name : outputs(c.problem())) c.wipe(name);
}

}  // namespace tessera::tools
