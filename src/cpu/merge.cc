// Joining partial states over disjoint key sets, and its backward.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/error.h"
#include "core/number.h"
#include "core/operand.h"
#include "cpu/cpu.h"
#include "cpu/threads.h"
#include "rules/softmax.h"

namespace tessera::cpu {
namespace {

using core::bytes_of;
using core::read;
using core::write;

using core::offset_of;
using core::Operand;
using core::require;
using rules::Index;

// One row of all parts: its weights are computed once.
template <class T>
struct Row {
  const tessera_merge& m;
  T* weights;  // one a part
  T* whole;    // the merged out of this row
  Index b, s, h;

  T number(const Operand& o, const void* data, Index d) const {
    return read<T>(static_cast<const char*>(data) + offset_of(o, b, s, h, d) * bytes_of(o.dtype), o.dtype);
  }
  void put(const Operand& o, void* data, Index d, T x) const {
    write(static_cast<char*>(data) + offset_of(o, b, s, h, d) * bytes_of(o.dtype), o.dtype, x);
  }
  T part_out(Index n, Index d) const { return number(m.part_out, m.part_out_data[n], d); }
  T& weight(Index n) const { return weights[n]; }

  // The whole lse; the parts' weights beside it. An empty part weighs 0 and its out is not looked at.
  T weigh() const {
    constexpr T none = -std::numeric_limits<T>::infinity();
    const auto exponential = [](T x) { return std::exp(x); };
    const auto lse = [&](Index n) { return number(m.part_lse, m.part_lse_data[n], 0); };
    T most = none, total = 0;
    for (Index n = 0; n < m.parts; ++n) most = rules::max(most, lse(n));
    for (Index n = 0; n < m.parts; ++n) total += rules::weight(lse(n), most, exponential);
    const T whole = total == 0 ? none : most + std::log(total);
    for (Index n = 0; n < m.parts; ++n) weight(n) = rules::weight(lse(n), whole, exponential);
    return whole;
  }
  void join() const {
    for (Index d = 0; d < m.dim; ++d) {
      T sum = 0;
      for (Index n = 0; n < m.parts; ++n)
        if (weight(n) != 0) sum += weight(n) * part_out(n, d);
      whole[d] = sum;
    }
  }

  void forward() const {
    const T lse = weigh();
    join();
    for (Index d = 0; d < m.dim; ++d) put(m.out, m.out_data, d, whole[d]);
    if (m.lse.dtype != TESSERA_ABSENT) put(m.lse, m.lse_data, 0, lse);
  }
  void backward() const {
    weigh();
    join();
    const T dlse = m.dlse.dtype == TESSERA_ABSENT ? T{0} : number(m.dlse, m.dlse_data, 0);
    for (Index n = 0; n < m.parts; ++n) {
      const T w = weight(n);
      T through = dlse;
      for (Index d = 0; d < m.dim; ++d) {
        const T dout = number(m.dout, m.dout_data, d);
        put(m.part_out, m.dpart_out_data[n], d, w == 0 ? T{0} : w * dout);
        if (w != 0) through += dout * (part_out(n, d) - whole[d]);
      }
      put(m.part_lse, m.dpart_lse_data[n], 0, w == 0 ? T{0} : w * through);
    }
  }
};

int threads_of(const tessera_merge& m) {
  return m.threads ? m.threads : omp_get_max_threads();
}

template <class T>
Index row_bytes(const tessera_merge& m) {
  return rules::round_up((m.parts + m.dim) * static_cast<Index>(sizeof(T)), 64);
}

template <class T>
void merge_as(const tessera_merge& m, std::byte* workspace) {
  const Index rows = m.batch * m.len;
  parallel_for(threads_of(m), rows, [&](Index at, int thread) {
    T* const weights = reinterpret_cast<T*>(workspace + thread * row_bytes<T>(m));
    for (Index h = 0; h < m.heads; ++h) {
      const Row<T> row = {m, weights, weights + m.parts, at / m.len, at % m.len, h};
      if (m.pass == TESSERA_FORWARD) row.forward();
      else row.backward();
    }
  });
}

void check_operand(const tessera_merge& m, const char* name, const Operand& o, Index last, bool needed, bool is_lse,
                   bool written) {
  if (!needed && o.dtype == TESSERA_ABSENT) return;
  const bool is_float = o.dtype >= TESSERA_F64 && o.dtype <= TESSERA_F16;
  require(is_float, "merge: {}.dtype is {}; it must be f64, f32, bf16 or f16.", name, o.dtype);
  require(!is_lse || o.dtype == m.part_lse.dtype, "merge: {}.dtype is {}; it must be part_lse's, {}.", name,
          rules::dtype_rows[o.dtype].text, rules::dtype_rows[m.part_lse.dtype].text);
  const Index full[] = {m.batch, m.len, m.heads, last};
  for (int d = 0; d < 4; ++d)
    require(o.extent[d] == full[d], "merge: {}.extent[{}] is {}; it must be {}.", name, d, o.extent[d], full[d]);
  core::check_strides(name, o);
  if (written) core::check_places(name, o);
}

}  // namespace

void check_merge(const tessera_merge& m) {
  require(m.pass == TESSERA_FORWARD || m.pass == TESSERA_BACKWARD,
          "merge: pass is {}; it must be forward (0) or backward (1).", m.pass);
  require(m.parts >= 1, "merge: parts is {}; it must be at least 1.", m.parts);
  require(m.threads >= 0 && m.threads <= 1024, "merge: threads is {}; it must be from 0 (all) to 1024.", m.threads);
  constexpr int64_t most = INT32_MAX;
  require(
      m.batch >= 0 && m.len >= 0 && m.heads >= 1 && m.dim >= 1 && std::max({m.batch, m.len, m.heads, m.dim}) <= most,
      "merge: batch, len, heads, dim are {}, {}, {}, {}; they must be at least 0, 0, 1, 1 and below 2^31.", m.batch,
      m.len, m.heads, m.dim);
  const bool backward = m.pass == TESSERA_BACKWARD;
  require(m.part_lse.dtype == TESSERA_F32 || m.part_lse.dtype == TESSERA_F64,
          "merge: part_lse.dtype is {}; it must be f32 or f64.", m.part_lse.dtype);
  check_operand(m, "part_out", m.part_out, m.dim, true, false, backward);
  check_operand(m, "part_lse", m.part_lse, 1, true, true, backward);
  check_operand(m, "out", m.out, m.dim, !backward, false, !backward);
  check_operand(m, "lse", m.lse, 1, false, true, !backward);
  check_operand(m, "dout", m.dout, m.dim, backward, false, false);
  check_operand(m, "dlse", m.dlse, 1, false, true, false);
  if (m.batch == 0 || m.len == 0) return;
  require(m.part_out_data && m.part_lse_data,
          "merge: part_out_data or part_lse_data is NULL; bind one pointer a part.");
  for (Index n = 0; n < m.parts; ++n)
    require(m.part_out_data[n] && m.part_lse_data[n], "merge: part {} is NULL; bind its out and lse.", n);
  if (!backward) {
    require(m.out_data, "merge: out_data is NULL; bind it.");
    require(m.lse.dtype == TESSERA_ABSENT || m.lse_data, "merge: lse_data is NULL; bind it or leave lse absent.");
    return;
  }
  require(m.dout_data && m.dpart_out_data && m.dpart_lse_data,
          "merge: backward needs dout_data, dpart_out_data and dpart_lse_data.");
  require(m.dlse.dtype == TESSERA_ABSENT || m.dlse_data, "merge: dlse_data is NULL; bind it or leave dlse absent.");
  for (Index n = 0; n < m.parts; ++n)
    require(m.dpart_out_data[n] && m.dpart_lse_data[n], "merge: the gradients of part {} are NULL; bind them.", n);
}

int64_t merge_bytes(const tessera_merge& m) {
  return threads_of(m) * (m.part_lse.dtype == TESSERA_F64 ? row_bytes<double>(m) : row_bytes<float>(m));
}

void merge(const tessera_merge& m, std::byte* workspace) {
  if (m.part_lse.dtype == TESSERA_F64) merge_as<double>(m, workspace);
  else merge_as<float>(m, workspace);
}

}  // namespace tessera::cpu
