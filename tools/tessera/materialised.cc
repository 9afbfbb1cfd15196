#include "materialised.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>

#include "cache.h"
#include "matrix.h"
#include "number.h"
#include "status.h"

namespace tessera::tools {
namespace {

constexpr int64_t block_rows = 8 * tile_rows;  // rows that one thread takes at a time

int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

template <class Convert>
void convert_row(const std::byte* from, int64_t stride_bytes, int64_t count, float* to, Convert convert) {
  for (int64_t n = 0; n < count; ++n) to[n] = convert(from + n * stride_bytes);
}

// Row (batch, token, head) of an operand as floats.
void read_row(const Case& c, int name, int64_t batch, int64_t token, int64_t head, float* to) {
  const tessera_operand& o = c.operand(name);
  const std::byte* from = c.at(name, {batch, token, head, 0});
  const int64_t stride = o.stride[3] * static_cast<int64_t>(tessera_dtype_bytes(o.dtype)), count = o.extent[3];
  switch (o.dtype) {
    case TESSERA_F32:
      return convert_row(from, stride, count, to, read_as<float>);
    case TESSERA_BF16:
      return convert_row(from, stride, count, to,
                         [](const std::byte* x) { return bf16_to_float(read_as<uint16_t>(x)); });
    default:
      return convert_row(from, stride, count, to,
                         [](const std::byte* x) { return f16_to_float(read_as<uint16_t>(x)); });
  }
}

void refuse(const tessera_problem& p) {
  const auto given = [&](int name) { return p.operand[name].dtype != TESSERA_ABSENT; };
  const auto no = [](bool is, const char* what) {
    if (is)
      throw Error(TESSERA_UNSUPPORTED, fmt::format("materialised: does not do {}; leave it out of the line", what));
  };
  no(p.pass == TESSERA_BACKWARD, "backward");
  no(p.operand[TESSERA_Q].dtype == TESSERA_F64, "f64");
  no(p.softcap != 0, "softcap");
  no(p.dropout != 0, "dropout");
  no(p.batch_invariant != 0, "batch_invariant");
  no(given(TESSERA_BIAS), "bias");
  no(given(TESSERA_SLOPES), "alibi");
  no(given(TESSERA_SINKS), "sink");
  no(given(TESSERA_CU_SEQLENS_Q) || given(TESSERA_CU_SEQLENS_K), "varlen");
  no(given(TESSERA_SEQUSED_Q) || given(TESSERA_SEQUSED_K), "seqused");
  no(given(TESSERA_MAX_SCORE), "max");
  no(is_cache(p), "caches");
  no(p.operand[TESSERA_K].dtype == TESSERA_E4M3, "e4m3");
}

bool masked(const tessera_problem& p) {
  const tessera_mask& m = p.mask;
  const auto given = [&](int name) { return p.operand[name].dtype != TESSERA_ABSENT; };
  return m.causal || m.has_window || m.has_prefix || m.chunk || given(TESSERA_KEEP) || given(TESSERA_EXCLUDE_KEYS) ||
         given(TESSERA_DOCUMENTS_Q);
}

}  // namespace

Materialised::Materialised(const Case& c, int threads) : case_(c) {
  const tessera_problem& p = c.problem();
  refuse(p);
  rows_ = round_up(p.len_q, tile_rows);
  columns_ = round_up(p.len_k, matrix_target().panel);
  columns_v_ = round_up(p.dim_v, matrix_target().panel);

  // Threads share out heads if there are enough, and if a matrix for each does not take more than a gigabyte.
  const double matrices = 4.0 * static_cast<double>(rows_) * static_cast<double>(columns_) * threads;
  const bool over_heads = p.batch * p.heads_kv >= threads && matrices <= 1e9;
  (over_heads ? outer_ : inner_) = threads;
  const auto floats = [](int64_t a, int64_t b) { return allocate(static_cast<size_t>(a * b) * sizeof(float), 64); };
  for (int n = 0; n < outer_; ++n)
    scratch_.push_back({floats(rows_, p.dim), floats(columns_, p.dim), floats(p.len_k, columns_v_),
                        floats(rows_, columns_), floats(rows_, columns_v_)});

  if (!masked(p)) return;
  per_batch_ = p.operand[TESSERA_KEEP].extent[0] > 1 || c.has(TESSERA_EXCLUDE_KEYS) || c.has(TESSERA_DOCUMENTS_Q) ||
               c.has(TESSERA_CORNER_OFFSETS);
  per_head_ = p.operand[TESSERA_KEEP].extent[1] > 1;
  const int64_t batches = per_batch_ ? p.batch : 1, heads = per_head_ ? p.heads_q : 1;
  grids_.resize(static_cast<size_t>(batches * heads * p.len_q * columns_));
  std::vector<uint8_t> dense(static_cast<size_t>(p.len_q * p.len_k));
  for (int64_t b = 0; b < batches; ++b)
    for (int64_t h = 0; h < heads; ++h) {
      tessera_error error = fresh_error();
      call(tessera_mask_grid(&p, &c.bindings(), b, h, dense.data(), &error), error);
      for (int64_t i = 0; i < p.len_q; ++i)
        std::copy_n(dense.begin() + i * p.len_k, p.len_k, grids_.begin() + ((b * heads + h) * p.len_q + i) * columns_);
    }
}

int64_t Materialised::bytes() const {
  size_t bytes = grids_.size();
  for (const Scratch& s : scratch_)
    bytes += s.queries.bytes + s.keys.bytes + s.values.bytes + s.scores.bytes + s.out.bytes;
  return static_cast<int64_t>(bytes);
}

const uint8_t* Materialised::grid(int64_t batch, int64_t head) const {
  const tessera_problem& p = case_.problem();
  const int64_t index = (per_batch_ ? batch : 0) * (per_head_ ? p.heads_q : 1) + (per_head_ ? head : 0);
  return grids_.empty() ? nullptr : grids_.data() + index * p.len_q * columns_;
}

double Materialised::run() {
  const tessera_problem& p = case_.problem();
  const int64_t heads = p.heads_kv, pairs = p.batch * heads;
  const auto begin = std::chrono::steady_clock::now();
#pragma omp parallel for num_threads(outer_) schedule(static)
  for (int n = 0; n < outer_; ++n)
    for (int64_t pair = n; pair < pairs; pair += outer_)
      attend(pair / heads, pair % heads, scratch_[static_cast<size_t>(n)]);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void Materialised::attend(int64_t batch, int64_t head_kv, Scratch& scratch) const {
  const tessera_problem& p = case_.problem();
  const int64_t panel = matrix_target().panel, dim = p.dim, len_k = p.len_k;
  float* const keys = scratch.at(&Scratch::keys);
  float* const values = scratch.at(&Scratch::values);
  float* const queries = scratch.at(&Scratch::queries);
  float* const scores = scratch.at(&Scratch::scores);
  float* const out = scratch.at(&Scratch::out);
  const auto scale = static_cast<float>(p.has_scale ? p.scale : 1 / std::sqrt(static_cast<double>(dim)));

#pragma omp parallel num_threads(inner_)
  {
    std::vector<float> row(static_cast<size_t>(std::max(dim, columns_v_)));
#pragma omp for schedule(static)
    for (int64_t j = 0; j < columns_; ++j) {
      std::fill(row.begin(), row.end(), 0.0f);
      if (j < len_k) read_row(case_, TESSERA_K, batch, j, head_kv, row.data());
      for (int64_t d = 0; d < dim; ++d) keys[(j / panel * dim + d) * panel + j % panel] = row[static_cast<size_t>(d)];
      if (j >= len_k) continue;
      // A key that is excluded for all rows may hold NaN, and 0 * NaN is NaN.
      std::fill(row.begin(), row.end(), 0.0f);
      const bool excluded =
          case_.has(TESSERA_EXCLUDE_KEYS) && *case_.at(TESSERA_EXCLUDE_KEYS, {batch, j, 0, 0}) != std::byte{0};
      if (!excluded) read_row(case_, TESSERA_V, batch, j, head_kv, row.data());
      for (int64_t d = 0; d < columns_v_; ++d)
        values[(d / panel * len_k + j) * panel + d % panel] = row[static_cast<size_t>(d)];
    }
    for (int64_t head = head_kv * (p.heads_q / p.heads_kv); head < (head_kv + 1) * (p.heads_q / p.heads_kv); ++head) {
      const uint8_t* keep = grid(batch, head);
#pragma omp for schedule(dynamic)
      for (int64_t first = 0; first < rows_; first += block_rows) {
        const int64_t rows = std::min(block_rows, rows_ - first), used = std::min(rows, p.len_q - first);
        std::fill_n(queries + first * dim, rows * dim, 0.0f);
        for (int64_t i = 0; i < used; ++i)
          read_row(case_, TESSERA_Q, batch, first + i, head, queries + (first + i) * dim);
        matrix_target().multiply(
            {queries + first * dim, dim, keys, scores + first * columns_, columns_, rows, columns_, dim});
        std::array<RowSum, block_rows> sums{};
        for (int64_t i = 0; i < used; ++i) {
          float* const score = scores + (first + i) * columns_;
          std::fill(score + len_k, score + columns_, -std::numeric_limits<float>::infinity());
          sums[static_cast<size_t>(i)] =
              matrix_target().softmax(score, keep ? keep + (first + i) * columns_ : nullptr, columns_, scale);
        }
        matrix_target().multiply({scores + first * columns_, columns_, values, out + first * columns_v_, columns_v_,
                                  rows, columns_v_, len_k});
        for (int64_t i = 0; i < used; ++i) {
          const auto [max, sum] = sums[static_cast<size_t>(i)];
          for (int64_t d = 0; d < p.dim_v; ++d)
            store(case_.at(TESSERA_OUT, {batch, first + i, head, d}), case_.operand(TESSERA_OUT).dtype,
                  sum == 0 ? 0 : out[(first + i) * columns_v_ + d] / sum);
          if (case_.has(TESSERA_LSE))
            store(case_.at(TESSERA_LSE, {batch, first + i, head, 0}), case_.operand(TESSERA_LSE).dtype,
                  max + std::log(sum));
        }
      }
    }
  }
}

}  // namespace tessera::tools
