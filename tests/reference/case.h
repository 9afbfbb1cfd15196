// A problem line with memory of its own. Every byte that is not written is 0xFF: a NaN, or an id of -1.
#pragma once
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <string>

#include "core/check.h"
#include "core/error.h"
#include "core/line.h"
#include "reference/formulas.h"

namespace tessera::reference {

using At = std::array<int64_t, 4>;

struct Case {
  explicit Case(const std::string& text, uint32_t seed = 1) : line(core::parse(text)) {
    core::check(p);
    bound.size = sizeof bound;
    bound.seed = line.seed;
    for (int name = 0; name < TESSERA_NAMES; ++name) {
      const core::Operand& o = p.operand[name];
      if (!core::has(p, name)) continue;
      auto& bytes = memory[static_cast<size_t>(name)];
      bytes.assign(static_cast<size_t>(core::span(o) * core::dtype_bytes(o.dtype)) + 8, std::byte{0xFF});
      bound.data[name] = bytes.data();
    }
    if (p.cache.v_in_k) bound.data[TESSERA_V] = bound.data[TESSERA_K];
    for (const auto& [name, values] : line.values)
      std::memcpy(bound.data[name], values.data(), values.size() * sizeof(int32_t));
    core::check_lengths(p, bound);
    fill(seed);
  }
  Case(const Case&) = delete;

  double get(int name, At i) const { return view(p, bound, name).at(i[0], i[1], i[2], i[3]); }
  void set(int name, At i, double x) {
    const core::Operand& o = p.operand[name];
    const int64_t offset = core::offset_of(o, i[0], i[1], i[2], i[3]);
    if (o.dtype == TESSERA_BOOL) static_cast<uint8_t*>(bound.data[name])[offset] = x != 0;
    else if (o.dtype == TESSERA_I32) static_cast<int32_t*>(bound.data[name])[offset] = static_cast<int32_t>(x);
    else target(p, bound, name).put(i[0], i[1], i[2], i[3], x);
  }
  template <class Visit>
  void each(int name, Visit visit) const {
    if (!core::has(p, name)) return;
    const int64_t* n = p.operand[name].extent;
    for (int64_t a = 0; a < n[0]; ++a)
      for (int64_t b = 0; b < n[1]; ++b)
        for (int64_t c = 0; c < n[2]; ++c)
          for (int64_t d = 0; d < n[3]; ++d) visit(At{a, b, c, d});
  }
  void all(int name, double x) {
    each(name, [&](At i) { set(name, i, x); });
  }
  template <class Value>
  void each_is(int name, Value value) {
    each(name, [&](At i) { set(name, i, value(i)); });
  }
  std::vector<double> values(int name) const {
    std::vector<double> out;
    each(name, [&](At i) { out.push_back(get(name, i)); });
    return out;
  }

  // Uniform in [-1, 1], the same everywhere.
  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    const auto uniform = [&] { return static_cast<double>(random()) / 0x1p31 - 1; };
    for (int name = 0; name < TESSERA_NAMES; ++name) {
      if (core::is_output(core::role(p, name))) continue;
      each(name, [&](At i) {
        switch (name) {
          case TESSERA_KEEP:
            set(name, i, uniform() < 0.4);
            break;
          case TESSERA_EXCLUDE_KEYS:
            set(name, i, uniform() > 0.6);
            break;
          case TESSERA_DOCUMENTS_Q:
          case TESSERA_DOCUMENTS_K:
            set(name, i, std::floor(1.5 * uniform() + 0.7));
            break;
          case TESSERA_SLOPES:
          case TESSERA_K_SCALE:
          case TESSERA_V_SCALE:
            set(name, i, 0.3 + 0.2 * uniform());
            break;
          default:
            if (p.operand[name].dtype <= TESSERA_F16 || p.operand[name].dtype == TESSERA_E4M3) set(name, i, uniform());
        }
      });
    }
  }

  void run(const Task& task = {}) { oracle(p, bound, task); }
  // Of a backward line: makes out and lse.
  void run_forward() const { oracle(forward_of(p), bound, {}); }

  static Problem forward_of(Problem p) {
    p.pass = TESSERA_FORWARD;
    for (int name = 0; name < TESSERA_NAMES; ++name)
      if (core::role(p, name) == core::Role::none) p.operand[name] = {};
    return p;
  }

  core::Line line;
  Problem& p = line.problem;
  Bindings bound = {};
  std::array<std::vector<std::byte>, TESSERA_NAMES> memory;
};

}  // namespace tessera::reference
