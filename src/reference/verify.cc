#include <omp.h>

#include "core/check.h"
#include "core/error.h"
#include "reference/formulas.h"

namespace tessera::reference {
namespace {

struct Results {
  Problem problem;
  Bindings bound;
  std::vector<std::vector<std::byte>> memory;

  View operator[](int name) const { return view(problem, bound, name); }
};

enum class Stored { as_float64, as_declared };

bool is_judged(const Problem& p, int name) {
  return core::has(p, name) && (core::is_output(core::role(p, name)) || grows(p, name));
}

// The same question with outputs of its own, dense. A cache that grows is copied, and keeps its dtype and layout: what
// is stored there is read again. It holds the new rows already; they are written anew.
Results own_results(const Problem& p, const Bindings& got, Stored stored) {
  Results r = {p, got, {}};
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    core::Operand& o = r.problem.operand[name];
    if (!is_judged(p, name)) continue;
    if (grows(p, name)) {
      const auto* const from = static_cast<const std::byte*>(got.data[name]);
      r.memory.emplace_back(from, from + core::span(o) * core::dtype_bytes(o.dtype));
    } else {
      o = dense_like(o, stored == Stored::as_float64 ? static_cast<int32_t>(TESSERA_F64) : o.dtype);
      r.memory.emplace_back(static_cast<size_t>(core::elements(o) * core::dtype_bytes(o.dtype)));
    }
    r.bound.data[name] = r.memory.back().data();
  }
  if (p.cache.v_in_k) r.bound.data[TESSERA_V] = r.bound.data[TESSERA_K];
  return r;
}

core::Operand one_per_row(core::Operand o) {
  if (o.dtype == TESSERA_ABSENT) return o;
  o.extent[3] = 1;
  return dense_like(o, TESSERA_F64);
}

struct Errors {
  int64_t count = 0;
  double max = 0, squares = 0;

  void add(double error) {
    ++count;
    max = std::max(max, error);
    squares += error * error;
  }
  double rms() const { return count ? std::sqrt(squares / static_cast<double>(count)) : 0; }
};

// How large the terms of the gradients are.
struct Terms {
  double row_max = 0, row_sum = 0;  // of G's terms, over query rows
  double q = 0, k = 0;              // largest element
};

class Verification {
 public:
  Verification(const Problem& problem, const Bindings& bindings, int64_t pairs)
      : p(problem),
        got(bindings),
        owned(places(p, got, pairs)),
        exact(own_results(p, got, Stored::as_float64)),
        yardstick(own_results(p, got, Stored::as_declared)),
        facts(one_per_row(p.operand[TESSERA_OUT])),
        fact_values(static_cast<size_t>(core::elements(facts))) {
    const Task task = {.sample_pairs = pairs, .threads = omp_get_max_threads()};
    Task noting = task;
    noting.row_facts = {facts, fact_values.data()};
    oracle(exact.problem, exact.bound, noting);
    naive(yardstick.problem, yardstick.bound, task);
    if (p.pass == TESSERA_BACKWARD) measure_terms();
  }

  std::vector<tessera_verdict> verdicts() const {
    std::vector<tessera_verdict> all;
    for (int name = 0; name < TESSERA_NAMES; ++name) {
      if (is_judged(p, name)) all.push_back(judge(name));
    }
    return all;
  }

 private:
  tessera_verdict judge(int name) const {
    const View ours = view(p, got, name), oracle = exact[name], naive = yardstick[name];
    const bool is_lse = name == TESSERA_LSE || name == TESSERA_MAX_SCORE;
    Errors errors, naive_errors;
    double largest = 0, closest = -1, closest_bound = 0;
    bool nonfinite_equal = true, zeros = true;
    for_each_element(name, [&](int64_t a, int64_t b, int64_t c, int64_t d, bool used) {
      const double x = ours.at(a, b, c, d), o = oracle.at(a, b, c, d), n = naive.at(a, b, c, d);
      const double fact = by_query(name) ? View{facts, fact_values.data()}.at(a, b, c, 0) : 0;
      if (const double o_stored = rounded(ours.o.dtype, o); !std::isfinite(o_stored) || !std::isfinite(x)) {
        nonfinite_equal = nonfinite_equal && (x == o_stored || (std::isnan(x) && std::isnan(o_stored)));
        ++errors.count;
        return;
      }
      const double error = std::abs(x - o);
      errors.add(error);
      if (std::isfinite(n)) naive_errors.add(std::abs(n - o));
      largest = std::max(largest, std::abs(o));
      if (!is_lse && (!used || fact == nothing_kept)) zeros = zeros && x == 0;
      if (const double bound = lse_bound(o, fact); is_lse && error / bound > closest) {
        closest = error / bound;
        closest_bound = bound;
      }
    });

    tessera_verdict v = {};
    v.size = sizeof v;
    v.name = name;
    v.nonfinite_equal = nonfinite_equal;
    v.elements = errors.count;
    v.max = errors.max;
    v.rms = errors.rms();
    v.naive_max = naive_errors.max;
    v.naive_rms = naive_errors.rms();
    if (is_lse) {
      v.bound = closest_bound;
      v.ok = nonfinite_equal && closest <= 1;
      return v;
    }
    const bool all_float64 = core::data_dtype(p) == TESSERA_F64 && ours.o.dtype == TESSERA_F64;
    // A result is no finer than the arithmetic that made it.
    const double last = std::max(ulp(ours.o.dtype, largest), ulp(core::accumulation_dtype(p), largest));
    v.bound = all_float64 ? 1e-12 * largest : 2 * naive_errors.max + 2 * last;
    const double residue = residue_bound(name, largest);
    v.bound = std::max({v.bound, smallest_normal(), residue});
    if (!all_float64 && errors.count >= 4096 && residue == 0) v.bound_rms = 1.2 * naive_errors.rms() + last / 4;
    if (!zeros) v.bound = 0;  // of the element that had to be exactly 0
    v.ok = nonfinite_equal && v.max <= v.bound && (v.bound_rms == 0 || v.rms <= v.bound_rms);
    return v;
  }

  // visit(a, b, c, d, used) for every element that is judged.
  template <class Visit>
  void for_each_element(int name, Visit visit) const {
    const int64_t* extent = p.operand[name].extent;
    if (grows(p, name)) {
      for_each_new(p, got, [&](const Sequence& s, int64_t n) {
        const Slot slot = s.slot(s.new_key(n));
        for (int64_t h = 0; h < extent[2]; ++h)
          for (int64_t d = 0; d < extent[3]; ++d) visit(slot.plane, slot.row, h, d, true);
      });
      return;
    }
    if (by_query(name) || by_key(name)) {
      for (const Place& place : owned)
        for_each_row(p, place, name, [&](int64_t plane, int64_t row, int64_t h, bool used) {
          for (int64_t d = 0; d < extent[3]; ++d) visit(plane, row, h, d, used);
        });
      return;
    }
    for (int64_t a = 0; a < extent[0]; ++a)
      for (int64_t b = 0; b < extent[1]; ++b)
        for (int64_t c = 0; c < extent[2]; ++c)
          for (int64_t d = 0; d < extent[3]; ++d) visit(a, b, c, d, true);
  }

  double lse_bound(double lse, double row_size) const {
    const double size = std::max(0.0, row_size);
    if (core::data_dtype(p) == TESSERA_F64) return 1e-12 * std::max({1.0, size, std::abs(lse)});
    // A rotated query may be rounded to its dtype again, as naive does: half an ulp of each product.
    const double rotation = p.cache.rotary_dim ? ulp(core::data_dtype(p), 1) / 2 : 0;
    // Past 64 (through bias, slopes or sinks) float32 itself is coarser than the contract's figure.
    return std::max(1e-5 + (1e-6 + rotation) * size, 2 * ulp(TESSERA_F32, lse));
  }

  // Arithmetic that flushes subnormal numbers to 0 is right too.
  double smallest_normal() const {
    return core::data_dtype(p) == TESSERA_F64 ? std::numeric_limits<double>::min()
                                              : static_cast<double>(std::numeric_limits<float>::min());
  }

  // G = P (dO . v - dO . out + dLSE) is 0 where a row has one key of weight. If that is so everywhere, the tensor is
  // only what rounding leaves of its terms, which depends on the order of sums: naive may hit 0 where others do not,
  // and then neither its largest error nor its mean is a measure.
  // A tensor with any element above that is not touched by this.
  double residue_bound(int name, double largest) const {
    const double scale = std::abs(p.has_scale ? p.scale : 1 / std::sqrt(static_cast<double>(p.dim)));
    const double unit = ulp(core::accumulation_dtype(p), 1);
    double residue = 0;
    if (name == TESSERA_DQ) residue = 4 * unit * scale * terms.k * terms.row_max;
    if (name == TESSERA_DK) residue = 4 * unit * scale * terms.q * terms.row_sum;
    if (name == TESSERA_DBIAS) residue = 4 * unit * terms.row_sum;
    if (name == TESSERA_DSLOPES) residue = 4 * unit * terms.row_sum * static_cast<double>(p.len_q + p.len_k);
    return largest <= residue ? residue : 0;
  }

  void measure_terms() {
    const auto in = [&](int name) { return view(p, got, name); };
    const View q = in(TESSERA_Q), k = in(TESSERA_K), out = in(TESSERA_OUT), dout = in(TESSERA_DOUT);
    const View dlse = in(TESSERA_DLSE);
    const auto grow = [](double& most, double x) { most = std::isfinite(x) ? std::max(most, std::abs(x)) : most; };
    for (const Place& place : owned) {
      for_each_row(p, place, TESSERA_OUT, [&](int64_t plane, int64_t row, int64_t h, bool used) {
        if (!used) return;
        double sum = dlse.present() ? std::abs(dlse.at(plane, row, h, 0)) : 0;
        for (int64_t d = 0; d < p.dim_v; ++d) sum += 2 * std::abs(dout.at(plane, row, h, d) * out.at(plane, row, h, d));
        grow(terms.row_max, sum);
        if (std::isfinite(sum)) terms.row_sum += sum;
        for (int64_t d = 0; d < p.dim; ++d) grow(terms.q, q.at(plane, row, h, d));
      });
      for_each_row(p, place, TESSERA_DK, [&](int64_t plane, int64_t row, int64_t h, bool used) {
        for (int64_t d = 0; used && d < p.dim; ++d) grow(terms.k, k.at(plane, row, h, d));
      });
    }
  }

  const Problem& p;
  const Bindings& got;
  std::vector<Place> owned;
  Results exact, yardstick;
  core::Operand facts;
  std::vector<double> fact_values;
  Terms terms;
};

}  // namespace

std::vector<tessera_verdict> verify(const Problem& p, const Bindings& got, int64_t sample_pairs) {
  core::check(p);
  core::check_pointers(p, got);
  core::check_lengths(p, got);
  core::require(sample_pairs >= 0, "sample_pairs is {}; it must be at least 0 (0: all).", sample_pairs);
  for (const int name : {TESSERA_DBIAS, TESSERA_DSLOPES, TESSERA_DSINKS})
    core::require(!core::has(p, name) || !samples(p, sample_pairs),
                  "sample_pairs is {}, but {} sums over all pairs and a sample cannot judge it. Say 0.", sample_pairs,
                  core::operand_row(name).text);
  check_targets(p, got);
  return Verification(p, got, sample_pairs).verdicts();
}

}  // namespace tessera::reference
