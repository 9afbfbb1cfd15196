// What a plan says of its work: bytes, FLOPs, the roofline, and the score matrix that is never made.
#include <algorithm>

#include "core/plan.h"

namespace tessera::core {
namespace {

// (query, key) pairs that the mask's bands keep, from the upper bounds of the lengths. Long sequences are counted on
// evenly spread rows: exact for bands that are straight lines, as all are but chunk's.
double kept_pairs(const Problem& p) {
  constexpr int64_t most = 512;
  const int64_t offset = p.mask.corner == TESSERA_BOTTOM_RIGHT ? p.len_k - p.len_q
                         : p.mask.corner == TESSERA_CORNER_AT  ? p.mask.corner_at
                                                               : 0;
  const rules::BandMask band = band_mask(p, p.len_k, offset);
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

}  // namespace

Cost cost(const Problem& p, const Device& device) {
  Cost c;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    if (!has(p, name)) continue;
    // Each element once, however often it is seen: dimensions of stride 0, views that overlap.
    Operand once = operand(p, name);
    for (int d = 0; d < 4; ++d)
      if (once.stride[d] == 0) once.extent[d] = std::min<int64_t>(1, once.extent[d]);
    const int64_t bytes = std::min(elements(once), span(once)) * dtype_bytes(once.dtype);
    (is_output(role(p, name)) ? c.bytes_written : c.bytes_read) += bytes;
  }
  const double planes = static_cast<double>(p.batch * p.heads_q), pairs = planes * kept_pairs(p);
  const double d = static_cast<double>(p.dim), dv = static_cast<double>(p.dim_v);
  c.flops = 2 * pairs * (p.pass == TESSERA_FORWARD ? d + dv : 3 * d + 2 * dv);
  const double scores = planes * static_cast<double>(p.len_q) * static_cast<double>(p.len_k);
  const double bytes = scores * static_cast<double>(dtype_bytes(accumulation_dtype(p)));
  c.score_bytes = bytes < 9e18 ? static_cast<int64_t>(bytes) : INT64_MAX;
  const bool half = data_dtype(p) == TESSERA_BF16 || data_dtype(p) == TESSERA_F16;
  const double peak = half ? device.flops_16 : device.flops_32;
  if (peak > 0) c.seconds = c.flops / peak;
  if (device.bytes_per_second > 0)
    c.seconds = std::max(c.seconds, static_cast<double>(c.bytes_read + c.bytes_written) / device.bytes_per_second);
  return c;
}

}  // namespace tessera::core
