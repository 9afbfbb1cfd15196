// Tessera in C++17: values that own, named setters and codes that cannot be overlooked, over tessera.h and no more.
//
//   #include <tessera/tessera.hpp>
//
//   auto problem = tessera::Problem().batch(1).heads(8, 2).lengths(128, 128).dims(64).causal(TESSERA_BOTTOM_RIGHT);
//   problem.declare_all(TESSERA_F32).or_throw();
//   tessera::Plan plan;
//   tessera::Plan::make(problem, tessera::Device::host(), plan).or_throw();
//   const int64_t bytes = plan.facts().workspace_bytes;
//   void* memory = std::aligned_alloc(64, bytes);
//   plan.run(tessera::Bindings().q(q).k(k).v(v).out(out).lse(lse).workspace(memory, bytes)).or_throw();
//
// Shapes, units and rules are in tessera.h. What can fail returns a Status; only or_throw, Line(text), Device::host and
// memory that has run out throw.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/tessera.h"

namespace tessera {

// What a call says. Reading it is not optional.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(int32_t code, std::string message) : code_(code), message_(std::move(message)) {}

  int32_t code() const { return code_; }  // a tessera_code
  const std::string& message() const { return message_; }
  bool ok() const { return code_ == TESSERA_OK; }
  void or_throw() const {
    if (!ok()) throw std::runtime_error(message_);
  }

 private:
  int32_t code_ = TESSERA_OK;
  std::string message_;
};

namespace detail {

template <class Call>
Status status_of(Call&& call) {
  tessera_error error;
  error.size = sizeof error;
  error.message[0] = 0;
  const int32_t code = call(&error);
  return {code, code == TESSERA_OK ? "" : error.message};
}

template <class Print>
std::string text_of(Print&& print) {
  std::string text(print(nullptr, 0), '\0');
  print(text.data(), text.size());
  text.pop_back();  // the final zero
  return text;
}

template <auto free>
struct Free {
  template <class T>
  void operator()(T* t) const {
    free(t);
  }
};

}  // namespace detail

// ------------------------------------------------------------------------------------------------------- problem

class Problem {
 public:
  Problem() { tessera_problem_init(&c_); }
  explicit Problem(const tessera_problem& c) : c_(c) { c_.size = sizeof c_; }  // a newer library's may say more

  Problem& backward() { return c_.pass = TESSERA_BACKWARD, *this; }
  Problem& append_alone() { return c_.pass = TESSERA_APPEND, *this; }
  Problem& batch(int64_t n) { return c_.batch = n, *this; }
  Problem& heads(int64_t n) { return heads(n, n); }
  Problem& heads(int64_t query, int64_t kv) { return c_.heads_q = query, c_.heads_kv = kv, *this; }
  Problem& lengths(int64_t query, int64_t key) { return c_.len_q = query, c_.len_k = key, *this; }
  Problem& new_tokens(int64_t n) { return c_.len_new = n, *this; }  // of each sequence; packed: at most
  Problem& packed_new_rows(int64_t n) { return c_.rows_new = n, *this; }
  Problem& pages(int64_t page_size, int64_t pages) {
    return c_.cache.page_size = page_size, c_.cache.pages = pages, *this;
  }
  Problem& slots(int64_t n) { return c_.cache.slots = n, *this; }  // of one sequence
  Problem& ring(int64_t n) { return c_.cache.ring = 1, slots(n); }
  Problem& cache_rows(int64_t n) { return c_.cache.rows = n, *this; }
  Problem& v_in_k() { return c_.cache.v_in_k = 1, *this; }
  Problem& rotary(int64_t dim, bool interleaved, int64_t positions) {
    c_.cache.rotary_dim = dim, c_.cache.rotary_interleaved = interleaved, c_.cache.rotary_positions = positions;
    return *this;
  }
  Problem& packed_rows(int64_t query, int64_t key) { return c_.rows_q = query, c_.rows_k = key, *this; }
  Problem& dims(int64_t n) { return dims(n, n); }
  Problem& dims(int64_t qk, int64_t v) { return c_.dim = qk, c_.dim_v = v, *this; }

  Problem& corner(tessera_corner corner) { return c_.mask.corner = corner, *this; }
  Problem& corner_at(int64_t offset) { return c_.mask.corner_at = offset, corner(TESSERA_CORNER_AT); }
  Problem& causal(tessera_corner where) { return c_.mask.causal = 1, corner(where); }
  Problem& window(int64_t left, int64_t right) { return window_left(left).window_right(right); }  // inclusive, signed
  Problem& window_left(int64_t left) {  // the right side is unbounded unless said
    open_window();
    return c_.mask.window_left = left, c_.mask.window_left_unbounded = 0, *this;
  }
  Problem& window_right(int64_t right) {
    open_window();
    return c_.mask.window_right = right, c_.mask.window_right_unbounded = 0, *this;
  }
  Problem& prefix(int64_t keys) { return c_.mask.has_prefix = 1, c_.mask.prefix = keys, *this; }
  Problem& chunk(int64_t keys) { return c_.mask.chunk = keys, *this; }
  Problem& first(int64_t keys) { return c_.mask.first = keys, *this; }

  Problem& scale(double s) { return c_.has_scale = 1, c_.scale = s, *this; }
  Problem& softcap(double cap) { return c_.softcap = cap, *this; }
  Problem& dropout(double p) { return c_.dropout = p, *this; }
  Problem& deterministic() { return c_.deterministic = 1, *this; }
  Problem& batch_invariant() { return c_.batch_invariant = 1, *this; }
  Problem& allow_tf32() { return c_.allow_tf32 = 1, *this; }
  Problem& alignment(int64_t bytes) { return c_.alignment = bytes, *this; }

  Status declare(tessera_name name, tessera_dtype dtype, tessera_layout layout = TESSERA_BSHD) {
    return detail::status_of([&](tessera_error* e) { return tessera_declare(&c_, name, dtype, layout, e); });
  }
  Status declare_all(tessera_dtype dtype, tessera_layout layout = TESSERA_BSHD) {
    return detail::status_of([&](tessera_error* e) { return tessera_declare_all(&c_, dtype, layout, e); });
  }
  Status check() const {
    return detail::status_of([&](tessera_error* e) { return tessera_check(&c_, e); });
  }
  std::string text() const {
    return detail::text_of([&](char* buffer, size_t n) { return tessera_problem_print(&c_, buffer, n); });
  }

  tessera_operand& operand(tessera_name name) { return c_.operand[name]; }
  const tessera_operand& operand(tessera_name name) const { return c_.operand[name]; }
  tessera_problem& c() { return c_; }
  const tessera_problem& c() const { return c_; }

 private:
  void open_window() {
    if (!c_.mask.has_window) c_.mask.window_left_unbounded = c_.mask.window_right_unbounded = 1;
    c_.mask.has_window = 1;
  }

  tessera_problem c_;
};

// A problem as one line of text; the grammar is in ADDING.md.
class Line {
 public:
  Line() = default;
  explicit Line(const std::string& text) { parse(text, *this).or_throw(); }
  static Status parse(const std::string& text, Line& line) {
    tessera_line* made = nullptr;
    const Status status =
        detail::status_of([&](tessera_error* e) { return tessera_line_parse(text.c_str(), &made, e); });
    line.line_.reset(made);
    return status;
  }

  Problem problem() const { return line_ ? Problem(*tessera_line_problem(line_.get())) : Problem(); }
  std::vector<int32_t> values(tessera_name name) const {
    int64_t count = 0;
    const int32_t* values = tessera_line_values(line_.get(), name, &count);
    return {values, values + count};
  }
  uint64_t seed() const { return tessera_line_seed(line_.get()); }
  uint64_t offset() const { return tessera_line_offset(line_.get()); }
  std::string text() const {
    return detail::text_of([&](char* buffer, size_t n) { return tessera_line_print(line_.get(), buffer, n); });
  }
  explicit operator bool() const { return line_ != nullptr; }

 private:
  std::unique_ptr<tessera_line, detail::Free<tessera_line_free>> line_;
};

// -------------------------------------------------------------------------------------------------- device, hints

class Device {
 public:
  static Status find(const std::string& name, Device& device) {
    return detail::status_of([&](tessera_error* e) { return tessera_device_find(name.c_str(), &device.c_, e); });
  }
  static Device host() {
    Device device;
    find("host", device).or_throw();
    return device;
  }
  const tessera_device& c() const { return c_; }

 private:
  tessera_device c_ = {sizeof(tessera_device), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {}};
};

class Hints {
 public:
  Hints() { tessera_hints_init(&c_); }

  Hints& kernels(std::string names) { return kernels_ = std::move(names), named_ = true, *this; }
  Hints& threads(int32_t n) { return c_.threads = n, *this; }
  Hints& workspace_limit(int64_t bytes) { return c_.has_workspace_limit = 1, c_.workspace_limit = bytes, *this; }
  Hints& tiles(int32_t rows, int32_t keys) { return c_.tile_rows = rows, c_.tile_keys = keys, *this; }
  Hints& sample_pairs(int64_t pairs) { return c_.sample_pairs = pairs, *this; }

  tessera_hints c() const {  // valid as long as these Hints are
    tessera_hints hints = c_;
    hints.kernels = named_ ? kernels_.c_str() : nullptr;
    return hints;
  }

 private:
  tessera_hints c_;
  std::string kernels_;
  bool named_ = false;
};

// ---------------------------------------------------------------------------------------------------- plan and run

class Bindings {
 public:
  Bindings() { tessera_bindings_init(&c_); }

  // Inputs are only read; the C struct has one type of pointer for all.
  Bindings& bind(tessera_name name, const void* data) { return c_.data[name] = const_cast<void*>(data), *this; }
  Bindings& q(const void* data) { return bind(TESSERA_Q, data); }
  Bindings& k(const void* data) { return bind(TESSERA_K, data); }
  Bindings& v(const void* data) { return bind(TESSERA_V, data); }
  Bindings& bias(const void* data) { return bind(TESSERA_BIAS, data); }
  Bindings& keep(const void* data) { return bind(TESSERA_KEEP, data); }
  Bindings& exclude_keys(const void* data) { return bind(TESSERA_EXCLUDE_KEYS, data); }
  Bindings& documents(const int32_t* q, const int32_t* k) {
    return bind(TESSERA_DOCUMENTS_Q, q).bind(TESSERA_DOCUMENTS_K, k);
  }
  Bindings& slopes(const void* data) { return bind(TESSERA_SLOPES, data); }
  Bindings& sinks(const void* data) { return bind(TESSERA_SINKS, data); }
  Bindings& cu_seqlens(const int32_t* q, const int32_t* k) {
    return bind(TESSERA_CU_SEQLENS_Q, q).bind(TESSERA_CU_SEQLENS_K, k);
  }
  Bindings& seqused(const int32_t* q, const int32_t* k) {
    return bind(TESSERA_SEQUSED_Q, q).bind(TESSERA_SEQUSED_K, k);
  }
  Bindings& corner_offsets(const int32_t* data) { return bind(TESSERA_CORNER_OFFSETS, data); }
  // The cache itself: k() and v(), which a run with new tokens writes.
  Bindings& k_new(const void* data) { return bind(TESSERA_K_NEW, data); }
  Bindings& v_new(const void* data) { return bind(TESSERA_V_NEW, data); }
  Bindings& cu_seqlens_new(const int32_t* data) { return bind(TESSERA_CU_SEQLENS_NEW, data); }
  Bindings& seqused_new(const int32_t* data) { return bind(TESSERA_SEQUSED_NEW, data); }
  Bindings& cache_lens(const int32_t* data) { return bind(TESSERA_CACHE_LENS, data); }
  Bindings& cache_batch_idx(const int32_t* data) { return bind(TESSERA_CACHE_BATCH_IDX, data); }
  Bindings& left_pad(const int32_t* data) { return bind(TESSERA_LEFT_PAD, data); }
  Bindings& page_table(const int32_t* data) { return bind(TESSERA_PAGE_TABLE, data); }
  Bindings& rotary(const void* cos, const void* sin) { return bind(TESSERA_COS, cos).bind(TESSERA_SIN, sin); }
  Bindings& scales(const void* k, const void* v) { return bind(TESSERA_K_SCALE, k).bind(TESSERA_V_SCALE, v); }
  Bindings& status(int32_t* data) { return bind(TESSERA_STATUS, data); }
  Bindings& out(void* data) { return bind(TESSERA_OUT, data); }
  Bindings& lse(void* data) { return bind(TESSERA_LSE, data); }
  Bindings& max_score(void* data) { return bind(TESSERA_MAX_SCORE, data); }
  Bindings& dout(const void* data) { return bind(TESSERA_DOUT, data); }
  Bindings& dlse(const void* data) { return bind(TESSERA_DLSE, data); }
  Bindings& dq(void* data) { return bind(TESSERA_DQ, data); }
  Bindings& dk(void* data) { return bind(TESSERA_DK, data); }
  Bindings& dv(void* data) { return bind(TESSERA_DV, data); }
  Bindings& dbias(void* data) { return bind(TESSERA_DBIAS, data); }
  Bindings& dslopes(void* data) { return bind(TESSERA_DSLOPES, data); }
  Bindings& dsinks(void* data) { return bind(TESSERA_DSINKS, data); }
  Bindings& workspace(void* data, int64_t bytes) { return c_.workspace = data, c_.workspace_bytes = bytes, *this; }
  Bindings& dropout(uint64_t seed, uint64_t offset = 0) { return c_.seed = seed, c_.offset = offset, *this; }

  const tessera_bindings& c() const { return c_; }

 private:
  tessera_bindings c_;
};

class Plan {
 public:
  // On failure `plan` is empty.
  static Status make(const Problem& problem, const Device& device, const Hints& hints, Plan& plan) {
    tessera_plan* made = nullptr;
    const tessera_hints h = hints.c();
    const Status status =
        detail::status_of([&](tessera_error* e) { return tessera_plan_make(&problem.c(), &device.c(), &h, &made, e); });
    plan.plan_.reset(made);
    return status;
  }
  static Status make(const Problem& problem, const Device& device, Plan& plan) {
    return make(problem, device, {}, plan);
  }

  // Shared prefixes (tessera_cascade_make): levels over the same query rows, merged. The last one's results count.
  static Status make_cascade(const std::vector<Problem>& levels, const Device& device, const Hints& hints, Plan& plan) {
    std::vector<const tessera_problem*> problems;
    for (const Problem& level : levels) problems.push_back(&level.c());
    tessera_plan* made = nullptr;
    const tessera_hints h = hints.c();
    const Status status = detail::status_of([&](tessera_error* e) {
      return tessera_cascade_make(problems.data(), static_cast<int32_t>(problems.size()), &device.c(), &h, &made, e);
    });
    plan.plan_.reset(made);
    return status;
  }
  Status run_cascade(const std::vector<Bindings>& levels, void* stream = nullptr) const {
    std::vector<const tessera_bindings*> bindings;
    for (const Bindings& level : levels) bindings.push_back(&level.c());
    return detail::status_of(
        [&](tessera_error* e) { return tessera_cascade_run(plan_.get(), bindings.data(), stream, e); });
  }

  Status run(const Bindings& bindings, void* stream = nullptr) const {
    return detail::status_of([&](tessera_error* e) { return tessera_run(plan_.get(), &bindings.c(), stream, e); });
  }
  tessera_plan_facts facts() const {  // all zero if empty
    tessera_plan_facts facts = {};
    facts.size = sizeof facts;
    (void)tessera_plan_get(plan_.get(), &facts, nullptr);
    return facts;
  }
  std::string text() const {
    return detail::text_of([&](char* buffer, size_t n) { return tessera_plan_print(plan_.get(), buffer, n); });
  }
  explicit operator bool() const { return plan_ != nullptr; }
  const tessera_plan* c() const { return plan_.get(); }

 private:
  std::unique_ptr<tessera_plan, detail::Free<tessera_plan_free>> plan_;
};

}  // namespace tessera
