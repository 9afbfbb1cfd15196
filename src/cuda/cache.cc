#include "cuda/cache.h"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>

#include "cuda/pack.h"

namespace tessera::cuda {
namespace {

std::string path_of(const std::string& folder, const std::string& key, const Target& target) {
  return fmt::format("{}/{}-{:016x}.kernel", folder, text(target), checksum(key));
}

}  // namespace

std::string cache_folder() {
  const auto variable = [](const char* name) -> std::string {
    const char* const value = std::getenv(name);
    return value ? value : "";
  };
  if (const std::string folder = variable("TESSERA_CACHE"); !folder.empty()) return folder;
  if (const std::string home = variable("XDG_CACHE_HOME"); !home.empty()) return home + "/tessera";
  if (const std::string home = variable("HOME"); !home.empty()) return home + "/.cache/tessera";
  return "";
}

// A file is a pack of one kernel, whose sources are the whole key.
std::optional<Image> read_cached(const std::string& folder, const std::string& key, const Target& target) {
  if (folder.empty()) return {};
  const std::optional<std::string> bytes = read_file(path_of(folder, key, target));
  if (!bytes) return {};
  try {
    Pack pack = parse_pack(*bytes);
    if (pack.sources != key || pack.kernels.size() != 1 || pack.kernels[0].image.target != target) return {};
    return unpacked(pack.kernels[0].image);
  } catch (const std::exception&) {  // cut off, or not ours: it is written again
    return {};
  }
}

std::string write_cached(const std::string& folder, const std::string& key, const Image& image) {
  if (folder.empty()) return "no cache folder: neither TESSERA_CACHE, XDG_CACHE_HOME nor HOME is set";
  std::error_code wrong;
  std::filesystem::create_directories(folder, wrong);
  if (wrong) return fmt::format("{}: {}", folder, wrong.message());
  return write_file(path_of(folder, key, image.target),
                    to_bytes({.sources = key, .compiler = 0, .kernels = {{"cached", image}}}));
}

}  // namespace tessera::cuda
