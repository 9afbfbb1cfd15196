// The warpgroup that feeds the others: one of its threads finds items, another keeps the rings of tiles full.
#pragma once
#include "device/sm90/job.h"

namespace tessera::device {

// One thread finds items, each when the one before it nears its end, so that whoever is free first has it.
template <Sm90ForwardSpec S>
class Sm90Finder {
 public:
  TESSERA_DEVICE Sm90Finder(const Sm90ForwardParams& p, Sm90Shared<S>& shared) : p_(p), shared_(shared) {}

  TESSERA_DEVICE void find_items() {
    bool more = true;
    const int blocks = static_cast<int>(gridDim.x);
    int n = static_cast<int>(blockIdx.x) - blocks;
    for (unsigned count = 0; more; ++count) {
      wait(shared_address(&shared_.job_wanted), count & 1);
      Sm90Job& job = shared_.jobs[count % 4];
      do {
        n = n < 0 || !p_.turns ? n + blocks : take_turn(n < blocks);
        more = n < p_.items;
        job.last = !more;
        if (more && find_job(n, job)) break;
      } while (more);
      arrive(shared_address(&shared_.job_found));
      if (more) prefetch(job);
    }
  }

 private:
  // The next item; every block's first is its own number.
  TESSERA_DEVICE int take_turn(bool first) const {
    if (first) open_turns();
    const int blocks = static_cast<int>(gridDim.x), n = atomicAdd(&p_.turns->taken, 1);
    if (n == p_.items - 1) store_release(&p_.turns->tag, 0);  // each block's last finds no item
    return n + blocks;
  }
  TESSERA_DEVICE void open_turns() const {
    unsigned long long tag = load_acquire(&p_.turns->tag);
    while (tag != p_.launch) {
      if (tag == p_.launch + 1) {  // somebody is about to
        tag = load_acquire(&p_.turns->tag);
        continue;
      }
      if (atomicCAS(&p_.turns->tag, tag, p_.launch + 1) == tag) {
        p_.turns->taken = 0;
        return store_release(&p_.turns->tag, p_.launch);
      }
      tag = load_acquire(&p_.turns->tag);
    }
  }
  // What it begins with comes to the L2 cache: q, which nobody has read yet, and the first tiles of k and v.
  TESSERA_DEVICE void prefetch(const Sm90Job& job) const {
    using Layout = Sm90Shared<S>;
    for (int g = 0; g < S.groups; ++g)
      for (int slab = 0; slab < Layout::slabs; ++slab)
        prefetch_box(&p_.q_map, slab * 64, job.q.first + job.first_row + 64 * g, job.item.head, job.q.plane);
    if (job.steps.begin == job.steps.end || (S.parts && p_.cache.page > 0)) return;
    const int row = job.k.first + job.walk.tile(job.steps.begin) * S.tile_keys, kv = job.item.head / p_.group;
    for (int slab = 0; slab < Layout::slabs; ++slab) prefetch_box(&p_.k_map, slab * 64, row, kv, job.k.plane);
    for (int slab = 0; slab < Layout::slabs_v; ++slab) prefetch_box(&p_.v_map, slab * 64, row, kv, job.k.plane);
  }
  TESSERA_DEVICE bool find_job(int n, Sm90Job& job) const {  // false: nothing is to be done
    constexpr int tile_rows = 64 * S.groups;
    const int splits = S.parts ? p_.splits : 1;
    const Item item = item_of(p_, n / splits);
    const Rows q = rows_of(p_.queries, item.batch), k = keys_of_item(item);
    const int first = item.tile * tile_rows;
    if (!q.sound) note(p_, rules::unsound_length);
    if (!q.sound || !k.sound || first >= q.stored) return false;
    int offset = p_.narrow_band.offset;
    if (p_.corner == rules::Corner::bottom_right) offset = k.used - q.used;
    if (p_.corner == rules::Corner::per_sequence) offset = rules::narrow_offset(p_.corner_offsets[item.batch]);
    job.item = item;
    job.q = q;
    job.k = k;
    job.first_row = first;
    job.offset = offset;
    job.walk = walk_of<int>(band_of(p_, k, offset), {first, min(first + tile_rows, q.used)}, S.tile_keys);
    job.clean = job.walk.clean_steps();
    job.split = n % splits;
    const int each = (job.walk.count + splits - 1) / splits;
    job.steps = {min(job.split * each, job.walk.count), min((job.split + 1) * each, job.walk.count)};
    return true;
  }
  TESSERA_DEVICE Rows keys_of_item(const Item& item) const {
    if (!p_.cache.is_cache) {
      const Rows k = rows_of(p_.keys, item.batch);
      if (!k.sound) note(p_, rules::unsound_length);
      return k;
    }
    const Rows fresh = rows_of(p_.fresh, item.batch);
    CachedKeys k = cached_keys(p_.cache, p_.keys, fresh.used, item.batch);
    if (!fresh.sound) k.unsound |= rules::unsound_length;
    k.rows.sound = k.unsound == 0;
    // Past a tensor's end the copy engine brings zeros; pages have no end.
    k.rows.stored = k.table ? rules::farthest<int> : p_.cache.slots - k.rows.first;
    if (k.unsound) note(p_, k.unsound);
    return k.rows;
  }

  const Sm90ForwardParams& p_;
  Sm90Shared<S>& shared_;
};

// One thread keeps the rings full.
template <Sm90ForwardSpec S>
class Sm90Copies {
 public:
  TESSERA_DEVICE Sm90Copies(const Sm90ForwardParams& p, Sm90Shared<S>& shared) : p_(p), shared_(shared) {}

  TESSERA_DEVICE void copy_items() {
    want_job();
    unsigned count = 0;
    for (; await_job(count); ++count) {
      const Sm90Job& job = shared_.jobs[count % 4];
      // In registers: between a slot that is free and its copy nothing else may take time.
      const int plane = job.k.plane, kv = job.item.head / p_.group, begin = job.steps.begin;
      const int tiles = job.steps.end - begin;
      const int head_row = job.k.first + (job.walk.head_end - 1) * S.tile_keys;
      int to_head = job.walk.near_count - begin, row = job.k.first + job.walk.tile(begin) * S.tile_keys;
      const auto after = [&](int row) { return --to_head == 0 ? head_row : row - S.tile_keys; };
      int next = after(row);
      const Corner corner = {job.item.batch, job.item.head, job.first_row, job.k.first};
      constexpr bool q_first = S.q_stages == 2;  // its place is free then; else k does not wait for it
      if (q_first) copy_q(job, count);
      if (tiles > 0) {
        find_pages(job, row);
        if (tiles > 1) find_pages(job, next);
        copy_k(row, kv, plane);
      }
      if (!q_first) copy_q(job, count);
      if (tiles > 0) copy_pairs(corner, row);
      const int want_at = max(tiles - 4, 1);
      for (int n = 1; n <= max(tiles, 1); ++n) {
        if (n == want_at) want_job();
        const int last = after(next);
        if (n + 1 < tiles) find_pages(job, last);
        if (n < tiles) copy_k(next, kv, plane);
        if (tiles > 0) copy_v(row, kv, plane);
        if (n < tiles) copy_pairs(corner, next);
        row = next;
        next = last;
      }
    }
    for (int g = 0; g < S.groups; ++g) {
      await_q(g, count);
      arrive(shared_address(&shared_.q_full[QSlot::stage(count)][g]));
    }
  }

 private:
  using Layout = Sm90Shared<S>;
  using Slot = Ring<S.stages>;
  using QSlot = Ring<S.q_stages>;
  struct Corner {  // of an item's pairs
    int batch, head, first_row, first_key;
  };

  TESSERA_DEVICE void want_job() const { arrive(shared_address(&shared_.job_wanted)); }
  TESSERA_DEVICE bool await_job(unsigned count) const {  // false: none is left
    wait(shared_address(&shared_.job_found), count & 1);
    return !shared_.jobs[count % 4].last;
  }
  TESSERA_DEVICE void await_q(int group, unsigned count) const {
    wait(shared_address(&shared_.q_empty[QSlot::stage(count)][group]), QSlot::parity(count) ^ 1);
  }
  TESSERA_DEVICE void copy_q(const Sm90Job& job, unsigned count) const {
    const unsigned stage = QSlot::stage(count);
#pragma unroll
    for (int g = 0; g < S.groups; ++g) {
      const Address full = shared_address(&shared_.q_full[stage][g]);
      await_q(g, count);
      arrive_expecting(full, Layout::q_bytes);
#pragma unroll
      for (int slab = 0; slab < Layout::slabs; ++slab)
        copy_box(shared_address(shared_.q[stage][g]) + slab * 64 * 128, &p_.q_map, full, slab * 64,
                 job.q.first + job.first_row + 64 * g, job.item.head, job.q.plane, Kept::once);
    }
  }
  TESSERA_DEVICE void copy_k(int row, int kv, int plane) {
    copy_tile<Layout::slabs>(shared_address(shared_.k), shared_address(shared_.k_full), shared_address(shared_.k_empty),
                             k_++, &p_.k_map, row, kv, plane);
  }
  TESSERA_DEVICE void copy_v(int row, int kv, int plane) {
    copy_tile<Layout::slabs_v>(shared_address(shared_.v), shared_address(shared_.v_full),
                               shared_address(shared_.v_empty), v_++, &p_.v_map, row, kv, plane);
  }
  template <int slabs>
  TESSERA_DEVICE void copy_tile(Address tiles, Address full, Address empty, unsigned n, const rules::TensorMap* map,
                                int row, int kv, int plane) {
    constexpr unsigned slab_bytes = S.tile_keys * 128;
    const unsigned stage = Slot::stage(n);
    const Address to = tiles + stage * (slabs * slab_bytes);
    if constexpr (S.parts)
      if (p_.cache.page > 0) return copy_pages<slabs>(to, full + stage * 8, empty + stage * 8, n, map, row, kv);
    wait(empty + stage * 8, Slot::parity(n) ^ 1);
    arrive_expecting(full + stage * 8, slabs * slab_bytes);
#pragma unroll
    for (int slab = 0; slab < slabs; ++slab)
      copy_box(to + slab * slab_bytes, map, full + stage * 8, slab * 64, row, kv, plane, Kept::often);
  }

  // The pages of a tile's boxes go to shared memory, all at once, a tile ahead. Entries past the sequence's keys are
  // not read.
  TESSERA_DEVICE void find_pages(const Sm90Job& job, int key) {
    if constexpr (S.parts) {
      if (p_.cache.page == 0) return;
      const int* const table = p_.cache.table + job.k.plane * p_.cache.table_row;
      int page = key / p_.cache.page, inside = key - page * p_.cache.page;
      const Address to = page_slot(pages_++);
      keys_ = job.k.used;
      for (int box = 0; box < S.tile_keys && key + box < keys_; box += p_.page_rows) {
        copy_4(to + 4 * (box / p_.page_rows), table + page * p_.cache.table_step, true);
        inside += p_.page_rows;
        if (inside == p_.cache.page) inside = 0, ++page;
      }
      close_copies();
    }
  }
  TESSERA_DEVICE Address page_slot(unsigned n) const {
    return shared_address(shared_.pages) + n % rules::page_slots * (4 * S.tile_keys);
  }
  TESSERA_DEVICE void wait_pages(unsigned tile) const {
    if (tile + 1 < pages_) wait_copies<1>();
    else wait_copies<0>();
  }
  template <int slabs>
  TESSERA_DEVICE void copy_pages(Address to, Address full, Address empty, unsigned n, const rules::TensorMap* map,
                                 int key, int kv) {
    const int rows = p_.page_rows, boxes = (min(S.tile_keys, keys_ - key) + rows - 1) / rows;
    int inside = key % p_.cache.page;
    wait_pages(n);
    wait(empty, Slot::parity(n) ^ 1);
    arrive_expecting(full, boxes * rows * (128 * slabs));
#pragma unroll 2
    for (int box = 0; box < boxes; ++box) {
      const int page = static_cast<int>(load_word(page_slot(n) + 4 * box));
      // Such a page lies outside of the map: zeros come.
      if (page < 0 || page >= p_.cache.pages) note(p_, rules::unsound_page);
#pragma unroll
      for (int slab = 0; slab < slabs; ++slab)
        copy_box(to + slab * (S.tile_keys * 128) + box * rows * 128, map, full, slab * 64, inside, kv, page,
                 Kept::often);
      inside += rows;
      if (inside == p_.cache.page) inside = 0;
    }
  }

  // Bias and keep of a tile, of each group its rows.
  TESSERA_DEVICE void copy_pairs(const Corner& corner, int row) {
    if constexpr (S.pairs) {
      const rules::GridMap &bias = p_.pairs.bias, &keep = p_.pairs.keep;
      const int bytes = bias.bytes + keep.bytes, key = row - corner.first_key;
      if (bytes == 0) return;
      const Address full = shared_address(&shared_.pairs_full[pairs_.stage()]);
      wait(shared_address(&shared_.pairs_empty[pairs_.stage()]), pairs_.parity() ^ 1);
      arrive_expecting(full, S.groups * bytes);
#pragma unroll
      for (int g = 0; g < S.groups; ++g) {
        const Address to = Sm90Pairs<S>::tile(shared_address(shared_.pairs), p_.pairs, pairs_.stage(), g);
        const int query = corner.first_row + 64 * g;
        if (bias.bytes > 0)
          for (int slab = 0; slab < S.tile_keys / 64; ++slab)
            copy_box(to + slab * (64 * 128), &bias.map, full, key + 64 * slab, query * bias.query,
                     corner.head * bias.head, corner.batch * bias.batch, Kept::often);
        if (keep.bytes > 0)
          copy_box(to + Sm90Pairs<S>::keep_begin(p_.pairs), &keep.map, full, key, query * keep.query,
                   corner.head * keep.head, corner.batch * keep.batch, Kept::often);
      }
      pairs_.advance(p_.pairs.slots);
    }
  }

  const Sm90ForwardParams& p_;
  Sm90Shared<S>& shared_;
  unsigned k_ = 0, v_ = 0, pages_ = 0;  // tiles so far
  TurningRing pairs_;
  int keys_ = 0;  // with pages, of the sequence
};

}  // namespace tessera::device
