// A problem line, its memory, and runs of it on any kernel.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tools/tessera/cache.h"
#include "tools/tessera/runner.h"
#include "tools/tessera/status.h"

namespace tessera::test {

inline tools::Case make_case(const std::string& text, uint64_t seed = 1, bool poisoned = true) {
  tools::Case c{tools::Line(text)};
  tools::fill_random(c, seed);
  if (poisoned) tools::poison(c);
  return c;
}

using How = tools::Choice;  // kernels, threads, tile rows, tile keys

// Plans and runs `problem` on the case's memory, with a workspace full of 0xFF.
inline void run(const tools::Case& c, const tessera_problem& problem, const How& how) {
  const tools::Guard guard(c);
  tools::Runner(c, problem, how).run();
  guard.check();
}

// Forward first if the case is a backward one, since that reads out and lse.
inline void run_all(tools::Case& c, const How& how) {
  if (c.problem().pass == TESSERA_BACKWARD) run(c, tools::forward_of(c.problem()), how);
  for (const int name : tools::outputs(c.problem())) c.wipe(name);
  tools::wipe_new(c);
  run(c, c.problem(), how);
}

inline void expect_right(const tools::Judgement& judged, const std::string& what) {
  for (const tessera_verdict& v : judged.verdicts)
    EXPECT_TRUE(v.ok) << what << "\n  " << tessera_name_text(v.name) << ": max " << v.max << " (bound " << v.bound
                      << "), rms " << v.rms << " (bound " << v.bound_rms << "), non-finite equal " << v.nonfinite_equal;
}
inline void expect_right(const tools::Case& c, const std::string& what) {
  expect_right(tools::judge(c, 0), what);
}

// The bytes of all outputs, element by element (not what lies between strides); of k and v the new rows.
inline std::vector<std::byte> output_bits(const tools::Case& c) {
  std::vector<std::byte> bits;
  for (const int name : tools::outputs(c.problem())) {
    if (!c.has(name)) continue;
    const tessera_operand& o = c.operand(name);
    const size_t size = tessera_dtype_bytes(o.dtype);
    tools::for_each_index(tools::extents(o),
                          [&](const tools::Index& i) { bits.insert(bits.end(), c.at(name, i), c.at(name, i) + size); });
  }
  tools::for_each_new(c, [&](int name, const tools::Index& i) {
    const size_t size = tessera_dtype_bytes(c.operand(name).dtype);
    bits.insert(bits.end(), c.at(name, i), c.at(name, i) + size);
  });
  return bits;
}

// Every instruction set that this machine has.
inline std::vector<std::string> kernels() {
  static const std::vector<std::string> all = {"cpu.baseline", "cpu.avx2", "cpu.avx512", "cpu.avx512bf16"};
  const tessera_device host = tools::find_device("host");
  return {all.begin(), all.begin() + host.isa + 1};
}

}  // namespace tessera::test
