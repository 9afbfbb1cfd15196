#include "cuda/general_shape.h"

#include <algorithm>
#include <array>

#include "cuda/code.h"
#include "rules/dtype.h"

namespace tessera::cuda {
namespace {

using core::Device;
using core::Problem;
using rules::GeneralSpec;
using rules::Product;
using rules::Task;

// Sums of more keys than this are kept in parts where a result's digits would show what tensor cores cut off: of
// float32 results soon, of float16 ones late, of bfloat16 ones never (DESIGN.md).
constexpr int64_t flush_f32 = 4096, flush_f16 = 1 << 17;

bool needs_flushes(const Problem& p, Product product) {
  if (product == Product::f32) return false;
  const int32_t out = core::operand(p, TESSERA_OUT).dtype;
  // How long others' keys may be must not change a row's bits.
  if (p.batch_invariant) return out != TESSERA_BF16;
  return (out == TESSERA_F32 && p.len_k > flush_f32) || (out == TESSERA_F16 && p.len_k > flush_f16);
}

// Query heads of a group share a tile of rows where queries are so few that one head's would not fill it.
int pack_of(const Problem& p) {
  const int64_t group = core::group(p);
  return p.len_q < 16 * rules::most_warps ? static_cast<int>(group) : 1;
}

int warps_for(int64_t rows) {
  return static_cast<int>(std::clamp<int64_t>(rules::ceil_div(rows, 16), 1, rules::most_warps));
}

// How much of what comes by is in shared memory at once, and whether what stays takes turns.
struct Way {
  int at_once;  // panels; 0: all
  bool takes_turns;
};
constexpr Way ways[] = {{0, false}, {4, false}, {2, false}, {1, false}, {1, true}};

bool needs_scratch(const Problem& p) {
  const bool options = p.softcap != 0 || core::has(p, TESSERA_SLOPES) || core::has(p, TESSERA_BIAS) ||
                       core::has(p, TESSERA_KEEP) || core::has(p, TESSERA_DOCUMENTS_Q);
  return options || p.dropout != 0;
}

// Shared memory of a block, as device/general lays it out.
int64_t bytes_of(const Problem& p, const Shape& s) {
  const auto& [task, product, columns, width] = s.spec;
  const int64_t slice = int64_t{columns} / rules::panel_columns(product);
  const int64_t staging = int64_t{s.warps} * rules::scratch_bytes(64);
  const auto panels = [](int64_t rows, int64_t count) { return rows * count * 128; };
  const rules::Cut& c = s.cut;
  const int64_t begin = rules::panels_begin(task == Task::keys ? width : s.rows());
  if (task == Task::forward) {
    int64_t bytes = panels(s.rows(), c.panels) + panels(width, c.at_once) + panels(width, slice);
    if (c.flushes) bytes += int64_t{s.rows()} * columns * 4;
    if (needs_scratch(p)) bytes += int64_t{s.warps} * rules::scratch_bytes(width);
    return begin + std::max(bytes, staging);
  }
  const int64_t stay = c.takes_turns ? std::max(c.panels, c.panels_v) : c.panels + c.panels_v;
  int64_t bytes = panels(s.rows(), stay) + panels(width, c.at_once + c.at_once_v);
  if (c.at_once < c.panels) bytes += panels(width, slice);
  if (task == Task::keys && c.at_once_v < c.panels_v) bytes += panels(width, slice);
  bytes += int64_t{s.warps} * 2 * rules::scratch_bytes(width);
  return begin + std::max(bytes, staging);
}

void cut_into_items(const Problem& p, Shape& s) {
  rules::Cut& c = s.cut;
  const auto slices = [&](int64_t dim) { return static_cast<int>(rules::ceil_div(dim, s.spec.columns)); };
  c.row_tiles = static_cast<int>(rules::ceil_div(p.len_q * c.pack, s.rows()));
  switch (s.spec.task) {
    case Task::forward:
      c.slices = slices(p.dim_v);
      c.items = p.batch * (p.heads_q / c.pack) * c.row_tiles * c.slices;
      break;
    case Task::queries:
      c.slices = c.sums_slopes ? 1 : slices(p.dim);
      c.items = p.batch * p.heads_q * c.row_tiles * c.slices;
      break;
    case Task::keys:
      c.key_tiles = static_cast<int>(rules::ceil_div(p.len_k, s.rows()));
      c.slices = slices(std::max(p.dim, p.dim_v));
      c.items = p.batch * p.heads_kv * c.key_tiles * c.slices;
      break;
    default: {  // bias
      const core::Operand& o = core::operand(p, TESSERA_DBIAS);
      c.key_tiles = static_cast<int>(rules::ceil_div(p.len_k, s.spec.width));
      c.items = core::elements(o) == 0 ? 0
                                       : o.extent[0] * o.extent[1] * (o.extent[2] == 1 ? 1 : c.row_tiles) *
                                             (o.extent[3] == 1 ? 1 : c.key_tiles);
    }
  }
}

}  // namespace

Product product_of(const Problem& p, const Device& device) {
  const int32_t dtype = core::data_dtype(p);
  // A float32 dO beside 16-bit inputs would lose its digits.
  const bool wide_dout = p.pass == TESSERA_BACKWARD && core::operand(p, TESSERA_DOUT).dtype == TESSERA_F32;
  if (dtype == TESSERA_BF16 && !wide_dout) return Product::bf16;
  if (dtype == TESSERA_F16 && !wide_dout) return Product::f16;
  return p.allow_tf32 && dtype == TESSERA_F32 && device.sm_arch >= 80 ? Product::tf32 : Product::f32;
}

std::vector<Job> jobs_of(const Problem& p, const Device& device) {
  if (p.pass == TESSERA_APPEND) return {};
  const Product product = product_of(p, device);
  if (p.pass == TESSERA_FORWARD) return {{Task::forward, product}};
  constexpr int64_t few = 4096;
  std::vector<Job> jobs;
  if (core::has(p, TESSERA_DK) || core::has(p, TESSERA_DV)) jobs.push_back({Task::keys, product});
  if (core::has(p, TESSERA_DQ)) jobs.push_back({Task::queries, product});
  if (core::has(p, TESSERA_DSLOPES)) jobs.push_back({Task::queries, Product::f32, true});
  if (core::has(p, TESSERA_DBIAS))
    jobs.push_back({Task::bias, p.batch_invariant || core::elements(core::operand(p, TESSERA_DBIAS)) < few
                                    ? Product::f32
                                    : product});
  return jobs;
}

std::optional<Shape> shape_of(const Problem& p, const Device& device, const Job& job, int64_t* least_bytes) {
  const Task task = job.task;
  const bool forward = task == Task::forward;
  const int pack = forward ? pack_of(p) : 1;
  const int most = warps_for(task == Task::keys ? p.len_k : p.len_q * pack);
  // The product asked for, and what TF32 falls back to: float32 as it is.
  std::array<Product, 2> products = {job.product, Product::f32};
  const size_t count = products[0] == Product::tf32 ? 2 : 1;
  int64_t least = INT64_MAX;
  for (size_t n = 0; n < count; ++n)
    for (const GeneralSpec& spec : shipped_general()) {
      if (spec.task != task || spec.product != products[n]) continue;
      // Narrow results by the narrow kernel, if there is one; it stands next in the list.
      const int64_t dims = forward ? p.dim_v : std::max(p.dim, p.dim_v);
      if (spec.columns > 64 && dims <= 64 && spec.product != Product::tf32) continue;
      for (const Way& way : ways)
        for (int warps = most; warps >= 1; warps /= 2) {
          if (forward && way.takes_turns) continue;
          if (way.at_once == 0 && warps * 4 <= most && warps < most) continue;  // rather by parts than by so few rows
          Shape s = {spec, {}, warps, 0};
          s.cut.pack = pack;
          s.cut.panels = rules::panels_of(spec.product, static_cast<int>(p.dim));
          s.cut.panels_v = rules::panels_of(spec.product, static_cast<int>(p.dim_v));
          const int slice = spec.columns / rules::panel_columns(spec.product);
          const auto at_once = [&](int panels) {
            const int whole = forward ? panels : static_cast<int>(rules::round_up(panels, slice));
            return way.at_once == 0 ? whole : std::min(way.at_once, whole);
          };
          s.cut.at_once = at_once(s.cut.panels);
          s.cut.at_once_v = at_once(s.cut.panels_v);
          s.cut.takes_turns = way.takes_turns;
          s.cut.sums_slopes = job.sums_slopes;
          s.cut.flushes = forward && needs_flushes(p, spec.product);
          const int64_t bytes = bytes_of(p, s);
          least = std::min(least, bytes);
          if (bytes > device.shared_per_block) continue;
          s.shared_bytes = static_cast<int>(bytes);
          cut_into_items(p, s);
          return s;
        }
    }
  if (least_bytes) *least_bytes = least;
  return {};
}

}  // namespace tessera::cuda
