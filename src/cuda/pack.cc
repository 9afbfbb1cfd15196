#include "cuda/pack.h"

#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <thread>

#include "core/error.h"
#include "cuda/driver.h"
#include "cuda/sources.h"

namespace tessera::cuda {
namespace {

constexpr const char* magic = "tessera-pack 2";

[[noreturn]] void broken(const std::string& what) {
  throw core::Error(TESSERA_FAILED, "the kernel pack is broken: " + what + "; build it again");
}

// "word rest": the rest.
std::string after(const std::string& line, const char* word) {
  const std::string start = std::string(word) + " ";
  if (!line.starts_with(start)) broken(fmt::format("\"{}\" is expected, \"{}\" found", word, line.substr(0, 40)));
  return line.substr(start.size());
}

std::string next_line(const std::string& bytes, size_t& at) {
  const size_t end = bytes.find('\n', at);
  if (end == std::string::npos) broken("its head ends early");
  const std::string line = bytes.substr(at, end - at);
  at = end + 1;
  return line;
}

}  // namespace

uint64_t checksum(const std::string& bytes) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001B3u;
  return hash;
}

Image packed(Image image) {
  if (image.unpacked_bytes > 0 || image.bytes.empty()) return image;
  std::string bytes(compressBound(image.bytes.size()), '\0');
  uLongf size = bytes.size();
  if (compress2(reinterpret_cast<Bytef*>(bytes.data()), &size, reinterpret_cast<const Bytef*>(image.bytes.data()),
                image.bytes.size(), Z_BEST_COMPRESSION) != Z_OK)
    throw core::Error(TESSERA_FAILED, "zlib does not compress a kernel: out of memory");
  bytes.resize(size);
  image.unpacked_bytes = image.bytes.size();
  image.bytes = std::move(bytes);
  return image;
}

Image unpacked(const Image& image) {
  Image whole = image;
  if (image.unpacked_bytes == 0) return whole;
  whole.bytes.resize(image.unpacked_bytes);
  uLongf size = whole.bytes.size();
  if (uncompress(reinterpret_cast<Bytef*>(whole.bytes.data()), &size,
                 reinterpret_cast<const Bytef*>(image.bytes.data()), image.bytes.size()) != Z_OK ||
      size != image.unpacked_bytes)
    broken("an image does not unpack");
  whole.unpacked_bytes = 0;
  return whole;
}

std::string to_bytes(const Pack& pack) {
  std::string bytes =
      fmt::format("{}\nsources {}\ncompiler {}\nkernels {}\n", magic, pack.sources, pack.compiler, pack.kernels.size());
  std::string images;
  for (const auto& [code, whole] : pack.kernels) {
    const Image image = packed(whole);
    bytes += fmt::format("{} {} {} {:016x} {} {} {}\n", text(image.target), image.bytes.size(), image.unpacked_bytes,
                         checksum(image.bytes), image.registers, image.spill_bytes, code);
    images += image.bytes;
  }
  bytes += images;
  return bytes;
}

Pack parse_pack(const std::string& bytes) {
  size_t at = 0;
  if (next_line(bytes, at) != magic) broken(fmt::format("it does not begin with \"{}\"", magic));
  Pack pack;
  pack.sources = after(next_line(bytes, at), "sources");
  pack.compiler = std::atoi(after(next_line(bytes, at), "compiler").c_str());
  const int count = std::atoi(after(next_line(bytes, at), "kernels").c_str());
  std::vector<uint64_t> sums;
  for (int n = 0; n < count; ++n) {
    std::istringstream line(next_line(bytes, at));
    std::string target, code;
    size_t size = 0;
    uint64_t sum = 0;
    Image image;
    line >> target >> size >> image.unpacked_bytes >> std::hex >> sum >> std::dec >> image.registers >>
        image.spill_bytes >> std::ws;
    std::getline(line, code);
    const std::optional<Target> known = parse_target(target);
    if (line.fail() || !known || size > bytes.size() || image.unpacked_bytes == 0)
      broken(fmt::format("line {} of its kernels is no kernel", n));
    image.target = *known;
    image.bytes.resize(size);
    sums.push_back(sum);
    pack.kernels.push_back({code, std::move(image)});
  }
  for (size_t n = 0; n < pack.kernels.size(); ++n) {
    Image& image = pack.kernels[n].image;
    if (bytes.size() - at < image.bytes.size()) broken("it ends early");
    image.bytes = bytes.substr(at, image.bytes.size());
    at += image.bytes.size();
    if (checksum(image.bytes) != sums[n]) broken(fmt::format("the bytes of {} are not those it was made of", n));
  }
  if (at != bytes.size()) broken("it goes on after its last image");
  return pack;
}

std::optional<std::string> read_file(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  if (!file) return {};
  std::string bytes, part(1 << 16, '\0');
  while (const size_t count = std::fread(part.data(), 1, part.size(), file)) bytes.append(part, 0, count);
  const bool whole = std::ferror(file) == 0;  // a folder opens and cannot be read
  std::fclose(file);
  return whole ? std::optional(std::move(bytes)) : std::nullopt;
}

Pack read_pack(const std::string& path) {
  const std::optional<std::string> bytes = read_file(path);
  if (!bytes) throw core::Error(TESSERA_FAILED, fmt::format("no kernel pack: {} cannot be read", path));
  return parse_pack(*bytes);
}

std::string write_file(const std::string& path, const std::string& bytes) {
  // A name that no other thread or process writes to.
  const std::string own =
      fmt::format("{}.{}.{:x}.new", path, ::getpid(), std::hash<std::thread::id>()(std::this_thread::get_id()));
  const auto give_up = [&](int error) {
    std::remove(own.c_str());
    return fmt::format("{}: {}", path, std::strerror(error));
  };
  std::FILE* const file = std::fopen(own.c_str(), "wb");
  if (!file) return give_up(errno);
  const bool wrote = std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
  const int wrong = errno;
  if (std::fclose(file) != 0 || !wrote) return give_up(wrote ? errno : wrong);
  return std::rename(own.c_str(), path.c_str()) == 0 ? "" : give_up(errno);
}

std::vector<Target> shipped_targets() {
  return {{75, false}, {80, false}, {90, false}, {100, false}, {120, false}, {80, true}};
}

Pack build_pack(const Compiler& compiler, const std::vector<Target>& targets) {
  for (const Target& target : targets)
    core::require(target.arch >= oldest_arch, "target is {}; the oldest chip that has kernels is sm_{}.", text(target),
                  oldest_arch);
  struct Work {
    Code code;
    Target target;
  };
  std::vector<Work> all;
  for (const Code& code : shipped())
    for (const Target& target : targets)
      if (compiles_for(code, target)) all.push_back({code, target});

  // NVRTC compiles for many threads at once, each program by itself.
  Pack pack = {.sources = source_digest(), .compiler = compiler.version, .kernels = {}};
  pack.kernels.resize(all.size());
  std::vector<std::string> failures(all.size());
  std::atomic<size_t> next = 0;
  const auto compile = [&] {
    for (size_t n = next++; n < all.size(); n = next++) try {
        const auto& [code, target] = all[n];
        Image image = compiler.compile(code, target);
        if (image.spill_bytes > 0 || !image.warnings.empty())
          failures[n] = fmt::format("{} for {} spills {} bytes; the compiler says:\n{}", code.text, text(target),
                                    image.spill_bytes, image.warnings);
        pack.kernels[n] = {code.text, packed(std::move(image))};
      } catch (const std::exception& error) {
        failures[n] = error.what();
      }
  };
  std::vector<std::thread> threads(std::clamp(std::thread::hardware_concurrency(), 1u, 8u) - 1);
  for (std::thread& thread : threads) thread = std::thread(compile);
  compile();
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures)
    if (!failure.empty()) throw core::Error(TESSERA_FAILED, failure);
  return pack;
}

const Image* image_for(const Pack& pack, const Code& code, int arch) {
  const Image* best = nullptr;
  const auto later = [](const Image& a, const Image* b) {
    return !b || (a.target.ptx == b->target.ptx ? a.target.arch > b->target.arch : b->target.ptx);
  };
  for (const PackedKernel& kernel : pack.kernels) {
    const Target& t = kernel.image.target;
    const bool runs = code.only_arch ? t == Target{arch, false} : t.arch <= arch && (t.ptx || t.arch / 10 == arch / 10);
    if (kernel.code == code.text && runs && later(kernel.image, best)) best = &kernel.image;
  }
  return best;
}

}  // namespace tessera::cuda
