// A pack of no real code beside this program, where the library looks for its own: the fake driver loads anything.
#pragma once
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>

#include "cuda/code.h"
#include "cuda/pack.h"
#include "cuda/sources.h"

namespace tessera::test {

inline cuda::Image made_image(cuda::Target target, std::string bytes, int registers = 0, int spill_bytes = 0) {
  return {
      .target = target, .bytes = std::move(bytes), .registers = registers, .spill_bytes = spill_bytes, .warnings = {}};
}

inline cuda::Pack made_pack() {
  cuda::Pack pack = {.sources = cuda::source_digest(), .compiler = 13000, .kernels = {}};
  for (const cuda::Code& code : cuda::shipped())
    for (const cuda::Target& target : cuda::shipped_targets())
      if (cuda::compiles_for(code, target))
        pack.kernels.push_back({code.text, made_image(target, code.text + " " + text(target), 100)});
  return pack;
}

inline std::string pack_path() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "tessera.pack";
}
inline void put_bytes(const std::string& bytes) {
  ASSERT_EQ(cuda::write_file(pack_path(), bytes), "");
}
inline void put_pack(const cuda::Pack& pack) {
  put_bytes(cuda::to_bytes(pack));
}
inline void no_pack() {
  std::remove(pack_path().c_str());
}

}  // namespace tessera::test
