// The tiles of keys that a block of rows visits.
#pragma once
#include "device/sequence.h"

namespace tessera::device {

using rules::Range;

// Tiles of the near range, last first, then those of the head range.
struct Walk {
  Keys near, head;             // to visit
  int near_end, near_count;    // in tiles
  int head_end, count;         // of both
  int clean_begin, clean_end;  // tiles that every row keeps whole

  TESSERA_DEVICE int tile(int n) const { return n < near_count ? near_end - 1 - n : head_end - 1 - (n - near_count); }
  TESSERA_DEVICE bool clean(int n) const {
    const int t = tile(n);
    return clean_begin <= t && t < clean_end;
  }
  // The steps whose tiles are clean: these lie in one of the two ranges.
  TESSERA_DEVICE Keys clean_steps() const {
    const int last = clean_end > near_end - near_count ? near_end : head_end + near_count;
    return clean_begin < clean_end ? Keys{last - clean_end, last - clean_begin} : Keys{0, 0};
  }
};
template <class Int>
TESSERA_DEVICE Walk walk_of(const rules::BandOf<Int>& band, rules::RangeOf<Int> rows, int tile_keys) {
  using Range = rules::RangeOf<Int>;
  if (rows.empty()) return {};
  const rules::VisitOf<Int> v = rules::visit_of(band, rows);
  const auto tiles = [=](Range keys) {
    return keys.empty() ? Range{0, 0} : Range{keys.begin / tile_keys, (keys.end + tile_keys - 1) / tile_keys};
  };
  Range near = tiles(v.near), head = tiles(v.head);
  if (!head.empty() && !near.empty() && head.end > near.begin) {  // no tile is visited twice
    near = rules::hull(head, near);
    head = {0, 0};
  }
  const int near_count = static_cast<int>(near.size());
  const Keys full = keys_of(v.full);
  return {keys_of(v.near),
          keys_of(v.head),
          static_cast<int>(near.end),
          near_count,
          static_cast<int>(head.end),
          near_count + static_cast<int>(head.size()),
          (full.begin + tile_keys - 1) / tile_keys,
          full.end / tile_keys};
}

}  // namespace tessera::device
