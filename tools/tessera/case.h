// The memory of one problem: a tight buffer for every operand, with the problem's own strides.
#pragma once

#include <tessera/tessera.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"

namespace tessera::tools {

using Index = std::array<int64_t, 4>;

// Owns a tessera_line.
class Line {
 public:
  explicit Line(const std::string& text);
  const tessera_problem& problem() const { return *tessera_line_problem(line_.get()); }
  std::vector<int32_t> values(int name) const;
  uint64_t seed() const { return tessera_line_seed(line_.get()); }
  uint64_t offset() const { return tessera_line_offset(line_.get()); }
  std::string text() const;  // as the library prints it

 private:
  struct Free {
    void operator()(tessera_line* line) const { tessera_line_free(line); }
  };
  std::unique_ptr<tessera_line, Free> line_;
};

enum class Only { everything, mask };  // what a case has room for

class Case {
 public:
  // Buffers are aligned as the problem promises and no better, so that a kernel that assumes more is found out.
  // Throws TESSERA_FAILED if the machine has less memory. All memory begins as 0xFF bytes: what nobody fills is NaN.
  explicit Case(const Line& line, Only only = Only::everything);

  const tessera_problem& problem() const { return problem_; }
  const tessera_bindings& bindings() const { return bindings_; }
  // Values that the line gives to an int32 operand; empty if it gives none.
  const std::vector<int32_t>& given(int name) const { return given_[static_cast<size_t>(name)]; }

  const tessera_operand& operand(int name) const { return problem_.operand[name]; }
  bool has(int name) const { return buffers_[static_cast<size_t>(name)].memory != nullptr; }
  std::byte* at(int name, const Index& index) const;
  int32_t& value(int name, int64_t index) const;  // of a dense int32 operand
  int64_t bytes() const;
  size_t span(int name) const { return buffers_[static_cast<size_t>(name)].bytes; }
  // A fresh buffer of 0xFF bytes in place of the operand's own, which is returned.
  Buffer renew(int name);
  void wipe(int name);  // 0xFF bytes, where it is

 private:
  void share_k();  // v's address, where it lies in k

  tessera_problem problem_;
  tessera_bindings bindings_;
  std::array<Buffer, TESSERA_NAMES> buffers_;
  std::array<std::vector<int32_t>, TESSERA_NAMES> given_;
};

inline int64_t offset_of(const tessera_operand& operand, const Index& index) {
  int64_t offset = 0;
  for (size_t n = 0; n < 4; ++n) offset += index[n] * operand.stride[n];
  return offset;
}

// Calls `visit(index)` for every index below `extent`, the last dimension fastest.
template <class Visit>
void for_each_index(const Index& extent, Visit visit) {
  Index i{};
  for (i[0] = 0; i[0] < extent[0]; ++i[0])
    for (i[1] = 0; i[1] < extent[1]; ++i[1])
      for (i[2] = 0; i[2] < extent[2]; ++i[2])
        for (i[3] = 0; i[3] < extent[3]; ++i[3]) visit(std::as_const(i));
}

inline Index extents(const tessera_operand& operand) {
  return {operand.extent[0], operand.extent[1], operand.extent[2], operand.extent[3]};
}

// What a run of the problem writes and nobody reads before.
std::vector<int> outputs(const tessera_problem& problem);
// What a run appends to: k and v, or neither. In files of results they are called k_cache and v_cache.
std::vector<int> updates(const tessera_problem& problem);
std::string result_text(const tessera_problem& problem, int name);

// The forward problem whose out and lse a backward problem reads.
tessera_problem forward_of(const tessera_problem& problem);

// The rows of one sequence in an operand of queries, keys or new tokens.
enum class Side { query, key, fresh };
struct Sequence {
  int64_t batch;   // index of the operand's first dimension
  int64_t first;   // its first row there
  int64_t length;  // rows
  int64_t used;    // of them
};
std::vector<Sequence> sequences(const Case& c, Side side);
inline bool packed(const tessera_problem& problem, Side side) {
  const int cu = side == Side::query ? TESSERA_CU_SEQLENS_Q
                 : side == Side::key ? TESSERA_CU_SEQLENS_K
                                     : TESSERA_CU_SEQLENS_NEW;
  return problem.operand[cu].dtype != TESSERA_ABSENT;
}

// Random inputs, the same on every machine. Lengths that the line does not give are made up within its bounds.
void fill_random(Case& c, uint64_t seed);

// NaN into every byte that cannot matter: rows that no sequence uses, keys that are excluded for all, all outputs.
// (The bytes between strided elements are NaN since the case was made.)
void poison(Case& c);

}  // namespace tessera::tools
