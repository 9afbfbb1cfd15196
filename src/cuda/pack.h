// The kernel pack: every shipped kernel for every architecture, in one file beside the library. Its head is text:
//   tessera-pack 2
//   sources DIGEST            of the kernels' source; another library's pack is refused
//   compiler 13000
//   kernels N                 then N lines, and the images one after the other:
//   sm_90 BYTES UNPACKED CHECKSUM REGISTERS SPILLS forward dtype=bf16 dim=128 ...
// Images are compressed, each by itself (zlib), and are unpacked one at a time when they are needed.
#pragma once
#include <optional>
#include <vector>

#include "cuda/compile.h"

namespace tessera::cuda {

struct PackedKernel {
  std::string code;  // Code::text
  Image image;
};
struct Pack {
  std::string sources;
  int compiler = 0;
  std::vector<PackedKernel> kernels;
};

Image packed(Image image);
Image unpacked(const Image& image);  // throws Error(TESSERA_FAILED): what is wrong with it

uint64_t checksum(const std::string& bytes);  // FNV-1a

std::string to_bytes(const Pack& pack);
// Throws Error(TESSERA_FAILED): what is wrong with it.
Pack parse_pack(const std::string& bytes);
Pack read_pack(const std::string& path);
// Whole or not at all: to a name of its own beside `path`, then renamed. Empty, or why not.
std::string write_file(const std::string& path, const std::string& bytes);
std::optional<std::string> read_file(const std::string& path);

// Compiles every shipped kernel for `targets`. Throws Error(TESSERA_FAILED) if one spills or serialises.
Pack build_pack(const Compiler& compiler, const std::vector<Target>& targets);
std::vector<Target> shipped_targets();

// The image that a device of `arch` runs: machine code of its major version and no later minor one, the latest such;
// else PTX of the latest that is not later; else nullptr. Of code for one chip: that chip's own.
const Image* image_for(const Pack& pack, const Code& code, int arch);

}  // namespace tessera::cuda
