// An array of somebody's (NumPy, torch, anything with DLPack) as the C interface needs it: no copy, no framework at
// build.
#pragma once
#include <cstdint>

#include "python.h"

namespace tessera::python {

constexpr int most_dims = 8;

enum class Way { exchange, attributes, array_interface, capsule, masked, none };  // how an array is read

struct Tensor {
  void* data;
  int32_t dtype;              // a tessera_dtype; -1 if it has none of them
  int32_t device, device_id;  // as in DLPack: 1 is the CPU, 2 a CUDA device
  int32_t rank;
  bool read_only;
  Way way;
  int64_t shape[most_dims];
  int64_t stride[most_dims];  // elements
};

// Fills `tensor`. `ours`: an array that was just made, of which less must be asked. `keeper` receives what must live
// while the memory is used, if that is more than `object`. False with an exception, which calls the object `name`.
bool read(PyObject* object, const char* name, Tensor& tensor, Ref& keeper, bool ours = false);

// {torch.float32: TESSERA_F32, ...}, for torch before 2.10, which has no exchange interface.
PyObject* set_dtypes(PyObject*, PyObject* dict);
// (dtype, device, device id, shape, strides, read-only, alignment of the address in bytes, at most 16)
PyObject* describe(const Tensor& tensor);
int alignment(const Tensor& tensor);

}  // namespace tessera::python
