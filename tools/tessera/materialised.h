// The yardstick of memory: attention as a textbook has it, with the whole score matrix of a head in memory.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "case.h"

namespace tessera::tools {

// Forward on dense operands: float32 sums, masks, grouped heads, scale. Everything else is refused in words.
class Materialised {
 public:
  Materialised(const Case& c, int threads);
  double run();           // seconds
  int64_t bytes() const;  // what it allocates besides the operands

 private:
  // What one thread, or all threads for one head, work in.
  struct Scratch {
    Buffer queries, keys, values, scores, out;
    float* at(Buffer Scratch::*part) { return reinterpret_cast<float*>((this->*part).memory.get()); }
  };
  void attend(int64_t batch, int64_t head_kv, Scratch& scratch) const;
  const uint8_t* grid(int64_t batch, int64_t head) const;

  const Case& case_;
  int outer_ = 1;                // threads over heads
  int inner_ = 1;                // threads over the rows of a head
  int64_t rows_;                 // padded to whole tiles
  int64_t columns_, columns_v_;  // padded to whole panels
  bool per_batch_ = false, per_head_ = false;
  std::vector<uint8_t> grids_;  // rows of columns_ bytes; empty without a mask
  std::vector<Scratch> scratch_;
};

}  // namespace tessera::tools
