#include "manifest.h"

#include <dlfcn.h>
#include <sys/utsname.h>

#include <fstream>
#include <memory>
#include <sstream>

#include "runner.h"
#include "status.h"

namespace tessera::tools {
namespace {

Json build_info() {
  Json info = Json::object();
  std::istringstream lines(tessera_build_info());
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    if (tab != std::string::npos) info[line.substr(0, tab)] = line.substr(tab + 1);
  }
  return info;
}

std::string os() {
  struct utsname name {};
  ::uname(&name);
  return fmt::format("{} {} {}", name.sysname, name.release, name.machine);
}

}  // namespace

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name") && line.find(": ") != std::string::npos) return line.substr(line.find(": ") + 2);
  return "unknown";
}

std::string isa_text(int isa) {
  std::string text = "baseline";
  for (const auto& [level, name] : {std::pair(TESSERA_ISA_AVX2, "avx2"), std::pair(TESSERA_ISA_AVX512, "avx512"),
                                    std::pair(TESSERA_ISA_AVX512BF16, "avx512bf16")})
    if (isa >= level) text += fmt::format(" {}", name);
  return text;
}

Json gpus() {
  const auto none = [](const std::string& why) { return Json{{"count", 0}, {"driver", nullptr}, {"note", why}}; };
  const std::unique_ptr<void, int (*)(void*)> library(::dlopen("libcuda.so.1", RTLD_NOW), ::dlclose);
  if (!library) return none("no NVIDIA driver: libcuda.so.1 cannot be opened");
  const auto symbol = [&](const char* name) { return ::dlsym(library.get(), name); };
  const auto init = reinterpret_cast<int (*)(unsigned)>(symbol("cuInit"));
  const auto version = reinterpret_cast<int (*)(int*)>(symbol("cuDriverGetVersion"));
  const auto count = reinterpret_cast<int (*)(int*)>(symbol("cuDeviceGetCount"));
  if (!init || !version || !count) return none("libcuda.so.1 lacks cuInit, cuDriverGetVersion or cuDeviceGetCount");
  if (const int code = init(0)) return none(fmt::format("cuInit says error {}", code));
  int found = 0, driver = 0;
  if (const int code = count(&found)) return none(fmt::format("cuDeviceGetCount says error {}", code));
  version(&driver);
  return {{"count", found}, {"driver", fmt::format("CUDA {}.{}", driver / 1000, driver % 1000 / 10)}, {"note", ""}};
}

std::string commit() {
  return TESSERA_COMMIT;
}

Json versions() {
  return {{"tessera", tessera_version()}, {"tools_compiler", __VERSION__}, {"build", build_info()}};
}

Json manifest(int threads) {
  const tessera_device host = find_device("host");
  return {{"device", cpu_model()},
          {"instruction_sets", isa_text(host.isa)},
          {"threads", threads > 0 ? threads : host.threads},
          {"driver", gpus()["driver"]},
          {"os", os()},
          {"versions", versions()},
          {"commit", commit()}};
}

std::string text_of(const Json& facts, const std::string& indent) {
  std::string text;
  for (const auto& [key, value] : facts.items()) {
    if (value.is_object()) text += indent + key + "\n" + text_of(value, indent + "  ");
    else text += fmt::format("{}{:<18} {}\n", indent, key, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

}  // namespace tessera::tools
