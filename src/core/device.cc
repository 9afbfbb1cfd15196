#include "core/device.h"

#include <sched.h>
#include <unistd.h>

#include <cctype>
#include <cstring>
#include <string_view>

#include "core/error.h"

namespace tessera::core {
namespace {

struct GpuRow {
  const char* name;
  int sm_arch, sms, shared_kib, memory_gib;
  double tflops_16, tflops_32, tbytes_per_second;
};
// Dense tensor-core rates without sparsity, from the makers' data sheets; opt-in shared memory of a block from the CUDA
// programming guide's table of technical specifications.
constexpr GpuRow gpus[] = {
    {"t4", 75, 40, 64, 16, 65, 8.1, 0.32},         {"a100", 80, 108, 163, 80, 312, 19.5, 2.04},
    {"a10", 86, 72, 99, 24, 125, 31.2, 0.60},      {"l4", 89, 58, 99, 24, 121, 30.3, 0.30},
    {"rtx4090", 89, 128, 99, 24, 165, 82.6, 1.01}, {"h100", 90, 132, 227, 80, 989, 67, 3.35},
    {"h200", 90, 132, 227, 141, 989, 67, 4.8},     {"b200", 100, 148, 227, 180, 2250, 80, 8.0},
    {"b300", 103, 148, 227, 288, 2250, 80, 8.0},   {"rtx5090", 120, 170, 99, 32, 209, 104.8, 1.79},
    {"gb10", 121, 48, 99, 128, 125, 31, 0.27},
};

struct CpuRow {
  const char* name;
  int isa;
};
constexpr CpuRow cpus[] = {{"baseline", TESSERA_ISA_BASELINE},
                           {"avx2", TESSERA_ISA_AVX2},
                           {"avx512", TESSERA_ISA_AVX512},
                           {"avx512bf16", TESSERA_ISA_AVX512BF16}};

Device empty(const char* name, int kind) {
  Device d = {};
  d.size = sizeof d;
  d.kind = kind;
  std::strncpy(d.name, name, sizeof d.name - 1);
  return d;
}

void set_rates(Device& d, const GpuRow& row) {
  d.flops_16 = row.tflops_16 * 1e12;
  d.flops_32 = row.tflops_32 * 1e12;
  d.bytes_per_second = row.tbytes_per_second * 1e12;
}

int host_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return TESSERA_ISA_AVX512BF16;
  if (avx512) return TESSERA_ISA_AVX512;
  if (avx2) return TESSERA_ISA_AVX2;
#endif
  return TESSERA_ISA_BASELINE;
}

Device host() {
  Device d = empty("host", TESSERA_CPU);
  d.isa = host_isa();
  cpu_set_t allowed;
  d.threads = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  d.memory = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return d;
}

}  // namespace

const char* isa_text(int isa) {
  return cpus[isa].name;
}

const char* known_device(int index) {
  constexpr int n_cpus = sizeof cpus / sizeof *cpus, n_gpus = sizeof gpus / sizeof *gpus;
  if (index == 0) return "host";
  if (index <= n_cpus) return index > 0 ? cpus[index - 1].name : nullptr;
  return index <= n_cpus + n_gpus ? gpus[index - 1 - n_cpus].name : nullptr;
}

// "NVIDIA GeForce RTX 4090" is the rtx4090 and "NVIDIA A100-SXM4-80GB" the a100; an L40 is not the l4 nor a GH200 the
// h200, and what has fewer multiprocessors is another chip.
void fill_rates(Device& device) {
  std::string words = " ";
  for (const char c : std::string_view(device.name))
    words += c == '-' ? ' ' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  words += ' ';
  if (const size_t at = words.find("rtx "); at != std::string::npos) words.erase(at + 3, 1);
  for (const GpuRow& row : gpus) {
    const bool named = words.find(fmt::format(" {} ", row.name)) != std::string::npos;
    if (named && row.sm_arch == device.sm_arch && row.sms == device.sms) set_rates(device, row);
  }
}

Device find_device(const std::string& name) {
  if (name == "host") return host();
  for (const CpuRow& row : cpus) {
    if (name != row.name) continue;
    Device d = empty(row.name, TESSERA_CPU);
    d.isa = row.isa;
    d.threads = 1;
    return d;
  }
  for (const GpuRow& row : gpus) {
    if (name != row.name) continue;
    Device d = empty(row.name, TESSERA_GPU);
    d.sm_arch = row.sm_arch;
    d.sms = row.sms;
    d.shared_per_block = int64_t{row.shared_kib} << 10;
    d.memory = int64_t{row.memory_gib} << 30;
    set_rates(d, row);
    return d;
  }
  std::string known;
  for (int i = 0; known_device(i); ++i) known += (i ? ", " : "") + std::string(known_device(i));
  invalid("device is \"{}\"; it must be one of {}.", name, known);
}

}  // namespace tessera::core
