// libcuda, opened at run time. The only file that knows its symbols; types are declared here, so that a machine without
// CUDA's headers builds the same library (tests/cuda/header_test.cc compares them with cuda.h where there is one).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera::rules {
struct TensorMap;
}

namespace tessera::cuda {

using Result = int;  // CUresult
using Ordinal = int;
using Context = struct CUctx_st*;
using Stream = struct CUstream_st*;
using Library = struct CUlib_st*;
using Function = struct CUkern_st*;  // a CUkernel, which cuLaunchKernelEx takes for any context
using Attribute = int;

// CUresult, CUdevice_attribute, CUfunction_attribute, CUstreamCaptureStatus, CUtensorMap*: those that are used.
inline constexpr Result invalid_value = 1;
inline constexpr Attribute attribute_multiprocessors = 16, attribute_major = 75, attribute_minor = 76,
                           attribute_shared_optin = 97;
inline constexpr Attribute function_max_dynamic_shared = 8;
inline constexpr int capture_relaxed = 2;  // CUstreamCaptureMode
inline constexpr int pointer_device = 9;   // CUpointer_attribute
inline constexpr int launch_cluster = 4;   // CUlaunchAttributeID
inline constexpr int map_f16 = 6, map_bf16 = 9, map_u8 = 0, map_no_interleave = 0, map_swizzle_64 = 2,
                     map_swizzle_128 = 3, map_promote_256 = 3, map_fill_zeros = 0;

struct alignas(8) LaunchAttribute {  // CUlaunchAttribute
  int id;
  int pad = 0;
  uint32_t value[16] = {};  // a cluster's x, y, z
};
struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned count;
};

struct Driver {
  int version = 0;  // 13000 for CUDA 13.0

  Result (*cuInit)(unsigned) = nullptr;
  Result (*cuDriverGetVersion)(int*) = nullptr;
  Result (*cuGetErrorString)(Result, const char**) = nullptr;
  Result (*cuDeviceGetCount)(int*) = nullptr;
  Result (*cuDeviceGetName)(char*, int, Ordinal) = nullptr;
  Result (*cuDeviceGetAttribute)(int*, Attribute, Ordinal) = nullptr;
  Result (*cuDeviceTotalMem_v2)(size_t*, Ordinal) = nullptr;
  Result (*cuCtxGetDevice)(Ordinal*) = nullptr;
  Result (*cuCtxPushCurrent_v2)(Context) = nullptr;
  Result (*cuCtxPopCurrent_v2)(Context*) = nullptr;
  Result (*cuDevicePrimaryCtxRetain)(Context*, Ordinal) = nullptr;
  Result (*cuPointerGetAttribute)(void*, int, uintptr_t) = nullptr;
  Result (*cuStreamIsCapturing)(Stream, int*) = nullptr;
  Result (*cuThreadExchangeStreamCaptureMode)(int*) = nullptr;
  Result (*cuLibraryLoadData)(Library*, const void*, int*, void**, unsigned, int*, void**, unsigned) = nullptr;
  Result (*cuLibraryUnload)(Library) = nullptr;
  Result (*cuLibraryGetKernel)(Function*, Library, const char*) = nullptr;
  Result (*cuKernelSetAttribute)(Attribute, int, Function, Ordinal) = nullptr;
  Result (*cuLaunchKernelEx)(const LaunchConfig*, Function, void**, void**) = nullptr;
  // dtype, rank, address, extents, strides in bytes (of all dimensions but the first), box, steps in the box,
  // interleave, swizzle, promotion, fill
  Result (*cuTensorMapEncodeTiled)(rules::TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                                   const uint32_t*, const uint32_t*, int, int, int, int) = nullptr;
};

// The oldest driver whose functions these are (cuLibrary*, launches of a CUkernel and cuTensorMap* came with 12.0), and
// the text of a version: 13000 is "13.0".
inline constexpr int oldest_driver = 12000;
std::string version_text(int version);

// The driver, or why there is none in one sentence. Asked for once; safe from many threads.
struct Opened {
  const Driver* driver;  // nullptr: none
  std::string why;
};
const Opened& open_driver();

// Throws Error(TESSERA_FAILED): what was tried, the driver's words.
void require_ok(const Driver& driver, Result result, const char* what);

}  // namespace tessera::cuda
