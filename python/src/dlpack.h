// The part of DLPack's binary interface (version 1.3) that is read here:
// https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once
#include <cstdint>

namespace tessera::python::dlpack {

struct Version {
  uint32_t major, minor;
};
enum DeviceType : int32_t { cpu = 1, cuda = 2, cuda_host = 3, cuda_managed = 13 };
struct Device {
  int32_t type, id;
};
enum Code : uint8_t { integer = 0, real = 2, bfloat = 4, boolean = 6, e4m3fn = 10 };
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t rank;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // elements; NULL: dense
  uint64_t byte_offset;
};
struct Managed {  // in a capsule "dltensor"
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};
struct ManagedVersioned {  // in a capsule "dltensor_versioned"
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;  // bit 0: read-only
  Tensor tensor;
};
constexpr uint64_t read_only = 1;

// What a type's __dlpack_c_exchange_api__ points to (a capsule "dlpack_exchange_api"): reading without a capsule each.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(Tensor*, ManagedVersioned**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void*, ManagedVersioned**);
  int (*managed_to_object)(ManagedVersioned*, void**);
  int (*tensor_from_object)(void*, Tensor*);  // borrowed; 0, or -1 with a Python exception
  int (*current_stream)(int32_t, int32_t, void**);
};

}  // namespace tessera::python::dlpack
