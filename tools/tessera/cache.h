// KV caches in a case's memory: where keys lie, lengths and page tables made up, and a guard around what an append may
// write.
#pragma once

#include <vector>

#include "case.h"

namespace tessera::tools {

bool is_cache(const tessera_problem& problem);
bool appends(const tessera_problem& problem);
int64_t slots_of(const tessera_problem& problem);

// One sequence of a cache, as the case's lengths say.
struct CacheRow {
  int64_t row = 0;       // of the cache, or of the page table
  int64_t pad = 0;       // slots before key 0
  int64_t old_keys = 0;  // keys before the append
  int64_t fresh = 0;     // new tokens
  int64_t keys() const { return old_keys + fresh; }
};
// What is unsound counts as a sequence without keys here: a run refuses it.
CacheRow cache_row(const Case& c, int64_t batch);
// First index (plane, row) of key j in k and v. Follows one page id.
struct Place {
  int64_t plane, row;
};
Place place_of(const Case& c, const CacheRow& sequence, int64_t key);

// Lengths, rows and page ids that the line does not give: full caches, pages in random order.
void fill_cache(Case& c, uint64_t seed);
// NaN into slots that nobody may look at, rubbish into page ids that nobody may follow.
void poison_cache(Case& c);

// Calls visit(name, index) for each element of k and v that a run appends.
template <class Visit>
void for_each_new(const Case& c, Visit visit) {
  for (const int name : updates(c.problem())) {
    const tessera_operand& o = c.operand(name);
    for (int64_t b = 0; b < c.problem().batch; ++b) {
      const CacheRow s = cache_row(c, b);
      for (int64_t j = s.old_keys; j < s.keys(); ++j) {
        const Place place = place_of(c, s, j);
        if (place.plane < 0 || place.plane >= o.extent[0]) continue;
        for_each_index({1, 1, o.extent[2], o.extent[3]}, [&](const Index& i) {
          visit(name, Index{place.plane, place.row, i[2], i[3]});
        });
      }
    }
  }
}

// NaN into the slots that a run appends to, so that an append that did not happen is seen.
void wipe_new(Case& c);

// What k and v hold outside of the slots that a run appends to must not change.
class Guard {
 public:
  explicit Guard(const Case& c);
  // Throws TESSERA_WRONG with the first byte that changed.
  void check() const;

 private:
  const Case& case_;
  struct Copy {
    int name;
    std::vector<std::byte> bytes;
  };
  std::vector<Copy> before_;
};

}  // namespace tessera::tools
