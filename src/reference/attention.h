// Attention forward and backward, row by row, as the contract's formulas. T is the accumulation type; `round` is what
// happens to P and dZ before they enter a product: nothing in the oracle, the input dtype's rounding in naive.
#pragma once
#include "reference/formulas.h"

namespace tessera::reference {

template <class T>
struct Array {
  explicit Array(int64_t n) : data(static_cast<size_t>(n)) {}
  T& operator[](int64_t i) { return data[static_cast<size_t>(i)]; }
  const T& operator[](int64_t i) const { return data[static_cast<size_t>(i)]; }
  std::vector<T> data;
};

template <class T>
struct Matrix {
  Matrix(int64_t r, int64_t c) : rows(r), cols(c), data(static_cast<size_t>(r * c)) {}
  T* row(int64_t i) { return data.data() + i * cols; }
  const T* row(int64_t i) const { return data.data() + i * cols; }
  int64_t rows, cols;
  std::vector<T> data;
};

template <class T>
Matrix<T> used_rows(const View& v, const Rows& rows, int64_t head) {
  Matrix<T> m(rows.used, v.o.extent[3]);
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t d = 0; d < m.cols; ++d) m.row(i)[d] = static_cast<T>(v.at(rows.plane, rows.first + i, head, d));
  return m;
}

template <class T>
Matrix<T> transposed(const Matrix<T>& m) {
  Matrix<T> t(m.cols, m.rows);
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t j = 0; j < m.cols; ++j) t.row(j)[i] = m.row(i)[j];
  return t;
}

template <class T>
void add_scaled(T* __restrict sum, T a, const T* __restrict x, int64_t n) {
  for (int64_t d = 0; d < n; ++d) sum[d] += a * x[d];
}
// y[j] = x . column j, for columns [begin, end). Columns run inside, so that each sum is sequential and yet vectors
// serve.
template <class T>
void dots(const T* x, const Matrix<T>& columns, int64_t begin, int64_t end, T* y) {
  std::fill(y + begin, y + end, T{0});
  for (int64_t d = 0; d < columns.rows; ++d) add_scaled(y + begin, x[d], columns.row(d) + begin, end - begin);
}

// exp(part - whole): an empty part weighs nothing, and a part equal to the whole 1 even if both are infinite.
template <class T>
T weight(T part, T whole) {
  if (part == -std::numeric_limits<T>::infinity()) return 0;
  return part == whole ? T{1} : std::exp(part - whole);
}

// One row of the matrices that are never made.
template <class T>
struct Row {
  Row(int64_t keys, int64_t dim)
      : kept(keys), score(keys), capped(keys), dp(keys), weight(keys), g(keys), dz(keys), sum(dim) {}
  Array<char> kept;
  Array<T> score, capped;      // s, t
  Array<T> dp;                 // dO . v
  Array<T> weight, g, dz;      // P D, G, dZ
  Array<T> sum;                // out or dq
  T dslope = 0, dsink = 0;     // this row's share
  int64_t begin = 0, end = 0;  // kept keys lie in [begin, end)
  bool empty = true;           // no kept score is above -inf

  void keep_nothing() { begin = end = 0, std::fill(kept.data.begin(), kept.data.end(), char{0}); }
  template <class Visit>
  void for_each_kept(Visit visit) const {
    for (int64_t j = begin; j < end; ++j)
      if (kept[j]) visit(j);
  }
};

// A gradient summed over the dimensions that its operand broadcasts.
template <class T>
struct Sum {
  explicit Sum(const Target& t)
      : to(t), dense(dense_like(t.o, t.o.dtype)), values(present() ? core::elements(t.o) : 0) {}
  bool present() const { return to.present(); }
  T& at(int64_t a, int64_t b, int64_t c, int64_t d) { return values[core::offset_of(dense, a, b, c, d)]; }
  void write() {
    if (!present()) return;
    const int64_t* n = dense.extent;
    for (int64_t a = 0; a < n[0]; ++a)
      for (int64_t b = 0; b < n[1]; ++b)
        for (int64_t c = 0; c < n[2]; ++c)
          for (int64_t d = 0; d < n[3]; ++d) to.put(a, b, c, d, static_cast<double>(at(a, b, c, d)));
  }
  Target to;
  core::Operand dense;
  Array<T> values;
};

template <class T, class Round>
class Attention {
 public:
  Attention(const Problem& problem, const Bindings& bindings, const Task& t, Round r)
      : p(problem),
        bound(bindings),
        task(t),
        round(r),
        scale(static_cast<T>(p.has_scale ? p.scale : 1 / std::sqrt(static_cast<double>(p.dim)))),
        softcap(static_cast<T>(p.softcap)),
        slopes(in(TESSERA_SLOPES)),
        sinks(in(TESSERA_SINKS)),
        dbias(result(TESSERA_DBIAS)),
        dslopes(result(TESSERA_DSLOPES)),
        dsinks(result(TESSERA_DSINKS)) {}

  void run() {
    append();
    if (p.pass == TESSERA_APPEND) return;
    for (const Pair& pair : sampled_pairs(p.batch, p.heads_kv, task.sample_pairs)) {
      const Sequence s(p, bound, pair.batch);
      p.pass == TESSERA_FORWARD ? forward(s, pair.head_kv) : backward(s, pair.head_kv);
    }
    for (const Place& place : places(p, bound, task.sample_pairs)) clear_unused(place);
    if (samples(p, task.sample_pairs)) return;
    dbias.write();
    dslopes.write();
    dsinks.write();
  }

 private:
  static constexpr T inf = std::numeric_limits<T>::infinity();
  // Rows at a time, for the threads to share: linear memory, and sums over rows keep the rows' order.
  static constexpr int64_t block = 32;
  static size_t rows_at_once(const Sequence& s) { return static_cast<size_t>(std::min(block, s.q.used)); }

  View in(int name) const { return view(p, bound, name); }
  Target result(int name) const { return core::is_output(core::role(p, name)) ? target(p, bound, name) : Target{}; }
  void put(int name, const Rows& rows, int64_t i, int64_t h, T x) const { put_row(name, rows, i, h, &x, 1); }
  void note(const Rows& rows, int64_t i, int64_t h, double fact) const {
    if (task.row_facts.present()) task.row_facts.put(rows.plane, rows.first + i, h, 0, fact);
  }
  void put_row(int name, const Rows& rows, int64_t i, int64_t h, const T* x, int64_t n) const {
    if (const Target t = result(name); t.present())
      for (int64_t d = 0; d < n; ++d) t.put(rows.plane, rows.first + i, h, d, static_cast<double>(x[d]));
  }

  T slope(const Sequence& s, int64_t h) const { return static_cast<T>(slopes.at(s.batch, 0, h, 0)); }
  T sink(int64_t h) const { return sinks.present() ? static_cast<T>(sinks.at(0, 0, h, 0)) : -inf; }
  // D_ij
  T dropped(const Sequence& s, int64_t h, int64_t i, int64_t j) const {
    if (p.dropout == 0) return 1;
    const bool keep = dropout_keeps(p.dropout, bound.seed, bound.offset, s.batch * p.heads_q + h, i, j);
    return keep ? static_cast<T>(1 / (1 - p.dropout)) : T{0};
  }

  // Turns the first numbers of x, in pairs, by the angles of a position.
  void rotate(T* x, int64_t position) const {
    const View cos = in(TESSERA_COS), sin = in(TESSERA_SIN);
    const int64_t pairs = p.cache.rotary_dim / 2;
    for (int64_t n = 0; n < pairs; ++n) {
      T& one = x[p.cache.rotary_interleaved ? 2 * n : n];
      T& two = x[p.cache.rotary_interleaved ? 2 * n + 1 : n + pairs];
      const T c = static_cast<T>(cos.at(0, position, 0, n)), s = static_cast<T>(sin.at(0, position, 0, n));
      const T turned = one * c - two * s;
      two = one * s + two * c;
      one = turned;
    }
  }

  // New tokens enter the cache, all of them before anything is attended, and in every head even of a sample.
  void append() const {
    for_each_new(p, bound, [&](const Sequence& s, int64_t n) {
      for (int64_t h = 0; h < p.heads_kv; ++h) {
        append_row(TESSERA_K_NEW, TESSERA_K, TESSERA_K_SCALE, s, n, h);
        if (grows(p, TESSERA_V)) append_row(TESSERA_V_NEW, TESSERA_V, TESSERA_V_SCALE, s, n, h);
      }
    });
  }
  void append_row(int from, int to, int scale_name, const Sequence& s, int64_t n, int64_t h) const {
    const Target stored = target(p, bound, to);
    const View scales = in(scale_name);
    const Slot slot = s.slot(s.new_key(n));
    Array<T> x(stored.o.extent[3]);
    for (int64_t d = 0; d < stored.o.extent[3]; ++d)
      x[d] = static_cast<T>(in(from).at(s.fresh.plane, s.fresh.first + n, h, d));
    if (to == TESSERA_K && p.cache.rotary_dim) rotate(&x[0], s.new_key(n));
    if (scales.present())
      for (T& number : x.data) number /= static_cast<T>(scales.at(slot.plane, slot.row, h, 0));
    for (int64_t d = 0; d < stored.o.extent[3]; ++d) stored.put(slot.plane, slot.row, h, d, static_cast<double>(x[d]));
  }

  Matrix<T> query_rows(const Sequence& s, int64_t h) const {
    Matrix<T> q = used_rows<T>(in(TESSERA_Q), s.q, h);
    if (p.cache.rotary_dim == 0 || s.k.used == 0) return q;  // without keys a position may be outside of the tables
    for (int64_t i = 0; i < q.rows; ++i) {
      rotate(q.row(i), static_cast<int64_t>(s.position(i)));
      for (int64_t d = 0; d < q.cols; ++d) q.row(i)[d] = round(q.row(i)[d]);
    }
    return q;
  }

  // Keys to read: in a cache only those that some row keeps. Pages of others may not exist.
  Array<char> wanted_keys(const Sequence& s, int64_t head_kv) const {
    const auto is_kept = [&](int64_t j) {
      for (int64_t i = s.q.used - 1; i >= 0; --i)
        for (int64_t h = head_kv * core::group(p); h < (head_kv + 1) * core::group(p); ++h)
          if (s.keeps(h, i, j)) return true;
      return false;
    };
    Array<char> wanted(s.k.used);
#pragma omp parallel for num_threads(task.threads)
    for (int64_t j = 0; j < s.k.used; ++j) wanted[j] = !core::is_cache(p) || is_kept(j);
    return wanted;
  }
  // Rows of k or v times their scale; zeros where a row is not wanted.
  Matrix<T> key_rows(int name, int scale_name, const Sequence& s, int64_t head_kv, const Array<char>& wanted) const {
    const View v = in(name), scales = in(scale_name);
    Matrix<T> m(s.k.used, v.o.extent[3]);
    for (int64_t j = 0; j < m.rows; ++j) {
      if (!wanted[j]) continue;
      const Slot slot = s.slot(j);
      const T times = scales.present() ? static_cast<T>(scales.at(slot.plane, slot.row, head_kv, 0)) : T{1};
      for (int64_t d = 0; d < m.cols; ++d) m.row(j)[d] = times * static_cast<T>(v.at(slot.plane, slot.row, head_kv, d));
    }
    return m;
  }

  // Which keys row i keeps, and their t and s.
  void score(const Sequence& s, int64_t h, int64_t i, const T* q, const Matrix<T>& k_columns, Row<T>& row) const {
    row.begin = row.end = 0;
    for (int64_t j = 0; j < s.k.used; ++j) {
      row.kept[j] = s.keeps(h, i, j);
      if (!row.kept[j]) continue;
      if (row.end == 0) row.begin = j;
      row.end = j + 1;
    }
    dots(q, k_columns, row.begin, row.end, &row.score.data[0]);
    row.empty = true;
    row.for_each_kept([&](int64_t j) {
      const T z = scale * row.score[j];
      const T t = softcap > 0 ? softcap * std::tanh(z / softcap) : z;
      T x = t;
      if (slopes.present()) x -= slope(s, h) * static_cast<T>(s.distance(i, j));
      if (s.bias.present()) x += static_cast<T>(s.bias.at(s.batch, h, i, j));
      row.capped[j] = t;
      row.score[j] = x;
      if (!(x == -inf)) row.empty = false;
    });
  }

  void forward(const Sequence& s, int64_t head_kv) {
    const Array<char> wanted = wanted_keys(s, head_kv);
    const Matrix<T> k = transposed(key_rows(TESSERA_K, TESSERA_K_SCALE, s, head_kv, wanted));
    const Matrix<T> v = key_rows(TESSERA_V, TESSERA_V_SCALE, s, head_kv, wanted);
    std::vector<Row<T>> rows(rows_at_once(s), Row<T>(s.k.used + 1, p.dim_v));
    for (int64_t h = head_kv * core::group(p); h < (head_kv + 1) * core::group(p); ++h) {
      const Matrix<T> q = query_rows(s, h);
      for (int64_t first = 0; first < q.rows; first += block) {
        const int64_t last = std::min(first + block, q.rows);
#pragma omp parallel for num_threads(task.threads) schedule(dynamic)
        for (int64_t i = first; i < last; ++i)
          forward_row(s, h, i, q.row(i), k, v, rows[static_cast<size_t>(i - first)]);
      }
    }
  }

  void forward_row(const Sequence& s, int64_t h, int64_t i, const T* q, const Matrix<T>& k, const Matrix<T>& v,
                   Row<T>& row) const {
    score(s, h, i, q, k, row);
    T max_score = -inf;
    row.for_each_kept([&](int64_t j) {
      const T x = row.score[j];
      if (std::isnan(x) || x > max_score) max_score = x;  // a NaN, once met, stays
    });
    const Softmax softmax = normalise(row, max_score, sink(h));
    std::fill(row.sum.data.begin(), row.sum.data.end(), T{0});
    if (!row.empty)
      row.for_each_kept([&](int64_t j) {
        const T prob = weight(row.score[j], softmax.largest) / softmax.sum;
        add_scaled(&row.sum[0], round(prob * dropped(s, h, i, j)), v.row(j), v.cols);
      });
    put_row(TESSERA_OUT, s.q, i, h, &row.sum[0], v.cols);
    put(TESSERA_LSE, s.q, i, h, softmax.largest + std::log(softmax.sum));
    put(TESSERA_MAX_SCORE, s.q, i, h, max_score);
    note(s.q, i, h, row.empty ? nothing_kept : task.row_facts.present() ? score_size(q, k, row) : 0);
  }

  // P = exp(s - largest) / sum is exp(s - lse) without the digits that an lse far from 0 has lost.
  struct Softmax {
    T largest, sum;
  };
  // A kept score of +inf or NaN makes all NaN; a sink of +inf takes all the weight.
  static Softmax normalise(const Row<T>& row, T max_score, T sink) {
    const T largest = max_score < inf ? std::max(max_score, sink) : std::numeric_limits<T>::quiet_NaN();
    T sum = weight(sink, largest);
    row.for_each_kept([&](int64_t j) { sum += weight(row.score[j], largest); });
    return {largest, sum};
  }

  // max_j |scale| sum_d |q_d k_jd|; dp, of no other use in forward, holds the sums.
  double score_size(const T* q, const Matrix<T>& k, Row<T>& row) const {
    T* sums = &row.dp[0];
    std::fill(sums + row.begin, sums + row.end, T{0});
    for (int64_t d = 0; d < p.dim; ++d)
      for (int64_t j = row.begin; j < row.end; ++j) sums[j] += std::abs(q[d] * k.row(d)[j]);
    T largest = 0;
    row.for_each_kept([&](int64_t j) { largest = std::max(largest, sums[j]); });
    return static_cast<double>(std::abs(scale) * largest);
  }

  void backward(const Sequence& s, int64_t head_kv) {
    const Matrix<T> k = used_rows<T>(in(TESSERA_K), s.k, head_kv), k_columns = transposed(k);
    const Matrix<T> v_columns = transposed(used_rows<T>(in(TESSERA_V), s.k, head_kv));
    Matrix<T> dk(s.k.used, p.dim), dv(s.k.used, p.dim_v);
    std::vector<Row<T>> rows(rows_at_once(s), Row<T>(s.k.used + 1, p.dim));
    for (int64_t h = head_kv * core::group(p); h < (head_kv + 1) * core::group(p); ++h) {
      const Matrix<T> q = used_rows<T>(in(TESSERA_Q), s.q, h), dout = used_rows<T>(in(TESSERA_DOUT), s.q, h);
      for (int64_t first = 0; first < q.rows; first += block) {
        const int64_t last = std::min(first + block, q.rows);
        const auto row = [&](int64_t i) -> Row<T>& { return rows[static_cast<size_t>(i - first)]; };
#pragma omp parallel for num_threads(task.threads) schedule(dynamic)
        for (int64_t i = first; i < last; ++i)
          backward_row(s, h, i, q.row(i), dout.row(i), k, k_columns, v_columns, row(i));
#pragma omp parallel for num_threads(task.threads) schedule(static)
        for (int64_t j = 0; j < s.k.used; ++j)
          for (int64_t i = first; i < last; ++i) {
            if (!row(i).kept[j]) continue;
            add_scaled(dv.row(j), row(i).weight[j], dout.row(i), p.dim_v);
            add_scaled(dk.row(j), row(i).dz[j], q.row(i), p.dim);
          }
        for (int64_t i = first; i < last; ++i) add_to_sums(s, h, i, row(i));
      }
    }
    for (T& x : dk.data) x *= scale;
    for (int64_t j = 0; j < s.k.used; ++j) {
      put_row(TESSERA_DK, s.k, j, head_kv, dk.row(j), p.dim);
      put_row(TESSERA_DV, s.k, j, head_kv, dv.row(j), p.dim_v);
    }
  }

  // Leaves the row's P D, G and dZ, and writes dq.
  void backward_row(const Sequence& s, int64_t h, int64_t i, const T* q, const T* dout, const Matrix<T>& k,
                    const Matrix<T>& k_columns, const Matrix<T>& v_columns, Row<T>& row) const {
    const auto at_row = [&](int name, int64_t d) {
      return static_cast<T>(in(name).at(s.q.plane, s.q.first + i, h, d));
    };
    const T lse = at_row(TESSERA_LSE, 0), dlse = in(TESSERA_DLSE).present() ? at_row(TESSERA_DLSE, 0) : T{0};
    score(s, h, i, q, k_columns, row);
    if (row.empty || lse == -inf) row.keep_nothing();
    // Where the sink is all there is, out is 0, and no dO, be it NaN, makes delta anything else.
    T delta = 0;
    if (!(row.empty && lse == sink(h)))
      for (int64_t d = 0; d < p.dim_v; ++d) delta += dout[d] * at_row(TESSERA_OUT, d);

    dots(dout, v_columns, row.begin, row.end, &row.dp[0]);
    std::fill(row.sum.data.begin(), row.sum.data.end(), T{0});
    row.dslope = row.dsink = 0;
    row.for_each_kept([&](int64_t j) {
      const T prob = std::exp(row.score[j] - lse), drop = dropped(s, h, i, j);
      const T u = softcap > 0 ? row.capped[j] / softcap : T{0};
      row.weight[j] = round(prob * drop);
      row.g[j] = prob * (drop * row.dp[j] - delta + dlse);
      row.dz[j] = round(row.g[j] * (1 - u * u));
      if (slopes.present()) row.dslope -= static_cast<T>(s.distance(i, j)) * row.g[j];
      add_scaled(&row.sum[0], row.dz[j], k.row(j), p.dim);
    });
    if (lse != -inf) row.dsink = weight(sink(h), lse) * (dlse - delta);
    for (T& x : row.sum.data) x *= scale;
    put_row(TESSERA_DQ, s.q, i, h, &row.sum[0], p.dim);
    note(s.q, i, h, row.end == 0 ? nothing_kept : 0);
  }

  void add_to_sums(const Sequence& s, int64_t h, int64_t i, const Row<T>& row) {
    if (dbias.present()) row.for_each_kept([&](int64_t j) { dbias.at(s.batch, h, i, j) += row.g[j]; });
    if (dslopes.present()) dslopes.at(s.batch, 0, h, 0) += row.dslope;
    if (dsinks.present()) dsinks.at(0, 0, h, 0) += row.dsink;
  }

  void clear_unused(const Place& place) const {
    for (int name = 0; name < TESSERA_NAMES; ++name) {
      const Target t = result(name);
      if (!t.present() || !(by_query(name) || by_key(name))) continue;
      const double value = name == TESSERA_LSE || name == TESSERA_MAX_SCORE ? -infinity : 0;
      for_each_row(p, place, name, [&](int64_t plane, int64_t row, int64_t h, bool used) {
        for (int64_t d = 0; !used && d < t.o.extent[3]; ++d) t.put(plane, row, h, d, value);
      });
    }
  }

  const Problem& p;
  const Bindings& bound;
  const Task& task;
  const Round round;
  const T scale, softcap;
  const View slopes, sinks;
  Sum<T> dbias, dslopes, dsinks;
};

}  // namespace tessera::reference
