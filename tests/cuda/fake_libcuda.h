// What tests ask of the fake driver (fake_libcuda.cc) beside what every driver has.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda/driver.h"
#include "rules/params.h"

struct FakeMap {  // as cuTensorMapEncodeTiled was told
  int dtype;
  void* address;
  uint64_t extents[4], strides[3];  // in bytes, of all dimensions but the first
  uint32_t box[4];
  int interleave, swizzle, promotion, fill;
};
struct FakeLaunch {
  unsigned grid[3], block[3], shared_bytes, cluster;
  tessera::cuda::Stream stream;
  tessera::cuda::Context context;          // that was current
  tessera::cuda::Ordinal device;           // of the context
  const char *entry, *image;               // the kernel's name, and what was loaded: its text up to a 0
  tessera::rules::ForwardParams params;    // of "tessera_forward"
  tessera::rules::GeneralParams general;   // of "tessera_general"
  tessera::rules::Sm90ForwardParams sm90;  // of "tessera_sm90_forward"
};

extern "C" {
int fake_launches();                          // since the process began
int fake_loads();                             // calls of cuLibraryLoadData that went right
int fake_libraries();                         // loaded and not unloaded
void fake_launch(int n, FakeLaunch* launch);  // the n-th since the process began
// What a map was made of; false: it is all zeros.
bool fake_map(const tessera::rules::TensorMap& map, FakeMap* made);
// A context of the device that is not its primary one, as a program makes that knows no CUDA runtime.
tessera::cuda::Context fake_context(tessera::cuda::Ordinal device);
// Memory that the driver knows and no GPU holds: its device is CU_DEVICE_CPU.
void fake_host_memory(const void* begin, size_t bytes);

// Of the driver's own, those that tests call to make memory and contexts.
tessera::cuda::Result cuMemAlloc_v2(unsigned long long* address, size_t bytes);
tessera::cuda::Result cuMemFree_v2(unsigned long long address);
tessera::cuda::Result cuCtxGetCurrent(tessera::cuda::Context* context);
tessera::cuda::Result cuCtxSetCurrent(tessera::cuda::Context context);
tessera::cuda::Result cuDevicePrimaryCtxRetain(tessera::cuda::Context* context, tessera::cuda::Ordinal device);
tessera::cuda::Result cuThreadExchangeStreamCaptureMode(int* mode);
}
