// What the tests by known answer add to the engine tests: values put and read by hand, memory that ends at a guard
// page, and a loop over the engine and the oracle.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <span>

#include "tests/cpu/engine.h"
#include "tools/tessera/number.h"

namespace tessera::test {

using tools::Index;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

inline double load(const std::byte* from, int32_t dtype) {
  switch (dtype) {
    case TESSERA_F64:
      return tools::read_as<double>(from);
    case TESSERA_F32:
      return static_cast<double>(tools::read_as<float>(from));
    case TESSERA_BF16:
      return static_cast<double>(tools::bf16_to_float(tools::read_as<uint16_t>(from)));
    case TESSERA_F16:
      return static_cast<double>(tools::f16_to_float(tools::read_as<uint16_t>(from)));
    case TESSERA_I32:
      return tools::read_as<int32_t>(from);
    default:
      return tools::read_as<uint8_t>(from);
  }
}

// A case, its inputs random until said otherwise.
struct Exam : tools::Case {
  explicit Exam(const std::string& text, uint64_t seed = 1) : Case(tools::Line(text)) {
    tools::fill_random(*this, seed);
  }

  double get(int name, const Index& i) const { return load(at(name, i), operand(name).dtype); }
  void set(int name, const Index& i, double x) { tools::store(at(name, i), operand(name).dtype, x); }

  // `value` is a number or a function of the index.
  template <class Value>
  void put(int name, Value value) {
    tools::for_each_index(tools::extents(operand(name)), [&](const Index& i) {
      if constexpr (std::is_invocable_v<Value, Index>) set(name, i, static_cast<double>(value(i)));
      else set(name, i, static_cast<double>(value));
    });
  }
  void put_list(int name, const std::vector<double>& values) {
    size_t n = 0;
    tools::for_each_index(tools::extents(operand(name)), [&](const Index& i) { set(name, i, values.at(n++)); });
  }
  std::vector<double> values(int name) const {
    std::vector<double> all;
    tools::for_each_index(tools::extents(operand(name)), [&](const Index& i) { all.push_back(get(name, i)); });
    return all;
  }

  // Every key counts alike and v of key j is j: a row's out is the mean of the keys that it sees.
  void average_keys() {
    put(TESSERA_Q, 0);
    put(TESSERA_K, 0);
    put(TESSERA_V, [](const Index& i) { return i[1]; });
  }
  // K and V of keys, Q and dO of rows that no sequence uses or that exclude_keys takes away.
  void put_unused(double x) {
    for (const auto& [side, names] :
         {std::pair(tools::Side::key, std::vector{TESSERA_K, TESSERA_V}),
          std::pair(tools::Side::query, std::vector{TESSERA_Q, TESSERA_DOUT, TESSERA_DLSE})})
      for (const int name : names) {
        if (!has(name)) continue;
        const tessera_operand& o = operand(name);
        std::vector<bool> used(static_cast<size_t>(o.extent[0] * o.extent[1]));
        const std::vector<tools::Sequence> all = tools::sequences(*this, side);
        for (size_t b = 0; b < all.size(); ++b)
          for (int64_t j = 0; j < all[b].used; ++j) {
            const bool excluded = side == tools::Side::key && has(TESSERA_EXCLUDE_KEYS) &&
                                  get(TESSERA_EXCLUDE_KEYS, {static_cast<int64_t>(b), j, 0, 0}) != 0;
            used[static_cast<size_t>(all[b].batch * o.extent[1] + all[b].first + j)] = !excluded;
          }
        tools::for_each_index(tools::extents(o), [&](const Index& i) {
          if (!used[static_cast<size_t>(i[0] * o.extent[1] + i[1])]) set(name, i, x);
        });
      }
  }
};

// The engine as a caller gets it, and the oracle by itself: a known answer holds for both.
template <class Body>
void on_engines(Body body) {
  for (const How& how : {How{"cpu"}, How{"reference.oracle", 1}}) {  // small cases: threads would only wait
    SCOPED_TRACE(how.kernels);
    body(how);
  }
}

// Infinities must be met exactly, all else to `tolerance`.
inline void expect_value(double got, double want, double tolerance, const std::string& what = "") {
  EXPECT_TRUE(got == want || std::abs(got - want) <= tolerance) << what << ": " << got << ", not " << want;
}
inline void expect_values(const Exam& c, int name, const std::vector<double>& want, double tolerance) {
  const std::vector<double> got = c.values(name);
  ASSERT_EQ(got.size(), want.size());
  for (size_t n = 0; n < want.size(); ++n)
    expect_value(got[n], want[n], tolerance, fmt::format("{} element {}", tessera_name_text(name), n));
}
// Stops at the first that is not.
inline void expect_all_finite(const Exam& c, int name) {
  for (const double x : c.values(name)) ASSERT_TRUE(std::isfinite(x)) << tessera_name_text(name);
}
inline void expect_zero(const std::vector<double>& values) {
  for (const double x : values) ASSERT_EQ(x, 0);
}

// Pages of address space: only what is touched takes memory; the page after the last byte may not be touched.
class Pages {
 public:
  explicit Pages(size_t bytes) {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE)), whole = (bytes + page - 1) / page * page;
    bytes_ = whole + page;
    void* const base =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return;
    base_ = static_cast<std::byte*>(base);
    ::mprotect(base_ + whole, page, PROT_NONE);
    data_ = base_ + whole - bytes;
  }
  Pages(Pages&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), data_(other.data_), bytes_(other.bytes_) {}
  Pages& operator=(Pages&&) = delete;
  ~Pages() {
    if (base_) ::munmap(base_, bytes_);
  }
  std::byte* data() const { return data_; }  // NULL if the machine gave nothing

 private:
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

inline size_t span_bytes(const tessera_operand& o) {
  int64_t last = 0;
  for (int d = 0; d < 4; ++d) {
    if (o.extent[d] == 0) return 0;
    if (o.extent[d] > 1) last += (o.extent[d] - 1) * o.stride[d];
  }
  return static_cast<size_t>(last + 1) * tessera_dtype_bytes(o.dtype);
}

// A problem of which every operand ends at a guard page, all zeros; operands may span more than the machine has.
struct Guarded {
  explicit Guarded(const std::string& text) : line(text), problem(line.problem()) {
    problem.alignment = 1;  // the end is where it must be, the beginning falls where it may
    tessera_bindings_init(&bindings);
    bindings.seed = line.seed();
    bindings.offset = line.offset();
    pages.reserve(TESSERA_NAMES);
    for (int name = 0; name < TESSERA_NAMES; ++name) {
      if (problem.operand[name].dtype == TESSERA_ABSENT) continue;
      pages.emplace_back(span_bytes(problem.operand[name]));
      bindings.data[name] = pages.back().data();
      given = given && bindings.data[name];
      const std::vector<int32_t> values = line.values(name);
      if (!values.empty()) std::memcpy(bindings.data[name], values.data(), values.size() * sizeof values[0]);
    }
    if (problem.cache.v_in_k) bindings.data[TESSERA_V] = bindings.data[TESSERA_K];
  }
  std::byte* at(int name, const Index& i) const {
    const tessera_operand& o = problem.operand[name];
    return static_cast<std::byte*>(bindings.data[name]) +
           tools::offset_of(o, i) * static_cast<int64_t>(tessera_dtype_bytes(o.dtype));
  }
  double get(int name, const Index& i) const { return load(at(name, i), problem.operand[name].dtype); }
  void set(int name, const Index& i, double x) const { tools::store(at(name, i), problem.operand[name].dtype, x); }

  tools::Line line;
  tessera_problem problem;
  tessera_bindings bindings;
  std::vector<Pages> pages;
  bool given = true;  // all of the address space
};

// Plans and runs on any memory, with a workspace full of `rubbish` that ends at a guard page.
struct Answer {
  int32_t code;
  std::string message;
};
inline Answer attempt(const tessera_problem& problem, const tessera_bindings& bindings, const How& how = {},
                      int rubbish = 0xFF, int64_t workspace_short_by = 0) {
  try {
    const tools::Plan plan(
        problem,
        {.kernels = how.kernels, .threads = how.threads, .tile_rows = how.tile_rows, .tile_keys = how.tile_keys});
    const int64_t needed = plan.facts().workspace_bytes;
    const auto bytes = static_cast<size_t>((needed + 63) / 64 * 64);
    const Pages workspace(bytes);
    std::memset(workspace.data(), rubbish, bytes);
    tessera_bindings bound = bindings;
    bound.workspace = workspace.data();
    bound.workspace_bytes = needed - workspace_short_by;
    tessera_error error = tools::fresh_error();
    tools::call(tessera_run(plan.get(), &bound, nullptr, &error), error);
    return {TESSERA_OK, ""};
  } catch (const tools::Error& error) {
    return {error.code, error.what()};
  }
}
inline void expect_ok(const Answer& answer) {
  ASSERT_EQ(answer.code, TESSERA_OK) << answer.message;
}
inline void expect_invalid(const Answer& answer, std::initializer_list<const char*> words) {
  EXPECT_EQ(answer.code, TESSERA_INVALID);
  for (const char* word : words) EXPECT_NE(answer.message.find(word), std::string::npos) << answer.message;
}
inline Answer parse(const std::string& text) {
  try {
    tools::Line line(text);
    return {TESSERA_OK, ""};
  } catch (const tools::Error& error) {
    return {error.code, error.what()};
  }
}

// The line answered as random inputs have it, checked by the oracle.
inline void expect_line_right(const std::string& text, const How& how = {}) {
  SCOPED_TRACE(text);
  tools::Case c = make_case(text);
  run_all(c, how);
  expect_right(c, text);
}

inline std::vector<std::byte> bits_of(const std::string& text, const How& how = {}) {
  tools::Case c = make_case(text);
  run_all(c, how);
  return output_bits(c);
}

// Random values are a function of the logical index: strides, layouts and bounds must not change a bit.
inline void expect_same_bits(const std::string& one, const std::string& other, const How& how) {
  EXPECT_TRUE(bits_of(one, how) == bits_of(other, how)) << one << "\n  and\n" << other;
}

// What rubbish stands where nobody may look must not change a bit.
inline void expect_rubbish_ignored(const std::string& text, const How& how) {
  SCOPED_TRACE(text);
  std::optional<std::vector<std::byte>> zeros;
  for (const double rubbish : {0.0, nan, infinity, -60000.0}) {
    Exam c(text);
    c.put_unused(rubbish);
    run_all(c, how);
    const std::vector<std::byte> bits = output_bits(c);
    if (!zeros) zeros = bits;
    EXPECT_TRUE(bits == *zeros) << rubbish;
  }
}

}  // namespace tessera::test
