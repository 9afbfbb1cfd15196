// A CUDA driver of host memory, built as libcuda.so.1, for machines without a GPU. Device memory is the heap's, kernels
// compute nothing, launches are written down (fake_libcuda.h). It has the functions that src/cuda/driver.cc and
// tools/tessera/gpu.cc look up and no other, and refuses what the real one would refuse of them: memory that it does
// not know, a launch without a context, more shared memory than was asked for. Environment variables steer it:
//   FAKE_CUDA_VERSION    13000 if not set
//   FAKE_CUDA_INIT       what cuInit returns
//   FAKE_CUDA_COUNT      devices; 1
//   FAKE_CUDA_DEVICE     "name:sm:multiprocessors:shared bytes of a block", all devices; "NVIDIA H200:90:132:232448"
//   FAKE_CUDA_LOAD       what cuLibraryLoadData returns
//   FAKE_CUDA_KERNEL     what cuLibraryGetKernel returns
//   FAKE_CUDA_MAP        what cuTensorMapEncodeTiled returns
//   FAKE_CUDA_CAPTURING  1: every stream is being captured
#include "fake_libcuda.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace tessera::cuda {
struct CUctx_st {
  Ordinal device;
};
struct CUlib_st {
  std::string image;
};
struct CUkern_st {
  const char *entry, *image;
  std::map<Ordinal, int> shared_bytes;  // that a launch may ask for, where it was raised
};
}  // namespace tessera::cuda

namespace {

using namespace tessera::cuda;
using Address = unsigned long long;

constexpr Result out_of_memory = 2, invalid_device = 101, invalid_context = 201, not_found = 500,
                 capture_unsupported = 900;
// CUresult and others: those that it gives.
constexpr Ordinal device_cpu = -1;
constexpr const char* entries[] = {"tessera_forward", "tessera_general", "tessera_backward",
                                   "tessera_sm90_forward"};  // of kernels
constexpr int most_fakes = 64, default_shared_bytes = 48 << 10;

int variable(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}
int devices() {
  return std::min(variable("FAKE_CUDA_COUNT", 1), most_fakes);
}

struct Facts {
  std::string name;
  int sm = 0, multiprocessors = 0, shared_bytes = 0;
};
Facts facts() {
  const char* const text = std::getenv("FAKE_CUDA_DEVICE");
  std::istringstream words(text ? text : "NVIDIA H200:90:132:232448");
  Facts f;
  char colon = 0;
  std::getline(words, f.name, ':');
  words >> f.sm >> colon >> f.multiprocessors >> colon >> f.shared_bytes;
  return f;
}

struct Block {
  size_t bytes;
  Ordinal device;
};

std::mutex mutex;  // of all that follows but a thread's own
std::map<Address, Block> memory;
std::array<CUctx_st, most_fakes> primary;
std::deque<CUctx_st> other_contexts;
std::deque<CUlib_st> libraries;
std::map<Library, CUkern_st> kernels;
std::vector<FakeLaunch> launches;
std::vector<FakeMap> maps;
int loads = 0;

thread_local std::vector<Context> current;  // the last is
thread_local int capture_mode = 0;          // CU_STREAM_CAPTURE_MODE_GLOBAL

// The block that holds all of [begin, begin + bytes), or nullptr.
const Block* holder(Address begin, size_t bytes) {
  auto next = memory.upper_bound(begin);
  if (next == memory.begin()) return nullptr;
  const auto& [start, block] = *--next;
  return begin + bytes <= start + block.bytes && begin < start + block.bytes ? &block : nullptr;
}
bool held(Address begin, size_t bytes) {
  const std::lock_guard lock(mutex);
  return holder(begin, bytes) != nullptr;
}
template <class T>
T* host(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

extern "C" {

// ------------------------------------------------------------------------------------------------ driver and devices

Result cuInit(unsigned) {
  return variable("FAKE_CUDA_INIT", 0);
}
Result cuDriverGetVersion(int* version) {
  *version = variable("FAKE_CUDA_VERSION", 13000);
  return 0;
}
Result cuGetErrorString(Result result, const char** text) {
  static const std::map<Result, const char*> words = {
      {invalid_value, "invalid argument"},
      {out_of_memory, "out of memory"},
      {100, "no CUDA-capable device is detected"},
      {invalid_device, "invalid device ordinal"},
      {invalid_context, "invalid device context"},
      {218, "a PTX JIT compilation failed"},
      {not_found, "named symbol not found"},
      {capture_unsupported, "operation not permitted when stream is capturing"}};
  const auto found = words.find(result);
  *text = found == words.end() ? nullptr : found->second;
  return *text ? 0 : invalid_value;
}
Result cuDeviceGetCount(int* count) {
  *count = devices();
  return 0;
}
Result cuDeviceGetName(char* name, int length, Ordinal) {
  std::strncpy(name, facts().name.c_str(), static_cast<size_t>(length));
  name[length - 1] = 0;
  return 0;
}
Result cuDeviceGetAttribute(int* value, Attribute attribute, Ordinal device) {
  if (device < 0 || device >= devices()) return invalid_device;
  const Facts f = facts();
  switch (attribute) {
    case attribute_multiprocessors:
      *value = f.multiprocessors;
      return 0;
    case attribute_major:
      *value = f.sm / 10;
      return 0;
    case attribute_minor:
      *value = f.sm % 10;
      return 0;
    case attribute_shared_optin:
      *value = f.shared_bytes;
      return 0;
  }
  return invalid_value;
}
Result cuDeviceTotalMem_v2(size_t* bytes, Ordinal) {
  *bytes = size_t{141} << 30;
  return 0;
}

// NVRTC asks for tables that no documentation has, and takes a no.
Result cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return invalid_value;
}

// ---------------------------------------------------------------------------------------------------------- contexts

Result cuDevicePrimaryCtxRetain(Context* context, Ordinal device) {
  if (device < 0 || device >= devices()) return invalid_device;
  const std::lock_guard lock(mutex);
  *context = &primary[static_cast<size_t>(device)];
  (*context)->device = device;
  return 0;
}
Result cuCtxGetCurrent(Context* context) {
  *context = current.empty() ? nullptr : current.back();
  return 0;
}
Result cuCtxSetCurrent(Context context) {
  if (!current.empty()) current.pop_back();
  if (context) current.push_back(context);
  return 0;
}
Result cuCtxPushCurrent_v2(Context context) {
  if (!context) return invalid_context;
  current.push_back(context);
  return 0;
}
Result cuCtxPopCurrent_v2(Context* context) {
  if (current.empty()) return invalid_context;
  *context = current.back();
  current.pop_back();
  return 0;
}
Result cuCtxGetDevice(Ordinal* device) {
  if (current.empty()) return invalid_context;
  *device = current.back()->device;
  return 0;
}
Result cuCtxSynchronize() {
  return current.empty() ? invalid_context : 0;
}

// ------------------------------------------------------------------------------------------------------------ memory

Result cuMemAlloc_v2(Address* address, size_t bytes) {
  if (current.empty()) return invalid_context;
  if (bytes == 0) return invalid_value;
  void* const block = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!block) return out_of_memory;
  *address = reinterpret_cast<Address>(block);
  const std::lock_guard lock(mutex);
  memory[*address] = {bytes, current.back()->device};
  return 0;
}
Result cuMemFree_v2(Address address) {
  const std::lock_guard lock(mutex);
  if (memory.erase(address) == 0) return invalid_value;
  std::free(host<void>(address));
  return 0;
}
Result cuMemcpyHtoD_v2(Address to, const void* from, size_t bytes) {
  if (current.empty()) return invalid_context;
  if (!held(to, bytes)) return invalid_value;
  std::memcpy(host<void>(to), from, bytes);
  return 0;
}
Result cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
  if (current.empty()) return invalid_context;
  if (!held(from, bytes)) return invalid_value;
  std::memcpy(to, host<void>(from), bytes);
  return 0;
}
Result cuMemsetD8_v2(Address to, unsigned char value, size_t bytes) {
  if (current.empty()) return invalid_context;
  if (!held(to, bytes)) return invalid_value;
  std::memset(host<void>(to), value, bytes);
  return 0;
}
Result cuPointerGetAttribute(void* value, int attribute, uintptr_t address) {
  const std::lock_guard lock(mutex);
  const Block* const block = holder(address, 1);
  if (attribute != pointer_device || !block) return invalid_value;
  *static_cast<Ordinal*>(value) = block->device;
  return 0;
}

// ------------------------------------------------------------------------------------------------ streams and events

Result cuStreamIsCapturing(Stream, int* capturing) {
  *capturing = variable("FAKE_CUDA_CAPTURING", 0);
  return 0;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}
Result cuEventCreate(void** event, unsigned) {
  static char any;
  *event = &any;
  return 0;
}
Result cuEventRecord(void*, void*) {
  return current.empty() ? invalid_context : 0;
}
Result cuEventSynchronize(void*) {
  return 0;
}
Result cuEventElapsedTime(float* milliseconds, void*, void*) {
  *milliseconds = 1;
  return 0;
}

// ----------------------------------------------------------------------------------------------------------- kernels

Result cuLibraryLoadData(Library* library, const void* image, int*, void**, unsigned, int*, void**, unsigned) {
  if (const int result = variable("FAKE_CUDA_LOAD", 0)) return result;
  if (variable("FAKE_CUDA_CAPTURING", 0) && capture_mode != capture_relaxed) return capture_unsupported;
  if (!image) return invalid_value;
  const std::lock_guard lock(mutex);
  ++loads;
  constexpr size_t most_text = 200;
  const auto* const text = static_cast<const char*>(image);
  libraries.push_back({std::string(text, ::strnlen(text, most_text))});
  *library = &libraries.back();
  kernels[*library] = {};
  return 0;
}
Result cuLibraryUnload(Library library) {
  const std::lock_guard lock(mutex);
  return kernels.erase(library) ? 0 : invalid_value;
}
Result cuLibraryGetKernel(Function* function, Library library, const char* name) {
  if (const int result = variable("FAKE_CUDA_KERNEL", 0)) return result;
  const std::lock_guard lock(mutex);
  const auto found = kernels.find(library);
  if (found == kernels.end()) return invalid_value;
  const auto known = std::find_if(std::begin(entries), std::end(entries),
                                  [&](const char* entry) { return std::strcmp(entry, name) == 0; });
  if (known == std::end(entries)) return not_found;
  *function = &found->second;
  (*function)->entry = *known;
  (*function)->image = library->image.c_str();
  return 0;
}
Result cuKernelSetAttribute(Attribute attribute, int value, Function function, Ordinal device) {
  if (device < 0 || device >= devices()) return invalid_device;
  if (attribute != function_max_dynamic_shared || value > facts().shared_bytes) return invalid_value;
  const std::lock_guard lock(mutex);
  function->shared_bytes[device] = value;
  return 0;
}
Result cuTensorMapEncodeTiled(tessera::rules::TensorMap* map, int dtype, uint32_t rank, void* address,
                              const uint64_t* extents, const uint64_t* strides, const uint32_t* box,
                              const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
  if (const int result = variable("FAKE_CUDA_MAP", 0)) return result;
  const auto is = [](const auto* values, size_t count, auto&& good) {
    return std::all_of(values, values + count, good);
  };
  constexpr size_t most_rank = 4;
  if (rank != most_rank || reinterpret_cast<uintptr_t>(map) % 64 || reinterpret_cast<uintptr_t>(address) % 16 ||
      !is(extents, most_rank, [](uint64_t n) { return n > 0 && n <= uint64_t{1} << 32; }) ||
      !is(strides, most_rank - 1, [](uint64_t n) { return n > 0 && n % 16 == 0 && n < uint64_t{1} << 40; }) ||
      !is(box, most_rank, [](uint32_t n) { return n > 0 && n <= 256; }) ||
      box[0] * (dtype == map_u8 ? 1 : 2) > (swizzle == map_swizzle_64 ? 64u : 128u) ||
      !is(steps, most_rank, [](uint32_t n) { return n == 1; }))
    return invalid_value;
  FakeMap made = {.dtype = dtype,
                  .address = address,
                  .extents = {},
                  .strides = {},
                  .box = {},
                  .interleave = interleave,
                  .swizzle = swizzle,
                  .promotion = promotion,
                  .fill = fill};
  std::copy_n(extents, most_rank, made.extents);
  std::copy_n(strides, most_rank - 1, made.strides);
  std::copy_n(box, most_rank, made.box);
  const std::lock_guard lock(mutex);
  maps.push_back(made);
  *map = {};
  map->word[0] = maps.size();
  return 0;
}
Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** arguments, void** extra) {
  if (current.empty()) return invalid_context;
  const Ordinal device = current.back()->device;
  const std::lock_guard lock(mutex);
  const auto raised = function->shared_bytes.find(device);
  const int most_shared = raised == function->shared_bytes.end() ? default_shared_bytes : raised->second;
  const auto& [grid, block, shared_bytes, stream, attributes, count] = *config;
  const unsigned threads = block[0] * block[1] * block[2];
  if (grid[0] == 0 || grid[0] > 0x7FFFFFFFu || grid[1] == 0 || grid[2] == 0 || threads == 0 || threads > 1024 ||
      shared_bytes > static_cast<unsigned>(most_shared) || !arguments || extra)
    return invalid_value;
  const unsigned cluster = count == 1 && attributes[0].id == launch_cluster ? attributes[0].value[0] : 1;
  if (count > 1 || cluster == 0 || cluster > 8 || grid[0] % cluster != 0) return invalid_value;
  FakeLaunch launch = {.grid = {grid[0], grid[1], grid[2]},
                       .block = {block[0], block[1], block[2]},
                       .shared_bytes = shared_bytes,
                       .cluster = cluster,
                       .stream = stream,
                       .context = current.back(),
                       .device = device,
                       .entry = function->entry,
                       .image = function->image,
                       .params = {},
                       .general = {},
                       .sm90 = {}};
  if (function->entry == entries[0]) std::memcpy(&launch.params, arguments[0], sizeof launch.params);
  if (function->entry == entries[1]) std::memcpy(&launch.general, arguments[0], sizeof launch.general);
  if (function->entry == entries[3]) std::memcpy(&launch.sm90, arguments[0], sizeof launch.sm90);
  launches.push_back(launch);
  return 0;
}

// ------------------------------------------------------------------------------------------------------- the test's

int fake_launches() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(launches.size());
}
int fake_loads() {
  const std::lock_guard lock(mutex);
  return loads;
}
int fake_libraries() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(kernels.size());
}
void fake_launch(int n, FakeLaunch* launch) {
  const std::lock_guard lock(mutex);
  *launch = launches.at(static_cast<size_t>(n));
}
bool fake_map(const tessera::rules::TensorMap& map, FakeMap* made) {
  const std::lock_guard lock(mutex);
  if (map.word[0] == 0) return false;
  *made = maps.at(map.word[0] - 1);
  return true;
}
Context fake_context(Ordinal device) {
  const std::lock_guard lock(mutex);
  return &other_contexts.emplace_back(CUctx_st{device});
}
void fake_host_memory(const void* begin, size_t bytes) {
  const std::lock_guard lock(mutex);
  memory[reinterpret_cast<Address>(begin)] = {bytes, device_cpu};
}
}

// The library calls each of them by the type that it declared.
#define FAKE_IS_DECLARED(name) static_assert(std::is_same_v<decltype(&name), decltype(Driver::name)>);
FAKE_IS_DECLARED(cuInit)
FAKE_IS_DECLARED(cuDriverGetVersion)
FAKE_IS_DECLARED(cuGetErrorString)
FAKE_IS_DECLARED(cuDeviceGetCount)
FAKE_IS_DECLARED(cuDeviceGetName)
FAKE_IS_DECLARED(cuDeviceGetAttribute)
FAKE_IS_DECLARED(cuDeviceTotalMem_v2)
FAKE_IS_DECLARED(cuCtxGetDevice)
FAKE_IS_DECLARED(cuCtxPushCurrent_v2)
FAKE_IS_DECLARED(cuCtxPopCurrent_v2)
FAKE_IS_DECLARED(cuDevicePrimaryCtxRetain)
FAKE_IS_DECLARED(cuPointerGetAttribute)
FAKE_IS_DECLARED(cuStreamIsCapturing)
FAKE_IS_DECLARED(cuThreadExchangeStreamCaptureMode)
FAKE_IS_DECLARED(cuLibraryLoadData)
FAKE_IS_DECLARED(cuLibraryUnload)
FAKE_IS_DECLARED(cuLibraryGetKernel)
FAKE_IS_DECLARED(cuKernelSetAttribute)
FAKE_IS_DECLARED(cuLaunchKernelEx)
FAKE_IS_DECLARED(cuTensorMapEncodeTiled)
