// What a plan says of its work: bytes, FLOPs, the roofline, and the score matrix that is never made.
#include <algorithm>

#include "core/plan.h"

namespace tessera::core {
namespace {

// The bands of a sequence as long as can be.
rules::BandMask longest_band(const Problem& p) {
  const int64_t offset = p.mask.corner == TESSERA_BOTTOM_RIGHT ? p.len_k - p.len_q
                         : p.mask.corner == TESSERA_CORNER_AT  ? p.mask.corner_at
                                                               : 0;
  return band_mask(p, p.len_k, offset);
}

// Keys of one sequence that some query sees.
int64_t seen_by_queries(const Problem& p) {
  if (p.len_q == 0) return 0;
  const rules::Visit v = rules::visit(longest_band(p), {0, p.len_q});
  return v.head.size() + v.near.size();
}

// Bytes of an operand, each element once, however often it is seen: dimensions of stride 0, views that overlap.
int64_t bytes_of(const Problem& p, int name) {
  if (name == TESSERA_V && p.cache.v_in_k) return 0;  // it lies in k
  Operand once = operand(p, name);
  for (int d = 0; d < 4; ++d)
    if (once.stride[d] == 0) once.extent[d] = std::min<int64_t>(1, once.extent[d]);
  int64_t count = std::min(elements(once), span(once));
  if (is_cache(p) && operand_row(name).axes[1] == Axis::store_rows) {  // of a cache, the keys that queries see
    const bool shared = once.extent[1] == 1;                           // a scale of all tokens
    if (!shared) count = std::min(count, p.batch * seen_by_queries(p) * once.extent[2] * once.extent[3]);
  }
  return count * dtype_bytes(once.dtype);
}
int64_t appended_bytes(const Problem& p, int name) {
  const Operand& o = operand(p, name);
  return new_tokens(p) * o.extent[2] * o.extent[3] * dtype_bytes(o.dtype);
}

}  // namespace

double kept_pairs(const Problem& p) {
  constexpr int64_t most = 512;
  const rules::BandMask band = longest_band(p);
  const int64_t rows = std::min(p.len_q, most);
  double pairs = 0;
  for (int64_t n = 0; n < rows; ++n) {
    // The middle of the n-th of `rows` equal parts, from both sides, so that straight lines average exactly.
    const int64_t low = (2 * n + 1) * p.len_q / (2 * rows),
                  high = p.len_q - 1 - (2 * (rows - 1 - n) + 1) * p.len_q / (2 * rows);
    for (const int64_t row : {low, high}) {
      const rules::Range near = band.near(row), head = band.head(row);
      pairs += 0.5 * static_cast<double>(near.size() + head.size() - rules::overlap(near, head).size());
    }
  }
  if (rows > 0) pairs *= static_cast<double>(p.len_q) / static_cast<double>(rows);
  return pairs;
}

Cost cost(const Problem& p, const Device& device) {
  Cost c;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    if (!has(p, name)) continue;
    const Role r = role(p, name);
    const bool grows = r == Role::update && name != TESSERA_STATUS;
    if (!is_output(r) && !(grows && p.pass == TESSERA_APPEND)) c.bytes_read += bytes_of(p, name);
    if (is_output(r)) c.bytes_written += bytes_of(p, name);
    if (grows) c.bytes_written += appended_bytes(p, name);
  }
  if (p.pass != TESSERA_APPEND) {
    const double planes = static_cast<double>(p.batch * p.heads_q), pairs = planes * kept_pairs(p);
    const double d = static_cast<double>(p.dim), dv = static_cast<double>(p.dim_v);
    c.flops = 2 * pairs * (p.pass == TESSERA_FORWARD ? d + dv : 3 * d + 2 * dv);
    const double scores = planes * static_cast<double>(p.len_q) * static_cast<double>(p.len_k);
    const double bytes = scores * static_cast<double>(dtype_bytes(accumulation_dtype(p)));
    c.score_bytes = bytes < 9e18 ? static_cast<int64_t>(bytes) : INT64_MAX;
  }
  const bool half = data_dtype(p) == TESSERA_BF16 || data_dtype(p) == TESSERA_F16;
  const double peak = half ? device.flops_16 : device.flops_32;
  if (peak > 0) c.seconds = c.flops / peak;
  if (device.bytes_per_second > 0)
    c.seconds = std::max(c.seconds, static_cast<double>(c.bytes_read + c.bytes_written) / device.bytes_per_second);
  return c;
}

}  // namespace tessera::core
