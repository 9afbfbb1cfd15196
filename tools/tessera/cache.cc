#include "cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "number.h"
#include "status.h"

namespace tessera::tools {
namespace {

bool given(const tessera_problem& p, int name) {
  return p.operand[name].dtype != TESSERA_ABSENT;
}

// The value of a list of lengths at `batch`; one for all has one.
int64_t length_at(const Case& c, int name, int64_t batch) {
  return c.value(name, c.operand(name).extent[0] == 1 ? 0 : batch);
}

void fill_list(Case& c, int name, const std::vector<int64_t>& values) {
  if (!c.has(name)) return;
  const std::vector<int32_t>& said = c.given(name);
  for (int64_t n = 0; n < c.operand(name).extent[0]; ++n) {
    const auto at = static_cast<size_t>(n);
    c.value(name, n) = said.empty() ? static_cast<int32_t>(values[at]) : said[at];
  }
}

std::vector<int64_t> shuffled(int64_t n, std::mt19937_64& random) {
  std::vector<int64_t> all(static_cast<size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[random() % i]);
  return all;
}

int32_t& page_id(Case& c, int64_t row, int64_t column) {
  return *reinterpret_cast<int32_t*>(c.at(TESSERA_PAGE_TABLE, {row, column, 0, 0}));
}

void fill_table(Case& c, std::mt19937_64& random) {
  const tessera_operand& table = c.operand(TESSERA_PAGE_TABLE);
  const std::vector<int32_t>& said = c.given(TESSERA_PAGE_TABLE);
  if (!said.empty()) {
    for (int64_t row = 0; row < table.extent[0]; ++row)
      for (int64_t column = 0; column < table.extent[1]; ++column)
        page_id(c, row, column) = said[static_cast<size_t>(row * table.extent[1] + column)];
    return;
  }
  const tessera_cache& cache = c.problem().cache;
  const std::vector<int64_t> pages = shuffled(cache.pages, random);
  size_t next = 0;
  for (int64_t b = 0; b < c.problem().batch; ++b) {
    const CacheRow s = cache_row(c, b);
    const int64_t used = std::min(s.pad + s.keys(), slots_of(c.problem()));
    for (int64_t column = 0; column * cache.page_size < used; ++column) {
      int32_t& id = page_id(c, s.row, column);
      if (id != -1) continue;  // another sequence reads the same row
      if (next == pages.size()) throw invalid("pages={} is fewer than the sequences take; say more", cache.pages);
      id = static_cast<int32_t>(pages[next++]);
    }
  }
}

void fill_angles(Case& c) {
  for (const int name : {TESSERA_COS, TESSERA_SIN}) {
    if (!c.has(name)) continue;
    const tessera_operand& o = c.operand(name);
    for_each_index(extents(o), [&](const Index& i) {
      const double share = static_cast<double>(i[3]) / static_cast<double>(o.extent[3]);
      const double angle = static_cast<double>(i[1]) * std::pow(10000.0, -share);
      store(c.at(name, i), o.dtype, name == TESSERA_COS ? std::cos(angle) : std::sin(angle));
    });
  }
}

// live[b][j]: may some query see key j of sequence b, as far as bands go, or does an append write it?
std::vector<std::vector<char>> keys_in_use(const Case& c) {
  tessera_problem bands = c.problem();
  for (const int name : {TESSERA_KEEP, TESSERA_DOCUMENTS_Q, TESSERA_DOCUMENTS_K, TESSERA_BIAS})
    bands.operand[name] = {};
  const int64_t rows = bands.len_q, keys = bands.len_k;
  std::vector<std::vector<char>> live;
  std::vector<uint8_t> grid(static_cast<size_t>(rows * keys));
  for (int64_t b = 0; b < bands.batch; ++b) {
    std::vector<char> seen(static_cast<size_t>(keys), 0);
    if (bands.pass != TESSERA_APPEND) {
      tessera_error error = fresh_error();
      call(tessera_mask_grid(&bands, &c.bindings(), b, 0, grid.data(), &error), error);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < keys; ++j)
          if (grid[static_cast<size_t>(i * keys + j)]) seen[static_cast<size_t>(j)] = 1;
    }
    live.push_back(std::move(seen));
  }
  return live;
}

void keep_only_keys(Case& c, int name, const std::vector<std::vector<char>>& live) {
  const tessera_operand& o = c.operand(name);
  const size_t size = tessera_dtype_bytes(o.dtype);
  const Buffer old = c.renew(name);
  for (int64_t b = 0; b < c.problem().batch; ++b) {
    const CacheRow s = cache_row(c, b);
    for (int64_t j = 0; j < s.old_keys; ++j) {
      if (!live[static_cast<size_t>(b)][static_cast<size_t>(j)]) continue;
      const Place place = place_of(c, s, j);
      if (place.plane < 0 || place.plane >= o.extent[0]) continue;
      for_each_index({1, 1, o.extent[2], o.extent[3]}, [&](const Index& i) {
        const Index at = {place.plane, place.row, i[2], i[3]};
        std::memcpy(c.at(name, at), old.memory.get() + static_cast<size_t>(offset_of(o, at)) * size, size);
      });
    }
  }
}

}  // namespace

bool appends(const tessera_problem& p) {
  return given(p, TESSERA_K_NEW);
}
bool is_cache(const tessera_problem& p) {
  return appends(p) || given(p, TESSERA_CACHE_LENS) || given(p, TESSERA_CACHE_BATCH_IDX) ||
         given(p, TESSERA_LEFT_PAD) || p.cache.page_size || p.cache.rows || p.cache.slots || p.cache.ring;
}
int64_t slots_of(const tessera_problem& p) {
  return p.cache.slots ? p.cache.slots : p.len_k;
}

CacheRow cache_row(const Case& c, int64_t batch) {
  CacheRow s;
  s.row = c.has(TESSERA_CACHE_BATCH_IDX) ? c.value(TESSERA_CACHE_BATCH_IDX, batch) : batch;
  s.pad = c.has(TESSERA_LEFT_PAD) ? c.value(TESSERA_LEFT_PAD, batch) : 0;
  const int64_t filled = c.has(TESSERA_CACHE_LENS)  ? length_at(c, TESSERA_CACHE_LENS, batch)
                         : c.has(TESSERA_SEQUSED_K) ? c.value(TESSERA_SEQUSED_K, batch)
                                                    : c.problem().len_k;
  s.old_keys = filled - s.pad;
  const tessera_problem& p = c.problem();
  if (appends(p)) s.fresh = sequences(c, Side::fresh)[static_cast<size_t>(batch)].used;
  const bool there = s.row >= 0 && s.row < (p.cache.rows ? p.cache.rows : p.batch);
  const bool fits = s.fresh >= 0 && s.keys() <= p.len_k && (p.cache.ring || s.pad + s.keys() <= slots_of(p));
  if (!there || !fits || s.pad < 0 || s.old_keys < 0) s.old_keys = s.fresh = s.row = s.pad = 0;
  return s;
}

Place place_of(const Case& c, const CacheRow& s, int64_t key) {
  const tessera_cache& cache = c.problem().cache;
  int64_t slot = s.pad + key;
  if (cache.ring) slot %= slots_of(c.problem());
  if (!cache.page_size) return {s.row, slot};
  const int32_t page =
      *reinterpret_cast<const int32_t*>(c.at(TESSERA_PAGE_TABLE, {s.row, slot / cache.page_size, 0, 0}));
  return {page, slot % cache.page_size};
}

void fill_cache(Case& c, uint64_t seed) {
  const tessera_problem& p = c.problem();
  fill_angles(c);
  if (!is_cache(p)) return;
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return n <= 1 ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  const auto rows = shuffled(p.cache.rows ? p.cache.rows : p.batch, random);
  fill_list(c, TESSERA_CACHE_BATCH_IDX, rows);
  const int64_t slots = slots_of(p);
  std::vector<int64_t> pads, lens;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t fresh = appends(p) ? sequences(c, Side::fresh)[static_cast<size_t>(b)].used : 0;
    pads.push_back(below((slots - fresh) / 2 + 1));
    fill_list(c, TESSERA_LEFT_PAD, std::vector<int64_t>(static_cast<size_t>(p.batch), pads.back()));
    const int64_t pad =
        c.has(TESSERA_LEFT_PAD) ? (c.given(TESSERA_LEFT_PAD).empty() ? pads.back() : c.value(TESSERA_LEFT_PAD, b)) : 0;
    lens.push_back(p.cache.ring ? pad + p.len_k - fresh : std::min(slots - fresh, pad + p.len_k - fresh));
  }
  fill_list(c, TESSERA_LEFT_PAD, pads);
  fill_list(c, TESSERA_CACHE_LENS, lens);
  if (c.has(TESSERA_PAGE_TABLE)) fill_table(c, random);
}

void poison_cache(Case& c) {
  const auto live = keys_in_use(c);
  for (const int name : {TESSERA_K, TESSERA_V})
    if (c.has(name)) keep_only_keys(c, name, live);
  if (!c.has(TESSERA_PAGE_TABLE)) return;
  // Columns that neither a visible key nor a new one lies on.
  const tessera_operand& table = c.operand(TESSERA_PAGE_TABLE);
  std::vector<char> followed(static_cast<size_t>(table.extent[0] * table.extent[1]), 0);
  for (int64_t b = 0; b < c.problem().batch; ++b) {
    const CacheRow s = cache_row(c, b);
    for (int64_t j = 0; j < s.keys(); ++j) {
      if (j < s.old_keys && !live[static_cast<size_t>(b)][static_cast<size_t>(j)]) continue;
      int64_t slot = s.pad + j;
      if (c.problem().cache.ring) slot %= slots_of(c.problem());
      followed[static_cast<size_t>(s.row * table.extent[1] + slot / c.problem().cache.page_size)] = 1;
    }
  }
  constexpr std::array<int32_t, 3> rubbish = {-1, std::numeric_limits<int32_t>::max(),
                                              std::numeric_limits<int32_t>::min()};
  for (size_t n = 0; n < followed.size(); ++n)
    if (!followed[n])
      page_id(c, static_cast<int64_t>(n) / table.extent[1], static_cast<int64_t>(n) % table.extent[1]) = rubbish[n % 3];
}

void wipe_new(Case& c) {
  for_each_new(c, [&](int name, const Index& i) {
    std::memset(c.at(name, i), 0xFF, tessera_dtype_bytes(c.operand(name).dtype));
  });
}

Guard::Guard(const Case& c) : case_(c) {
  if (!appends(c.problem())) return;
  for (const int name : {TESSERA_K, TESSERA_V})
    if (c.has(name)) {
      const auto* const begin = c.at(name, {0, 0, 0, 0});
      before_.push_back({name, {begin, begin + c.span(name)}});
    }
}

void Guard::check() const {
  std::vector<Copy> expected = before_;  // with what the run may write taken as it is
  for_each_new(case_, [&](int name, const Index& i) {
    const tessera_operand& o = case_.operand(name);
    const size_t size = tessera_dtype_bytes(o.dtype), at = static_cast<size_t>(offset_of(o, i)) * size;
    for (Copy& copy : expected)
      if (copy.name == name) std::memcpy(copy.bytes.data() + at, case_.at(name, i), size);
  });
  for (const Copy& copy : expected) {
    const std::byte* const now = case_.at(copy.name, {0, 0, 0, 0});
    const auto [was, is] = std::mismatch(copy.bytes.begin(), copy.bytes.end(), now);
    if (was != copy.bytes.end())
      throw Error(TESSERA_WRONG, fmt::format("{}: byte {} changed from {:#04x} to {:#04x}; no new token lies there",
                                             tessera_name_text(copy.name), was - copy.bytes.begin(),
                                             std::to_integer<int>(*was), std::to_integer<int>(*is)));
  }
}

}  // namespace tessera::tools
