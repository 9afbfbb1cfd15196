// What the tests of KV caches add: keys by sequence and position wherever they lie, answers that must not depend on
// where that is, and runs that must write nothing but the status word.
#pragma once
#include "cases.h"

namespace tessera::test {

#ifdef TESSERA_SANITIZED
constexpr bool sanitized = true;  // runs are eight times slower
inline const std::vector<std::string> dtypes = {"bf16", "f32"};
#else
constexpr bool sanitized = false;
inline const std::vector<std::string> dtypes = {"bf16", "f16", "f32"};
#endif

// A case with NaN wherever nobody may look.
inline Exam poisoned(const std::string& line, uint64_t seed = 1) {
  Exam c(line, seed);
  tools::poison(c);
  return c;
}

// The kernels of this machine that answer the line: all, but that the bf16 products may refuse.
inline std::vector<std::string> kernels_for(const tessera_problem& problem) {
  std::vector<std::string> all = kernels();
  const auto refuses = [&](const std::string& kernel) {
    try {
      tools::Choice choice;
      choice.kernels = kernel;
      const tools::Plan plan(problem, choice);
      return false;
    } catch (const tools::Error& error) {
      return kernel == "cpu.avx512bf16" && error.code == TESSERA_UNSUPPORTED;
    }
  };
  all.erase(std::remove_if(all.begin(), all.end(), refuses), all.end());
  return all;
}
inline std::vector<std::string> kernels_for(const std::string& line) {
  return kernels_for(tools::Line(line).problem());
}

// On each of them, and on the oracle by itself.
template <class Body>
void on_kernels(const std::string& line, Body body) {
  std::vector<std::string> all = kernels_for(line);
  all.push_back("reference.oracle");
  for (const std::string& kernel : all) {
    SCOPED_TRACE(fmt::format("{} on {}", line, kernel));
    body(How{kernel, 1});
  }
}

inline bool has_step(const tools::Plan& plan, const std::string& step) {
  for (int32_t n = 0; const char* text = tessera_plan_step(plan.get(), n); ++n)
    if (std::string(text).starts_with(step)) return true;
  return false;
}

// Row of head `head` of key `j` of sequence `b`, in k or v (or its scale): in its slot, or before the run in k_new.
inline std::byte* key_at(const Exam& c, int name, int64_t b, int64_t j, int64_t head, bool after_the_run = false) {
  if (tools::packed(c.problem(), tools::Side::key))
    return c.at(name, {0, tools::sequences(c, tools::Side::key)[static_cast<size_t>(b)].first + j, head, 0});
  const tools::CacheRow row = tools::cache_row(c, b);
  if (j < row.old_keys || after_the_run) {
    const tools::Place place = tools::place_of(c, row, j);
    return c.at(name, {place.plane, place.row, head, 0});
  }
  const tools::Sequence fresh = tools::sequences(c, tools::Side::fresh)[static_cast<size_t>(b)];
  return c.at(name == TESSERA_K || c.problem().cache.v_in_k ? TESSERA_K_NEW : TESSERA_V_NEW,
              {fresh.batch, fresh.first + j - row.old_keys, head, 0});
}
inline int64_t keys_of(const Exam& c, int64_t b) {
  return tools::packed(c.problem(), tools::Side::key)
             ? tools::sequences(c, tools::Side::key)[static_cast<size_t>(b)].used
             : tools::cache_row(c, b).keys();
}
inline std::vector<int> stored(const tessera_problem& problem) {
  return problem.cache.v_in_k ? std::vector<int>{TESSERA_K} : std::vector<int>{TESSERA_K, TESSERA_V};
}

// value(b, j, head, dim) for every key that the run will find.
template <class Value>
void put_keys(Exam& c, int name, Value value) {
  const tessera_operand& o = c.operand(name);
  for (int64_t b = 0; b < c.problem().batch; ++b)
    for (int64_t j = 0; j < keys_of(c, b); ++j)
      for (int64_t h = 0; h < o.extent[2]; ++h)
        for (int64_t d = 0; d < o.extent[3]; ++d)
          tools::store(key_at(c, name, b, j, h) + d * static_cast<int64_t>(tessera_dtype_bytes(o.dtype)), o.dtype,
                       static_cast<double>(value(b, j, h, d)));
}
// Every key counts alike and v of key j is j, wherever it lies.
inline void average_cached_keys(Exam& c) {
  c.put(TESSERA_Q, 0);
  put_keys(c, TESSERA_K, [](int64_t, int64_t, int64_t, int64_t) { return 0; });
  put_keys(c, TESSERA_V, [](int64_t, int64_t j, int64_t, int64_t) { return j; });
}

// The keys of one sequence become those of another case's, and so do the scales of their tokens.
inline void copy_keys(const Exam& from, int64_t from_batch, Exam& to, int64_t to_batch) {
  const tessera_problem& p = to.problem();
  for (const int name : stored(p))
    for (int64_t j = 0; j < keys_of(to, to_batch); ++j)
      for (int64_t h = 0; h < p.heads_kv; ++h)
        std::memcpy(key_at(to, name, to_batch, j, h), key_at(from, name, from_batch, j, h),
                    static_cast<size_t>(to.operand(name).extent[3]) * tessera_dtype_bytes(to.operand(name).dtype));
  for (const auto& [scale, of] : {std::pair{TESSERA_K_SCALE, TESSERA_K}, std::pair{TESSERA_V_SCALE, TESSERA_V}}) {
    if (!to.has(scale) || to.operand(scale).extent[1] != to.operand(of).extent[1]) continue;
    for (int64_t j = 0; j < keys_of(to, to_batch); ++j)
      for (int64_t h = 0; h < to.operand(scale).extent[2]; ++h)
        std::memcpy(key_at(to, scale, to_batch, j, h, true), key_at(from, scale, from_batch, j, h, true),
                    tessera_dtype_bytes(to.operand(scale).dtype));
  }
}
// Rows of q of one sequence, from row `first` on.
inline void copy_queries(const Exam& from, int64_t from_batch, int64_t first, Exam& to, int64_t to_batch) {
  const tools::Sequence source = tools::sequences(from, tools::Side::query)[static_cast<size_t>(from_batch)],
                        goal = tools::sequences(to, tools::Side::query)[static_cast<size_t>(to_batch)];
  for (int64_t i = 0; i < goal.used; ++i)
    for (int64_t h = 0; h < to.problem().heads_q; ++h)
      std::memcpy(to.at(TESSERA_Q, {goal.batch, goal.first + i, h, 0}),
                  from.at(TESSERA_Q, {source.batch, source.first + first + i, h, 0}),
                  static_cast<size_t>(to.problem().dim) * tessera_dtype_bytes(to.operand(TESSERA_Q).dtype));
}

// The bytes of rows [first, first + count) of out, lse and max_score of one sequence.
inline std::vector<std::byte> result_bits(const Exam& c, int64_t b, int64_t first, int64_t count) {
  std::vector<std::byte> bits;
  const tools::Sequence rows = tools::sequences(c, tools::Side::query)[static_cast<size_t>(b)];
  for (const int name : tools::outputs(c.problem())) {
    const tessera_operand& o = c.operand(name);
    const size_t row_bytes = static_cast<size_t>(o.extent[3]) * tessera_dtype_bytes(o.dtype);
    for (int64_t i = first; i < first + count; ++i)
      for (int64_t h = 0; h < o.extent[2]; ++h) {
        const std::byte* const at = c.at(name, {rows.batch, rows.first + i, h, 0});
        bits.insert(bits.end(), at, at + row_bytes);
      }
  }
  return bits;
}
inline std::vector<std::byte> result_bits(const Exam& c, int64_t b) {
  if (c.problem().pass == TESSERA_APPEND) return {};
  return result_bits(c, b, 0, tools::sequences(c, tools::Side::query)[static_cast<size_t>(b)].used);
}
// What the cache holds after a run of keys [first, ...) of one sequence. The page ids of old keys may be poisoned.
inline std::vector<std::byte> stored_bits(const Exam& c, int64_t b, int64_t first) {
  std::vector<std::byte> bits;
  for (const int name : {TESSERA_K, TESSERA_V})
    for (int64_t j = first; j < keys_of(c, b); ++j)
      for (int64_t h = 0; h < c.problem().heads_kv; ++h) {
        const std::byte* const at = key_at(c, name, b, j, h, true);
        bits.insert(bits.end(), at,
                    at + static_cast<size_t>(c.operand(name).extent[3]) * tessera_dtype_bytes(c.operand(name).dtype));
      }
  return bits;
}
inline std::vector<std::byte> appended_bits(const Exam& c, int64_t b) {
  return stored_bits(c, b, tools::cache_row(c, b).old_keys);
}

// The lines ask for the same keys in different places: one answer, to the bit, from every kernel with any number of
// threads, and the oracle agrees with the first tiling.
inline void expect_one_answer(const std::vector<std::string>& lines, const std::vector<int>& tiles = {0}) {
  SCOPED_TRACE(lines.front());
  std::vector<Exam> all;
  all.reserve(lines.size());
  for (const std::string& line : lines) {
    all.emplace_back(line);
    for (int64_t b = 0; b < all.back().problem().batch; ++b)
      if (all.size() > 1) {
        copy_keys(all.front(), b, all.back(), b);
        if (all.back().problem().pass != TESSERA_APPEND) copy_queries(all.front(), b, 0, all.back(), b);
      }
  }
  for (Exam& c : all) tools::poison(c);
  for (const std::string& kernel : kernels_for(lines.front()))
    for (const int tile : tiles) {
      for (size_t n = 0; n < lines.size(); ++n)
        for (const int threads : {1, 3}) {
          run_all(all[n], {kernel, threads, 0, tile});
          for (int64_t b = 0; b < all[n].problem().batch; ++b) {
            const bool same =
                result_bits(all[n], b) == result_bits(all[0], b) &&
                (!tools::appends(all[n].problem()) || appended_bits(all[n], b) == appended_bits(all[0], b));
            ASSERT_TRUE(same) << lines[n] << "\n on " << kernel << ", threads " << threads << ", sequence " << b;
          }
        }
      if (tile == tiles.front()) expect_right(all[0], kernel);
    }
}

// Every byte of the case, by operand.
inline std::vector<std::vector<std::byte>> all_bytes(const Exam& c) {
  std::vector<std::vector<std::byte>> all(TESSERA_NAMES);
  for (int name = 0; name < TESSERA_NAMES; ++name)
    if (c.has(name) && c.span(name) > 0) {
      const std::byte* const begin = c.at(name, {0, 0, 0, 0});
      all[static_cast<size_t>(name)].assign(begin, begin + c.span(name));
    }
  return all;
}

// Refused by every kernel, and nothing is written but bits of the status word, which keeps those that it has.
inline void expect_refused(Exam& c, int32_t bits, std::initializer_list<const char*> words) {
  constexpr int32_t earlier = 1 << 20;
  std::vector<std::string> all = kernels_for(c.problem());
  all.push_back("reference.oracle");
  for (const std::string& kernel : all)
    for (const int threads : {1, 2}) {
      SCOPED_TRACE(kernel);
      if (c.has(TESSERA_STATUS)) c.value(TESSERA_STATUS, 0) = earlier;
      auto before = all_bytes(c);
      expect_invalid(attempt(c.problem(), c.bindings(), {kernel, threads}), words);
      auto after = all_bytes(c);
      if (c.has(TESSERA_STATUS)) {
        EXPECT_EQ(c.value(TESSERA_STATUS, 0), earlier | bits);
        before[TESSERA_STATUS].clear();
        after[TESSERA_STATUS].clear();
      }
      for (size_t name = 0; name < before.size(); ++name)
        EXPECT_TRUE(before[name] == after[name]) << tessera_name_text(static_cast<int32_t>(name)) << " was written";
    }
}

}  // namespace tessera::test
