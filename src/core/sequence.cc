#include "core/sequence.h"

#include <algorithm>

#include "core/element_mask.h"
#include "core/error.h"

namespace tessera::core {
namespace {

const int32_t* list(const Bindings& bound, int name) {
  return static_cast<const int32_t*>(bound.data[name]);
}

struct Side {
  int cu, used;
  const char* cu_text;
  const char* used_text;
  const char* length_text;
};
constexpr Side query = {TESSERA_CU_SEQLENS_Q, TESSERA_SEQUSED_Q, "cu_seqlens_q", "seqused_q", "len_q"};
constexpr Side key = {TESSERA_CU_SEQLENS_K, TESSERA_SEQUSED_K, "cu_seqlens_k", "seqused_k", "len_k"};
constexpr Side fresh = {TESSERA_CU_SEQLENS_NEW, TESSERA_SEQUSED_NEW, "cu_seqlens_new", "seqused_new", "len_new"};

int64_t length_at(const Problem& p, const Bindings& bound, int name, int64_t batch) {
  return list(bound, name)[operand(p, name).extent[0] == 1 ? 0 : batch];
}
// Slots in use before the append, left padding included.
int64_t filled(const Problem& p, const Bindings& bound, int64_t batch) {
  if (has(p, TESSERA_CACHE_LENS)) return length_at(p, bound, TESSERA_CACHE_LENS, batch);
  return has(p, TESSERA_SEQUSED_K) ? list(bound, TESSERA_SEQUSED_K)[batch] : p.len_k;
}
int64_t left_pad(const Problem& p, const Bindings& bound, int64_t batch) {
  return has(p, TESSERA_LEFT_PAD) ? list(bound, TESSERA_LEFT_PAD)[batch] : 0;
}
int64_t cache_row(const Problem& p, const Bindings& bound, int64_t batch) {
  return has(p, TESSERA_CACHE_BATCH_IDX) ? list(bound, TESSERA_CACHE_BATCH_IDX)[batch] : batch;
}

Rows rows_of(const Problem& p, const Bindings& bound, const Side& side, int64_t length, int64_t batch) {
  Rows r = {batch, 0, length, length};
  if (has(p, side.cu)) {
    const int32_t* cu = list(bound, side.cu);
    r.plane = 0;
    r.first = cu[batch];
    r.used = r.stored = cu[batch + 1] - cu[batch];
  }
  if (has(p, side.used)) r.used = list(bound, side.used)[batch];
  return r;
}

void check_side(const Problem& p, const Bindings& bound, const Side& side, int64_t length, int64_t rows) {
  if (has(p, side.cu)) {
    const int32_t* cu = list(bound, side.cu);
    require_sound(cu[0] == 0, TESSERA_STATUS_LENGTH, "{}[0] is {}; it must be 0.", side.cu_text, cu[0]);
    for (int64_t b = 0; b < p.batch; ++b)
      require_sound(cu[b + 1] >= cu[b], TESSERA_STATUS_LENGTH, "{0}[{1}] is {2} after {3}; offsets must not decrease.",
                    side.cu_text, b + 1, cu[b + 1], cu[b]);
    require_sound(cu[p.batch] <= rows, TESSERA_STATUS_LENGTH,
                  "{}[{}] is {}; the operand has {} rows. Pass the offsets that belong to it.", side.cu_text, p.batch,
                  cu[p.batch], rows);
    for (int64_t b = 0; b < p.batch; ++b)
      require_sound(int64_t{cu[b + 1]} - cu[b] <= length, TESSERA_STATUS_LENGTH,
                    "{} makes sequence {} {} long; {} promised at most {}. Raise {}.", side.cu_text, b,
                    int64_t{cu[b + 1]} - cu[b], side.length_text, length, side.length_text);
  }
  if (!has(p, side.used)) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Rows r = rows_of(p, bound, side, length, b);
    require_sound(r.used >= 0 && r.used <= r.stored, TESSERA_STATUS_LENGTH,
                  "{}[{}] is {}; it must be from 0 to the sequence's {} rows.", side.used_text, b, r.used, r.stored);
  }
}

Rows tail(const Problem& p, const Bindings& bound, const Side& side, int64_t rows) {
  if (!has(p, side.cu)) return {};
  const int64_t end = list(bound, side.cu)[p.batch];
  return {0, end, 0, rows - end};
}

}  // namespace

Sequence sequence(const Problem& p, const Bindings& bound, int64_t batch) {
  Sequence s;
  s.batch = batch;
  if (p.pass != TESSERA_APPEND) s.q = rows_of(p, bound, query, p.len_q, batch);
  if (appends(p)) s.fresh = rows_of(p, bound, fresh, p.len_new, batch);
  if (is_cache(p)) {
    const int64_t pad = left_pad(p, bound, batch), row = cache_row(p, bound, batch);
    s.k = {batch, 0, filled(p, bound, batch) - pad + s.fresh.used, p.len_k};
    s.slots.first = pad;
    if (p.cache.ring) s.slots.wrap = slots_of(p);
    if (p.cache.page_size) {
      const Operand& table = operand(p, TESSERA_PAGE_TABLE);
      s.slots.page = p.cache.page_size;
      if (elements(table) > 0) s.slots.table = list(bound, TESSERA_PAGE_TABLE) + offset_of(table, row, 0, 0, 0);
      s.slots.table_step = table.extent[1] == 1 ? 0 : table.stride[1];
    } else {
      s.slots.plane = row;
    }
  } else {
    s.k = rows_of(p, bound, key, p.len_k, batch);
    s.slots.plane = s.k.plane;
    s.slots.first = s.k.first;
  }
  if (p.mask.corner == TESSERA_CORNER_AT)
    s.offset = has(p, TESSERA_CORNER_OFFSETS) ? list(bound, TESSERA_CORNER_OFFSETS)[batch] : p.mask.corner_at;
  else if (p.mask.corner == TESSERA_BOTTOM_RIGHT) s.offset = s.k.used - s.q.used;
  return s;
}

Seen seen_keys(const rules::BandMask& band, const rules::Visit& visit, rules::Range rows) {
  return {band, rows, visit.head, visit.near, rules::hulls_have_gaps(band)};
}
Seen seen_keys(const Problem& p, const Sequence& s) {
  if (s.q.used == 0) return {};
  const rules::BandMask band = band_mask(p, s);
  const rules::Range rows = {0, s.q.used};
  return seen_keys(band, rules::visit(band, rows), rows);
}

namespace {

void check_filled(const Problem& p, const Bindings& bound, int64_t b) {
  const int64_t slots = slots_of(p), rows = cache_rows(p), row = cache_row(p, bound, b);
  require_sound(row >= 0 && row < rows, TESSERA_STATUS_PAGE, "cache_batch_idx[{}] is {}; the cache has rows 0 to {}.",
                b, row, rows - 1);
  const int64_t used = filled(p, bound, b), pad = left_pad(p, bound, b);
  const char* const name = has(p, TESSERA_CACHE_LENS)  ? "cache_lens"
                           : has(p, TESSERA_SEQUSED_K) ? "seqused_k"
                                                       : "len_k of sequence ";
  require_sound(pad >= 0 && used >= pad, TESSERA_STATUS_LENGTH,
                "{0}[{1}] is {2} and left_pad[{1}] is {3}; they must be at least 0, and the length counts the padding.",
                name, b, used, pad);
  const int64_t added = appends(p) ? rows_of(p, bound, fresh, p.len_new, b).used : 0;
  require_sound(p.cache.ring || used + added <= slots, TESSERA_STATUS_CAPACITY,
                "{}[{}] is {} and {} are new; the sequence has {} slots. Give the cache more slots or append less.",
                name, b, used, added, slots);
  require_sound(used - pad + added <= p.len_k, TESSERA_STATUS_LENGTH,
                "{}[{}] makes {} keys; len_k promised at most {}. Raise len_k.", name, b, used - pad + added, p.len_k);
}

// Every page id that the run will follow: of new keys, and of those that some query may see.
void check_pages(const Problem& p, const Bindings& bound, const Sequence& s) {
  const Seen seen = seen_keys(p, s);
  const rules::Range fresh_keys = {s.old_keys(), s.k.used};
  const auto unseen = [&](int64_t j) {
    const bool known = has(p, TESSERA_EXCLUDE_KEYS) && bound.data[TESSERA_EXCLUDE_KEYS];  // not so in a line's check
    return !fresh_keys.has(j) &&
           (!seen.has(j) || (known ? excluded_for_all(p, bound, s, j) : has(p, TESSERA_EXCLUDE_KEYS)));
  };
  for (const rules::Range keys : {seen.head, seen.near, fresh_keys})
    for (int64_t j = keys.begin; j < keys.end;) {
      const rules::Run run = s.slots.run(j, keys.end);
      const int64_t end = j + run.count;
      if (run.plane >= 0 && run.plane < p.cache.pages) j = end;
      for (; j < end; ++j)
        require_sound(unseen(j), TESSERA_STATUS_PAGE,
                      "page_table names page {} for key {} of sequence {}; k and v have pages 0 to {}.", run.plane, j,
                      s.batch, p.cache.pages - 1);
    }
}

void check_positions(const Problem& p, const Sequence& s) {
  const int64_t rows = operand(p, TESSERA_COS).extent[1];
  const auto within = [&](const char* what, int64_t begin, int64_t count) {
    require_sound(count == 0 || (begin >= 0 && begin + count <= rows), TESSERA_STATUS_POSITION,
                  "sequence {}: {} stand at positions {} to {}; cos and sin have 0 to {}. Make the tables longer, or "
                  "shorten what is not used by seqused_q.",
                  s.batch, what, begin, begin + count - 1, rows - 1);
  };
  within("new tokens", s.old_keys(), s.fresh.used);
  if (s.k.used > 0) within("queries", s.offset, s.q.used);  // without keys a query's rotation does not matter
}

}  // namespace

void check_lengths(const Problem& p, const Bindings& bound) {
  if (p.pass != TESSERA_APPEND) check_side(p, bound, query, p.len_q, p.rows_q);
  if (appends(p)) check_side(p, bound, fresh, p.len_new, p.rows_new);
  if (!is_cache(p)) return check_side(p, bound, key, p.len_k, p.rows_k);
  for (int64_t b = 0; b < p.batch; ++b) {
    check_filled(p, bound, b);
    const Sequence s = sequence(p, bound, b);
    if (p.cache.page_size) check_pages(p, bound, s);
    if (p.cache.rotary_dim) check_positions(p, s);
  }
}

static bool targets_may_meet(const Problem& p) {
  return appends(p) && (has(p, TESSERA_CACHE_BATCH_IDX) || p.cache.page_size > 0);
}
int64_t most_targets(const Problem& p) {
  return targets_may_meet(p) ? new_tokens(p) : 0;
}
void check_targets(const Problem& p, const Bindings& bound, int64_t* room) {
  if (!targets_may_meet(p)) return;
  int64_t count = 0;
  const int64_t rows = operand(p, TESSERA_K).extent[1];
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, bound, b);
    for (int64_t j = s.old_keys(); j < s.k.used;) {
      const rules::Run run = s.slots.run(j, s.k.used);
      for (int64_t n = 0; n < run.count; ++n) room[count++] = run.plane * rows + run.row + n;
      j += run.count;
    }
  }
  std::sort(room, room + count);
  const int64_t* const twice = std::adjacent_find(room, room + count);
  require_sound(twice == room + count, TESSERA_STATUS_TARGET,
                "two new tokens are appended to slot {} of {} {}; each needs a slot of its own. Copy a shared page "
                "before you append to it.",
                twice == room + count ? 0 : *twice % rows, p.cache.page_size ? "page" : "cache row",
                twice == room + count ? 0 : *twice / rows);
}

Rows tail_q(const Problem& p, const Bindings& bound) {
  return tail(p, bound, query, p.rows_q);
}
Rows tail_k(const Problem& p, const Bindings& bound) {
  return tail(p, bound, key, p.rows_k);
}

rules::BandMask band_mask(const Problem& p, int64_t keys, int64_t offset) {
  const tessera_mask& m = p.mask;
  rules::BandMask band;
  band.keys = keys;
  band.offset = rules::saturate(offset);
  if (m.has_window) {
    if (!m.window_left_unbounded) band.left = rules::saturate(m.window_left);
    if (!m.window_right_unbounded) band.right = rules::saturate(m.window_right);
    band.first = rules::saturate(m.first);
  }
  band.causal = m.causal || m.has_prefix;
  band.prefix = m.has_prefix ? rules::saturate(m.prefix) : 0;
  band.chunked = m.chunk > 0;
  if (band.chunked) band.chunk = rules::saturate(m.chunk);
  return band;
}

}  // namespace tessera::core
