// Where the keys of a sequence lie in k and v: one map for dense tensors, packed ones, and caches with left padding,
// pages, rings and rows in any order, freely combined.
#pragma once
#include "rules/mask.h"

namespace tessera::rules {

struct Run {  // `count` keys that lie in consecutive rows
  Index plane, row, count;
};

struct Slots {
  Index plane = 0;             // of a tensor that is not paged
  Index first = 0;             // slot of key 0: left padding, or the sequence's place in a packed tensor
  Index wrap = far_away;       // slots of a ring
  Index page = 0;              // slots of a page; 0: not paged
  const int* table = nullptr;  // the sequence's page ids
  Index table_step = 1;

  // The longest run from key j on that ends before key `end`. Reads one page id, that of key j.
  TESSERA_RULE Run run(Index j, Index end) const {
    const Index slot = first + j < wrap ? first + j : (first + j) % wrap;
    const Index count = min(end - j, wrap - slot);
    if (page == 0) return {plane, slot, count};
    return {table[slot / page * table_step], slot % page, min(count, page - slot % page)};
  }
};

}  // namespace tessera::rules
