#include "gpu.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "status.h"

namespace tessera::tools {
namespace {

using Address = unsigned long long;

struct Cuda {
  int (*cuInit)(unsigned);
  int (*cuGetErrorString)(int, const char**);
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuCtxSetCurrent)(void*);
  int (*cuCtxSynchronize)();
  int (*cuMemAlloc_v2)(Address*, size_t);
  int (*cuMemFree_v2)(Address);
  int (*cuMemcpyHtoD_v2)(Address, const void*, size_t);
  int (*cuMemcpyDtoH_v2)(void*, Address, size_t);
  int (*cuMemsetD8_v2)(Address, unsigned char, size_t);
  int (*cuEventCreate)(void**, unsigned);
  int (*cuEventRecord)(void*, void*);
  int (*cuEventSynchronize)(void*);
  int (*cuEventElapsedTime)(float*, void*, void*);
};

const Cuda& cuda() {
  static const Cuda functions = [] {
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) throw failed("no NVIDIA driver: libcuda.so.1 cannot be opened");
    Cuda c{};
    const auto find = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
      if (!function) throw failed("libcuda.so.1 lacks {}", name);
    };
#define TESSERA_FIND(name) find(#name, c.name);
    TESSERA_FIND(cuInit)
    TESSERA_FIND(cuGetErrorString)
    TESSERA_FIND(cuDevicePrimaryCtxRetain)
    TESSERA_FIND(cuCtxSetCurrent)
    TESSERA_FIND(cuCtxSynchronize)
    TESSERA_FIND(cuMemAlloc_v2)
    TESSERA_FIND(cuMemFree_v2)
    TESSERA_FIND(cuMemcpyHtoD_v2)
    TESSERA_FIND(cuMemcpyDtoH_v2)
    TESSERA_FIND(cuMemsetD8_v2)
    TESSERA_FIND(cuEventCreate)
    TESSERA_FIND(cuEventRecord)
    TESSERA_FIND(cuEventSynchronize)
    TESSERA_FIND(cuEventElapsedTime)
#undef TESSERA_FIND
    return c;
  }();
  return functions;
}

void need(int result, const char* what) {
  if (result == 0) return;
  const char* text = nullptr;
  cuda().cuGetErrorString(result, &text);
  throw failed("{}: the CUDA driver says {} ({})", what, result, text ? text : "?");
}

constexpr size_t guard_bytes = 256;
constexpr unsigned char guard_byte = 0xA5;

// Bytes before an operand: its guard, and what leaves its address at an odd multiple of the promised alignment, or of
// its own element.
size_t offset_in(const Case& c, int name) {
  const int64_t promised = c.problem().alignment > 0 ? c.problem().alignment : 16;
  return guard_bytes + std::max(static_cast<size_t>(promised), tessera_dtype_bytes(c.operand(name).dtype));
}

}  // namespace

Address GpuCase::allocate(size_t bytes) {
  Address memory = 0;
  need(cuda().cuMemAlloc_v2(&memory, bytes), "allocating GPU memory");
  memory_.push_back(memory);
  return memory;
}

GpuCase::GpuCase(const Case& c, const tessera_problem& problem, const std::string& device)
    : case_(c), problem_(problem), bindings_(c.bindings()) {
  const int ordinal = device == "cuda" ? 0 : std::atoi(device.c_str() + std::strlen("cuda:"));
  void* context = nullptr;
  need(cuda().cuInit(0), "starting the driver");
  need(cuda().cuDevicePrimaryCtxRetain(&context, ordinal), "taking the device's primary context");
  need(cuda().cuCtxSetCurrent(context), "making a context current");
  for (void*& event : events_) need(cuda().cuEventCreate(&event, 0), "making an event");
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    const auto n = static_cast<size_t>(name);
    if (!c.has(name)) continue;
    const Address memory = allocate(offset_in(c, name) + c.span(name) + guard_bytes);
    bindings_.data[n] = reinterpret_cast<void*>(memory + offset_in(c, name));
  }
  if (c.problem().cache.v_in_k) bindings_.data[TESSERA_V] = bindings_.data[TESSERA_K];
  upload();
}

GpuCase::~GpuCase() {
  for (const Address memory : memory_) cuda().cuMemFree_v2(memory);
}

void GpuCase::upload() {
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    if (!case_.has(name)) continue;
    const auto at = reinterpret_cast<Address>(bindings_.data[name]);
    const size_t bytes = case_.span(name);
    need(cuda().cuMemsetD8_v2(at - offset_in(case_, name), guard_byte, offset_in(case_, name)), "filling a guard");
    need(cuda().cuMemsetD8_v2(at + bytes, guard_byte, guard_bytes), "filling a guard");
    if (bytes > 0) need(cuda().cuMemcpyHtoD_v2(at, case_.bindings().data[name], bytes), "copying to the GPU");
  }
}

void GpuCase::wait() {
  need(cuda().cuCtxSynchronize(), "waiting for the GPU");
}

void GpuCase::download() {
  wait();
  std::vector<int> names = outputs(problem_);
  for (const int name : updates(problem_)) names.push_back(name);
  if (case_.has(TESSERA_STATUS)) names.push_back(TESSERA_STATUS);
  for (const int name : names) {
    const auto at = reinterpret_cast<Address>(bindings_.data[name]);
    const size_t bytes = case_.span(name);
    if (bytes > 0) need(cuda().cuMemcpyDtoH_v2(case_.bindings().data[name], at, bytes), "copying from the GPU");
  }
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    if (!case_.has(name)) continue;
    const auto at = reinterpret_cast<Address>(bindings_.data[name]);
    std::vector<unsigned char> guard(offset_in(case_, name) + guard_bytes);
    need(cuda().cuMemcpyDtoH_v2(guard.data(), at - offset_in(case_, name), offset_in(case_, name)), "reading a guard");
    need(cuda().cuMemcpyDtoH_v2(guard.data() + offset_in(case_, name), at + case_.span(name), guard_bytes),
         "reading a guard");
    for (const unsigned char byte : guard)
      if (byte != guard_byte)
        throw Error(TESSERA_WRONG, fmt::format("bytes before or after {} were written", tessera_name_text(name)));
  }
}

std::byte* GpuCase::workspace(int64_t bytes) {
  if (bytes == 0) return nullptr;
  const Address memory = allocate(static_cast<size_t>(bytes));
  need(cuda().cuMemsetD8_v2(memory, 0xFF, static_cast<size_t>(bytes)), "filling the workspace");
  return reinterpret_cast<std::byte*>(memory);
}

void GpuCase::mark(size_t event) {
  need(cuda().cuEventRecord(events_[event], nullptr), "recording an event");
}

double GpuCase::between() {
  float milliseconds = 0;
  need(cuda().cuEventSynchronize(events_[1]), "waiting for an event");
  need(cuda().cuEventElapsedTime(&milliseconds, events_[0], events_[1]), "reading events");
  return milliseconds * 1e-3;
}

}  // namespace tessera::tools
