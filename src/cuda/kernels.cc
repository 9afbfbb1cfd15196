// The kernels as files: what ships, how a pack is built, how it is taken apart.
#include <algorithm>
#include <array>
#include <filesystem>
#include <sstream>

#include "core/error.h"
#include "cuda/cuda.h"
#include "cuda/kernels.h"
#include "cuda/loaded.h"

namespace tessera::cuda {
namespace {

std::vector<Target> parse_targets(const std::string& words) {
  if (words.empty()) return shipped_targets();
  std::vector<Target> targets;
  std::istringstream list(words);
  for (std::string word; std::getline(list, word, ',');) {
    const std::optional<Target> target = parse_target(word);
    core::require(target.has_value(), "target is \"{}\"; it must be such as sm_90 (machine code) or compute_80 (PTX).",
                  word);
    targets.push_back(*target);
  }
  return targets;
}

constexpr std::array<const core::Kernel*, 4> all = {&sm90_forward, &portable_forward, &portable_backward, &general};

int64_t shared_of(const Code& code) {
  return std::max(0, code.shared_bytes);  // 0 also where each plan says
}

}  // namespace

std::span<const core::Kernel* const> kernels() {
  return all;
}

std::vector<KernelFacts> shipped_kernels() {
  const FoundPack& found = shipped_pack();
  std::vector<KernelFacts> all;
  for (const Code& code : shipped()) {
    const size_t before = all.size();
    if (found.pack)
      for (const PackedKernel& kernel : found.pack->kernels)
        if (kernel.code == code.text)
          all.push_back({code.text, text(kernel.image.target), "pack", kernel.image.registers, kernel.image.spill_bytes,
                         code.threads, shared_of(code), static_cast<int64_t>(kernel.image.unpacked_bytes)});
    if (all.size() == before)
      all.push_back({code.text, "any", "compiled at first use", 0, 0, code.threads, shared_of(code), 0});
  }
  return all;
}

void build_pack(const std::string& path, const std::string& targets, const std::string& nvrtc) {
  const OpenedCompiler opened = open_compiler(nvrtc, 0);
  if (!opened.compiler) throw core::Error(TESSERA_FAILED, opened.why);
  const Pack pack = build_pack(*opened.compiler, parse_targets(targets));
  if (const std::string why = write_file(path, to_bytes(pack)); !why.empty())
    throw core::Error(TESSERA_FAILED, "cannot write the kernel pack: " + why);
}

void dump_pack(const std::string& folder) {
  const FoundPack& found = shipped_pack();
  if (!found.pack) throw core::Error(TESSERA_FAILED, found.why);
  std::error_code wrong;
  std::filesystem::create_directories(folder, wrong);
  for (const PackedKernel& kernel : found.pack->kernels) {
    std::string name = kernel.code;
    for (char& c : name)
      if (c == ' ') c = '.';
    const std::string path =
        fmt::format("{}/{}.{}.{}", folder, name, text(kernel.image.target), kernel.image.target.ptx ? "ptx" : "cubin");
    if (const std::string why = write_file(path, unpacked(kernel.image).bytes); !why.empty())
      throw core::Error(TESSERA_FAILED, "cannot write: " + why);
  }
}

}  // namespace tessera::cuda
