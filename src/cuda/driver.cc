#include "cuda/driver.h"

#include <dlfcn.h>

#include "core/error.h"

namespace tessera::cuda {
namespace {

template <class F>
bool find(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(::dlsym(library, name));
  return function != nullptr;
}

Opened open() {
  // Never closed: kernels may be under way when the process ends.
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return {nullptr, "no NVIDIA driver: libcuda.so.1 cannot be opened"};
  static Driver d;
  const auto failure = [&](const char* what, Result result) {
    const char* text = nullptr;
    if (d.cuGetErrorString) d.cuGetErrorString(result, &text);
    return Opened{nullptr, fmt::format("the NVIDIA driver does not start: {} says {} ({})", what, result,
                                       text ? text : "no words for it")};
  };
  // What every driver has comes first, so that one that is too old can say which it is.
  if (!find(library, "cuInit", d.cuInit) || !find(library, "cuDriverGetVersion", d.cuDriverGetVersion))
    return {nullptr, "libcuda.so.1 lacks cuInit or cuDriverGetVersion; it is no NVIDIA driver"};
  find(library, "cuGetErrorString", d.cuGetErrorString);
  if (const Result result = d.cuInit(0)) return failure("cuInit", result);
  if (const Result result = d.cuDriverGetVersion(&d.version)) return failure("cuDriverGetVersion", result);
  if (d.version < oldest_driver)
    return {nullptr, fmt::format("the NVIDIA driver is CUDA {}; Tessera needs {} or newer. Update the driver",
                                 version_text(d.version), version_text(oldest_driver))};
  const char* missing = nullptr;
#define TESSERA_FIND(name) \
  if (!find(library, #name, d.name)) missing = #name;
  TESSERA_FIND(cuGetErrorString)
  TESSERA_FIND(cuDeviceGetCount)
  TESSERA_FIND(cuDeviceGetName)
  TESSERA_FIND(cuDeviceGetAttribute)
  TESSERA_FIND(cuDeviceTotalMem_v2)
  TESSERA_FIND(cuCtxGetDevice)
  TESSERA_FIND(cuCtxPushCurrent_v2)
  TESSERA_FIND(cuCtxPopCurrent_v2)
  TESSERA_FIND(cuDevicePrimaryCtxRetain)
  TESSERA_FIND(cuPointerGetAttribute)
  TESSERA_FIND(cuStreamIsCapturing)
  TESSERA_FIND(cuThreadExchangeStreamCaptureMode)
  TESSERA_FIND(cuLibraryLoadData)
  TESSERA_FIND(cuLibraryUnload)
  TESSERA_FIND(cuLibraryGetKernel)
  TESSERA_FIND(cuKernelSetAttribute)
  TESSERA_FIND(cuLaunchKernelEx)
  TESSERA_FIND(cuTensorMapEncodeTiled)
#undef TESSERA_FIND
  if (missing) return {nullptr, fmt::format("libcuda.so.1 of CUDA {} lacks {}", version_text(d.version), missing)};
  return {&d, ""};
}

}  // namespace

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

const Opened& open_driver() {
  static const Opened opened = open();
  return opened;
}

void require_ok(const Driver& driver, Result result, const char* what) {
  if (result == 0) return;
  const char* text = nullptr;
  driver.cuGetErrorString(result, &text);
  throw core::Error(TESSERA_FAILED, fmt::format("{}: the CUDA driver says {} ({})", what, result, text ? text : "?"));
}

}  // namespace tessera::cuda
