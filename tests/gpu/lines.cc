// Problem lines drawn at random over every option of the contract and dims up to those of MLA, for
// `tessera check - --engine cuda.general`. usage: gpu_lines COUNT [SEED]
#include <cstdio>
#include <cstdlib>

#include "tests/random_line.h"

int main(int argc, char** argv) {
  using namespace tessera::test;
  if (argc < 2) return std::fprintf(stderr, "usage: gpu_lines COUNT [SEED]\n"), 2;
  Draw draw(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0);
  const std::vector<int64_t> large = {64, 72, 96, 128, 128, 160, 192, 256, 320, 512, 576};
  for (int left = std::atoi(argv[1]); left > 0;) {
    const int64_t kind = draw.below(8);
    const std::vector<int64_t>& dims = draw.one_in(3) ? large : small_dims();
    const std::string line = kind < 3   ? random_line(draw, "forward", dims)
                             : kind < 5 ? random_line(draw, "backward", dims)
                                        : random_cache_line(draw);
    if (line.find(" f64") != std::string::npos) continue;  // computed on processors only
    std::printf("%s\n", line.c_str());
    --left;
  }
}
