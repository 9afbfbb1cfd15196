#include "cuda/compile.h"

#include <dlfcn.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "cuda/driver.h"
#include "cuda/sources.h"

namespace tessera::cuda {

using Program = struct nvrtc_program*;
struct Compiler::Functions {
  int (*nvrtcVersion)(int*, int*);
  int (*nvrtcCreateProgram)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*nvrtcDestroyProgram)(Program*);
  int (*nvrtcCompileProgram)(Program, int, const char* const*);
  int (*nvrtcGetProgramLogSize)(Program, size_t*);
  int (*nvrtcGetProgramLog)(Program, char*);
  int (*nvrtcGetCUBINSize)(Program, size_t*);
  int (*nvrtcGetCUBIN)(Program, char*);
  int (*nvrtcGetPTXSize)(Program, size_t*);
  int (*nvrtcGetPTX)(Program, char*);
};

namespace {

// -v: registers and spills, which no interface tells before code is loaded.
constexpr std::array options = {"--std=c++20", "--device-as-default-execution-space", "--ptxas-options=-v"};
// With 255 registers in use ptxas 13.0 spills 12 bytes of forward at dim 128 on sm_80 without it, and 60 at dim 64 on
// sm_90 with it.
constexpr const char* option_of_sm_8x = "--ptxas-options=--register-usage-level=8";

// Newest first. A process that holds a torch from the Python registry has one open already, found by its plain name.
constexpr std::array names = {"libnvrtc.so.13", "/usr/local/cuda/lib64/libnvrtc.so.13", "libnvrtc.so.12",
                              "/usr/local/cuda/lib64/libnvrtc.so.12"};

OpenedCompiler open(const std::string& path) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return {nullptr, fmt::format("{} cannot be opened", path)};
  static std::vector<std::unique_ptr<Compiler::Functions>> functions;
  static std::vector<std::unique_ptr<Compiler>> compilers;
  auto f = std::make_unique<Compiler::Functions>();
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    if (!function) missing = name;
  };
#define TESSERA_FIND(name) find(#name, f->name);
  TESSERA_FIND(nvrtcVersion)
  TESSERA_FIND(nvrtcCreateProgram)
  TESSERA_FIND(nvrtcDestroyProgram)
  TESSERA_FIND(nvrtcCompileProgram)
  TESSERA_FIND(nvrtcGetProgramLogSize)
  TESSERA_FIND(nvrtcGetProgramLog)
  TESSERA_FIND(nvrtcGetCUBINSize)
  TESSERA_FIND(nvrtcGetCUBIN)
  TESSERA_FIND(nvrtcGetPTXSize)
  TESSERA_FIND(nvrtcGetPTX)
#undef TESSERA_FIND
  if (missing) return {nullptr, fmt::format("{} lacks {}", path, missing)};
  int major = 0, minor = 0;
  if (f->nvrtcVersion(&major, &minor) != 0) return {nullptr, fmt::format("{} does not say its version", path)};
  auto compiler = std::make_unique<Compiler>();
  compiler->version = major * 1000 + minor * 10;
  compiler->nvrtc = f.get();
  functions.push_back(std::move(f));
  compilers.push_back(std::move(compiler));
  return {compilers.back().get(), ""};
}

// "Used 168 registers", "8 bytes spill stores, 12 bytes spill loads": the number before or after a word of the log.
int number_before(const std::string& log, const char* words) {
  const size_t at = log.find(words);
  if (at == std::string::npos || at == 0) return 0;
  const size_t begin = log.find_last_not_of("0123456789", at - 2) + 1;
  return std::atoi(log.c_str() + begin);
}

std::string lines_with(const std::string& log, const char* word) {
  std::string found;
  for (size_t begin = 0; begin < log.size();) {
    const size_t end = std::min(log.find('\n', begin), log.size());
    const std::string line = log.substr(begin, end - begin);
    if (line.find(word) != std::string::npos) found += line + "\n";
    begin = end + 1;
  }
  return found;
}

}  // namespace

std::string text(const Target& target) {
  return fmt::format("{}_{}", target.ptx ? "compute" : "sm", target.arch);
}

std::optional<Target> parse_target(const std::string& word) {
  const size_t dash = word.find('_');
  const std::string kind = word.substr(0, dash);
  if (dash == std::string::npos || (kind != "sm" && kind != "compute")) return {};
  int arch = 0;
  const char *const begin = word.data() + dash + 1, *const end = word.data() + word.size();
  const auto [stop, code] = std::from_chars(begin, end, arch);
  if (code != std::errc() || stop != end || arch <= 0) return {};
  return Target{arch, kind == "compute"};
}

bool compiles_for(const Code& code, const Target& target) {
  return code.only_arch ? target == Target{code.least_arch, false} : target.arch >= code.least_arch;
}

std::string Compiler::key() const {
  std::string all = "nvrtc " + version_text(version);
  for (const char* option : options) all += std::string(" ") + option;
  return all + " " + option_of_sm_8x;
}

Image Compiler::compile(const Code& code, const Target& target) const {
  std::vector<const char*> header_texts, header_names;
  for (const Source& s : sources()) header_texts.push_back(s.text), header_names.push_back(s.name);
  Program made = nullptr;
  if (nvrtc->nvrtcCreateProgram(&made, code.source.c_str(), "tessera.cu", static_cast<int>(header_names.size()),
                                header_texts.data(), header_names.data()) != 0)
    throw core::Error(TESSERA_FAILED, "NVRTC makes no program");
  const auto destroy = [&](Program p) { nvrtc->nvrtcDestroyProgram(&p); };
  const std::unique_ptr<struct nvrtc_program, decltype(destroy)> program(made, destroy);

  const std::string arch = "--gpu-architecture=" + text(target) + (code.only_arch ? "a" : "");
  std::vector<const char*> all(options.begin(), options.end());
  all.push_back(arch.c_str());
  if (!target.ptx && target.arch / 10 == 8) all.push_back(option_of_sm_8x);
  const int result = nvrtc->nvrtcCompileProgram(made, static_cast<int>(all.size()), all.data());
  size_t size = 0;
  nvrtc->nvrtcGetProgramLogSize(made, &size);
  std::string log(size, '\0');
  nvrtc->nvrtcGetProgramLog(made, log.data());
  log.resize(size > 0 ? size - 1 : 0);
  if (result != 0)
    throw core::Error(TESSERA_FAILED, fmt::format("NVRTC {} does not compile {} for {}:\n{}", version_text(version),
                                                  code.text, text(target), log));
  Image image = {.target = target,
                 .bytes = {},
                 .registers = number_before(log, "registers"),
                 .spill_bytes = number_before(log, "bytes spill stores") + number_before(log, "bytes spill loads"),
                 .warnings = lines_with(log, "C75") + lines_with(log, "warning")};
  (target.ptx ? nvrtc->nvrtcGetPTXSize : nvrtc->nvrtcGetCUBINSize)(made, &size);
  image.bytes.resize(size);
  if ((target.ptx ? nvrtc->nvrtcGetPTX : nvrtc->nvrtcGetCUBIN)(made, image.bytes.data()) != 0 || size == 0)
    throw core::Error(TESSERA_FAILED, fmt::format("NVRTC gives no code of {} for {}", code.text, text(target)));
  return image;
}

OpenedCompiler open_compiler(const std::string& path, int driver_version) {
  static std::mutex mutex;
  static std::map<std::string, OpenedCompiler> known;
  const std::lock_guard lock(mutex);
  const auto opened = [&](const std::string& name) {
    const auto found = known.find(name);
    return found != known.end() ? found->second : known[name] = open(name);
  };
  if (!path.empty()) return opened(path);
  std::string why = "no NVRTC: libnvrtc.so.13 and libnvrtc.so.12 cannot be opened";
  for (const char* name : names) {
    const OpenedCompiler one = opened(name);
    if (!one.compiler) continue;
    const int major = one.compiler->version / 1000;
    if (driver_version == 0 || major <= driver_version / 1000) return one;
    why = fmt::format("NVRTC is {}, whose code the driver, CUDA {}, does not run", version_text(one.compiler->version),
                      version_text(driver_version));
  }
  return {nullptr, why};
}

}  // namespace tessera::cuda
