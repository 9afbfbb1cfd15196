// Is what a problem says of its cache, its rotation and its number format of k and v a question at all?
#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "rules/dtype.h"

namespace tessera::core {
namespace {

void check_storage(const Problem& p) {
  const tessera_cache& c = p.cache;
  if (!is_cache(p)) return;
  require(p.pass != TESSERA_BACKWARD, "k and v are a cache; backward reads plain tensors. Pass the keys themselves.");
  require(!packed_k(p), "cu_seqlens_k is given and k is a cache; a cache's lengths are cache_lens.");
  require(!(has(p, TESSERA_CACHE_LENS) && has(p, TESSERA_SEQUSED_K)),
          "cache_lens and seqused_k are both given; they say the same thing. Give one.");
  require(c.ring || p.len_k <= slots_of(p), "len_k is {} and a sequence has {} slots; only a ring may be outgrown.",
          p.len_k, slots_of(p));
}

// How many keys before a query's position its mask may keep.
int64_t reach(const tessera_mask& m) {
  int64_t keys = INT64_MAX;
  if (m.has_window && !m.window_left_unbounded) keys = std::max<int64_t>(0, m.window_left);
  if (m.chunk) keys = std::min(keys, m.chunk - 1);
  return keys;
}

void check_ring(const Problem& p) {
  if (!p.cache.ring) return;
  const int64_t slots = slots_of(p);
  require(has(p, TESSERA_CACHE_LENS), "cache.ring is set without cache_lens; a ring's lengths outgrow its slots.");
  require(p.len_new <= slots, "len_new is {} and the ring has {} slots; new tokens would overwrite each other.",
          p.len_new, slots);
  if (p.pass == TESSERA_APPEND) return;
  require(p.mask.corner == TESSERA_BOTTOM_RIGHT,
          "cache.ring needs corner bottom_right; elsewhere queries would see keys that are overwritten.");
  require(!p.mask.first && !p.mask.has_prefix,
          "cache.ring overwrites the first keys, which first and prefix keep. Use a cache that is no ring.");
  const int64_t back = reach(p.mask);
  require(back != INT64_MAX, "cache.ring needs a window with a left side, or a chunk, so that old keys are not seen.");
  require(back < slots && p.len_q <= slots - back,
          "the ring has {} slots; {} queries that see {} keys back need {}. Give it more slots.", slots, p.len_q, back,
          back > INT64_MAX - p.len_q ? INT64_MAX : back + p.len_q);
}

void check_new(const Problem& p) {
  require(appends(p) || p.len_new == 0, "len_new is {} but k_new is absent; declare k_new or leave len_new 0.",
          p.len_new);
  for (const int name : {TESSERA_V_NEW, TESSERA_CU_SEQLENS_NEW, TESSERA_SEQUSED_NEW})
    require(appends(p) || !has(p, name), "{} is given without k_new; give both or neither.", operand_row(name).text);
  require(p.rows_new == 0 || packed_new(p),
          "rows_new is {} but k_new is not packed; declare cu_seqlens_new or leave rows_new 0.", p.rows_new);
  if (!appends(p)) return;
  require(has(p, TESSERA_CACHE_LENS), "k_new is given without cache_lens, which says where it goes. Declare both.");
  require(has(p, TESSERA_V_NEW) != (p.cache.v_in_k != 0),
          "v_new is {} and cache.v_in_k is {}; v_new is left out where, and only where, v lies in k.",
          has(p, TESSERA_V_NEW) ? "given" : "absent", p.cache.v_in_k);
}

void check_v_in_k(const Problem& p) {
  if (!p.cache.v_in_k) return;
  const Operand &k = operand(p, TESSERA_K), &v = operand(p, TESSERA_V);
  require(p.dim_v <= p.dim, "dim_v is {} and dim {}; v lies in the first numbers of k's rows, so it has no more.",
          p.dim_v, p.dim);
  for (int d = 0; d < 4; ++d)
    require(v.extent[d] <= 1 || v.stride[d] == k.stride[d],
            "v.stride[{}] is {} and k's is {}; v lies in k, so they are equal.", d, v.stride[d], k.stride[d]);
}

void check_rotary(const Problem& p) {
  const tessera_cache& c = p.cache;
  const bool given = has(p, TESSERA_COS);
  require(given == has(p, TESSERA_SIN), "only one of cos and sin is given; a rotation needs both.");
  require(given == (c.rotary_dim > 0), "cache.rotary_dim is {} and cos is {}; a rotation needs both.", c.rotary_dim,
          given ? "given" : "absent");
  require(given || (!c.rotary_positions && !c.rotary_interleaved),
          "cache.rotary_positions is {} and rotary_interleaved {} without rotary_dim; leave them 0.",
          c.rotary_positions, c.rotary_interleaved);
  if (!given) return;
  require(c.rotary_dim % 2 == 0 && c.rotary_dim <= p.dim,
          "cache.rotary_dim is {}; numbers are rotated in pairs, so it must be even, and at most dim, {}.",
          c.rotary_dim, p.dim);
  require(!p.cache.v_in_k,
          "cache.rotary_dim is {} and v lies in k; the first numbers of k's rows, which are rotated, are v. Rotate the "
          "rest of q and k_new yourself.",
          c.rotary_dim);
  require(is_cache(p),
          "rotary_dim is {} and k is no cache; k is rotated as it is appended. Declare k_new and "
          "cache_lens, or rotate q and k yourself.",
          c.rotary_dim);
  require(operand(p, TESSERA_COS).dtype == operand(p, TESSERA_SIN).dtype, "cos is {} and sin {}; make them one dtype.",
          rules::dtype_rows[operand(p, TESSERA_COS).dtype].text, rules::dtype_rows[operand(p, TESSERA_SIN).dtype].text);
}

void check_quantised(const Problem& p) {
  const Operand &k = operand(p, TESSERA_K), &v = operand(p, TESSERA_V);
  require(k.dtype == v.dtype, "k is {} and v {}; both or neither are e4m3.", rules::dtype_rows[k.dtype].text,
          rules::dtype_rows[v.dtype].text);
  for (const auto& [name, of] : {std::pair{TESSERA_K_SCALE, TESSERA_K}, std::pair{TESSERA_V_SCALE, TESSERA_V}}) {
    if (!has(p, name)) continue;
    const Operand &scale = operand(p, name), &scaled = operand(p, of);
    require(scaled.dtype == TESSERA_E4M3, "{} is given and {} is {}; only e4m3 has a scale. Leave it out.",
            operand_row(name).text, operand_row(of).text, rules::dtype_rows[scaled.dtype].text);
    const bool one = scale.extent[0] == 1 && scale.extent[1] == 1;
    require(one || (scale.extent[0] == scaled.extent[0] && scale.extent[1] == scaled.extent[1]),
            "{}.extent is {} x {} tokens; it must be 1 x 1, or {}'s, {} x {}.", operand_row(name).text, scale.extent[0],
            scale.extent[1], operand_row(of).text, scaled.extent[0], scaled.extent[1]);
  }
}

}  // namespace

void check_cache_sizes(const Problem& p) {
  const tessera_cache& c = p.cache;
  require(
      c.page_size >= 0 && c.pages >= 0 && c.rows >= 0 && c.slots >= 0 && c.rotary_dim >= 0 && c.rotary_positions >= 0,
      "cache has a negative size (page_size {}, pages {}, rows {}, slots {}, rotary_dim {}, rotary_positions {}); "
      "sizes are at least 0.",
      c.page_size, c.pages, c.rows, c.slots, c.rotary_dim, c.rotary_positions);
  constexpr int64_t longest = INT32_MAX;
  require(c.page_size <= longest && c.pages <= longest && c.rows <= longest && slots_of(p) <= longest &&
              c.rotary_positions <= longest,
          "cache has a size over 2^31 - 1 (page_size {}, pages {}, rows {}, slots {}); page ids are int32.",
          c.page_size, c.pages, c.rows, slots_of(p));
  require((c.page_size > 0) == has(p, TESSERA_PAGE_TABLE),
          "cache.page_size is {} and page_table is {}; a paged cache has both. Set page_size and declare page_table.",
          c.page_size, has(p, TESSERA_PAGE_TABLE) ? "given" : "absent");
  require(c.pages == 0 || c.page_size > 0, "cache.pages is {} without page_size; set page_size or leave pages 0.",
          c.pages);
  require(c.rows == 0 || c.rows == p.batch || has(p, TESSERA_CACHE_BATCH_IDX),
          "cache.rows is {} and the batch {}; say which rows they are by cache_batch_idx.", c.rows, p.batch);
  require(p.pass != TESSERA_APPEND || appends(p), "k_new is absent; append needs it. Declare it.");
}

void check_cache(const Problem& p) {
  check_storage(p);
  check_ring(p);
  check_new(p);
  check_v_in_k(p);
  check_rotary(p);
  check_quantised(p);
}

}  // namespace tessera::core
