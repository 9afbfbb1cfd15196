// The driver's functions and numbers as the library declares them, beside NVIDIA's own header where there is one.
#include <gtest/gtest.h>

#include <type_traits>

#include "cuda/driver.h"
#include "rules/params.h"
#if __has_include(<cuda.h>)
#include <cuda.h>

namespace tessera::cuda {
namespace {

// Types are not the same, since the header's are not included there; what a call passes must be: as many values, each
// as large and of one kind.
template <class Ours, class Theirs>
constexpr bool alike() {
  constexpr bool numbers =
      (std::is_integral_v<Ours> || std::is_enum_v<Ours>)&&(std::is_integral_v<Theirs> || std::is_enum_v<Theirs>);
  constexpr bool pointers = std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  return sizeof(Ours) == sizeof(Theirs) && (numbers || pointers);
}
template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class R, class... A, class S, class... B>
struct Alike<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B)) return false;
    else return alike<R, S>() && (alike<A, B>() && ...);
  }();
};

#define EXPECT_ALIKE(name) \
  EXPECT_TRUE((Alike<decltype(Driver::name), decltype(&::name)>::value)) << #name " is declared otherwise in cuda.h"

TEST(CudaHeader, FunctionsTakeWhatTheyTakeThere) {
  EXPECT_ALIKE(cuInit);
  EXPECT_ALIKE(cuDriverGetVersion);
  EXPECT_ALIKE(cuGetErrorString);
  EXPECT_ALIKE(cuDeviceGetCount);
  EXPECT_ALIKE(cuDeviceGetName);
  EXPECT_ALIKE(cuDeviceGetAttribute);
  EXPECT_ALIKE(cuDeviceTotalMem_v2);
  EXPECT_ALIKE(cuCtxGetDevice);
  EXPECT_ALIKE(cuCtxPushCurrent_v2);
  EXPECT_ALIKE(cuCtxPopCurrent_v2);
  EXPECT_ALIKE(cuDevicePrimaryCtxRetain);
  EXPECT_ALIKE(cuPointerGetAttribute);
  EXPECT_ALIKE(cuStreamIsCapturing);
  EXPECT_ALIKE(cuThreadExchangeStreamCaptureMode);
  EXPECT_ALIKE(cuLibraryLoadData);
  EXPECT_ALIKE(cuLibraryUnload);
  EXPECT_ALIKE(cuLibraryGetKernel);
  EXPECT_ALIKE(cuKernelSetAttribute);
  EXPECT_ALIKE(cuLaunchKernelEx);
  EXPECT_ALIKE(cuTensorMapEncodeTiled);
  // Each field of Driver is one pointer: with a new one the list above needs another line.
  EXPECT_EQ(sizeof(Driver), sizeof(void*) * (1 + 20)) << "a function of Driver is not compared";
}

TEST(CudaHeader, TheComparisonFindsWhatDiffers) {
  EXPECT_FALSE((Alike<int (*)(int), int (*)(int, int)>::value));
  EXPECT_FALSE((Alike<int (*)(int, long long), int (*)(int, int)>::value));
  EXPECT_FALSE((Alike<int (*)(void*), int (*)(unsigned long long)>::value));
  EXPECT_FALSE((Alike<long long (*)(int), int (*)(int)>::value));
  EXPECT_TRUE((Alike<int (*)(char*, unsigned), CUresult (*)(void*, int)>::value));
}

TEST(CudaHeader, ATensorMapIsAsLargeAsThere) {
  EXPECT_EQ(sizeof(rules::TensorMap), sizeof(CUtensorMap));
  EXPECT_EQ(alignof(rules::TensorMap), 64u);  // cuTensorMapEncodeTiled asks for it
}

TEST(CudaHeader, ALaunchIsDescribedAsThere) {
  EXPECT_EQ(sizeof(LaunchConfig), sizeof(CUlaunchConfig));
  EXPECT_EQ(offsetof(LaunchConfig, block), offsetof(CUlaunchConfig, blockDimX));
  EXPECT_EQ(offsetof(LaunchConfig, shared_bytes), offsetof(CUlaunchConfig, sharedMemBytes));
  EXPECT_EQ(offsetof(LaunchConfig, stream), offsetof(CUlaunchConfig, hStream));
  EXPECT_EQ(offsetof(LaunchConfig, attributes), offsetof(CUlaunchConfig, attrs));
  EXPECT_EQ(offsetof(LaunchConfig, count), offsetof(CUlaunchConfig, numAttrs));
  EXPECT_EQ(sizeof(LaunchAttribute), sizeof(CUlaunchAttribute));
  EXPECT_EQ(offsetof(LaunchAttribute, value), offsetof(CUlaunchAttribute, value));
}

TEST(CudaHeader, NumbersAreTheEnumerators) {
  EXPECT_EQ(invalid_value, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(attribute_multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  EXPECT_EQ(attribute_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  EXPECT_EQ(attribute_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  EXPECT_EQ(attribute_shared_optin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  EXPECT_EQ(function_max_dynamic_shared, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
  EXPECT_EQ(capture_relaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
  EXPECT_EQ(pointer_device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
  EXPECT_EQ(launch_cluster, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
  EXPECT_EQ(map_f16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
  EXPECT_EQ(map_bf16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
  EXPECT_EQ(map_u8, CU_TENSOR_MAP_DATA_TYPE_UINT8);
  EXPECT_EQ(map_no_interleave, CU_TENSOR_MAP_INTERLEAVE_NONE);
  EXPECT_EQ(map_swizzle_64, CU_TENSOR_MAP_SWIZZLE_64B);
  EXPECT_EQ(map_swizzle_128, CU_TENSOR_MAP_SWIZZLE_128B);
  EXPECT_EQ(map_promote_256, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  EXPECT_EQ(map_fill_zeros, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace
}  // namespace tessera::cuda
#else
TEST(CudaHeader, IsNotHere) {
  GTEST_SKIP() << "no cuda.h; -DTESSERA_CUDA_INCLUDE=FOLDER names its folder";
}
#endif
