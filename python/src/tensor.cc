#include "tensor.h"

#include <cstring>
#include <string>
#include <vector>

#include "dlpack.h"

namespace tessera::python {
namespace {

struct Reader {
  PyTypeObject* type;  // a reference is kept: an address must not be used twice
  Way way;
  bool lazy_negation;  // torch: has is_neg()
  const dlpack::ExchangeApi* api;
};

PyObject* dtypes = nullptr;  // of torch

PyObject* interned(const char* text) {
  return PyUnicode_InternFromString(text);
}

bool has(PyObject* object, const char* name) {
  return PyObject_HasAttrString(object, name);
}

Reader make_reader(PyTypeObject* type) {
  PyObject* object = reinterpret_cast<PyObject*>(type);
  Reader reader{type, Way::none, has(object, "is_neg"), nullptr};
  if (has(object, "__dlpack_c_exchange_api__")) {
    const Ref capsule(PyObject_GetAttrString(object, "__dlpack_c_exchange_api__"));
    const void* api = capsule ? PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api") : nullptr;
    reader.api = static_cast<const dlpack::ExchangeApi*>(api);
    PyErr_Clear();
  }
  if (has(object, "mask") && has(object, "filled")) reader.way = Way::masked;
  else if (reader.api && reader.api->version.major == 1 && reader.api->tensor_from_object) reader.way = Way::exchange;
  else if (has(object, "data_ptr") && has(object, "stride")) reader.way = Way::attributes;
  else if (has(object, "__array_interface__")) reader.way = Way::array_interface;
  else if (has(object, "__dlpack__")) reader.way = Way::capsule;
  return reader;
}

Reader reader_of(PyTypeObject* type) {
  static std::vector<Reader> readers;
  for (const Reader& r : readers)
    if (r.type == type) return r;
  Py_INCREF(type);
  readers.push_back(make_reader(type));
  return readers.back();
}

bool refuse(PyObject* kind, const char* name, const char* what) {
  PyErr_Format(kind, "%s %s", name, what);
  return false;
}

// Whatever torch itself said of it.
bool refuse_without_memory(const char* name) {
  PyErr_Clear();
  return refuse(
      PyExc_NotImplementedError, name,
      "has no plain memory: it is sparse, on the meta device, or batched by vmap. Pass a dense tensor with data.");
}

bool set_rank(Tensor& t, int64_t rank, const char* name) {
  if (rank < 0 || rank > most_dims) {
    PyErr_Format(PyExc_ValueError, "%s has %lld dimensions; none has more than 4.", name, static_cast<long long>(rank));
    return false;
  }
  t.rank = static_cast<int32_t>(rank);
  return true;
}

void set_dense(Tensor& t) {
  int64_t step = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    t.stride[d] = step;
    step *= t.shape[d];
  }
}

// ------------------------------------------------------------------------------------------------------- DLPack

int32_t dtype_of(dlpack::DataType d) {
  if (d.lanes != 1) return -1;
  if (d.code == dlpack::real && d.bits == 64) return TESSERA_F64;
  if (d.code == dlpack::real && d.bits == 32) return TESSERA_F32;
  if (d.code == dlpack::real && d.bits == 16) return TESSERA_F16;
  if (d.code == dlpack::bfloat && d.bits == 16) return TESSERA_BF16;
  if (d.code == dlpack::integer && d.bits == 32) return TESSERA_I32;
  if (d.code == dlpack::boolean && d.bits == 8) return TESSERA_BOOL;
  if (d.code == dlpack::e4m3fn && d.bits == 8) return TESSERA_E4M3;
  return -1;
}

bool from_dlpack(const dlpack::Tensor& d, const char* name, Tensor& t) {
  if (!set_rank(t, d.rank, name)) return false;
  t.data = static_cast<char*>(d.data) + d.byte_offset;
  t.dtype = dtype_of(d.dtype);
  const bool host = d.device.type == dlpack::cuda_host || d.device.type == dlpack::cuda_managed;
  t.device = host ? static_cast<int32_t>(dlpack::cpu) : d.device.type;
  t.device_id = t.device == dlpack::cpu ? 0 : d.device.id;
  const size_t bytes = sizeof(int64_t) * static_cast<size_t>(t.rank);
  if (bytes > 0) std::memcpy(t.shape, d.shape, bytes);
  if (d.strides && bytes > 0) std::memcpy(t.stride, d.strides, bytes);
  else set_dense(t);
  return true;
}

bool read_exchange(const Reader& reader, PyObject* object, const char* name, Tensor& t) {
  dlpack::Tensor d;
  if (reader.api->tensor_from_object(object, &d) == 0) return from_dlpack(d, name, t);
  return refuse_without_memory(name);
}

// The capsule keeps the memory; nobody takes it over, so its own end gives it back.
bool read_capsule(PyObject* object, const char* name, Tensor& t, Ref& keeper) {
  keeper = Ref(PyObject_CallMethod(object, "__dlpack__", nullptr));
  if (!keeper) return false;
  if (PyCapsule_IsValid(keeper.get(), "dltensor_versioned")) {
    const auto* m = static_cast<dlpack::ManagedVersioned*>(PyCapsule_GetPointer(keeper.get(), "dltensor_versioned"));
    t.read_only = m->flags & dlpack::read_only;
    return from_dlpack(m->tensor, name, t);
  }
  if (!PyCapsule_IsValid(keeper.get(), "dltensor"))
    return refuse(PyExc_TypeError, name, "gave no fresh capsule from __dlpack__.");
  const auto* m = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(keeper.get(), "dltensor"));
  return from_dlpack(m->tensor, name, t);
}

// --------------------------------------------------------------------------------------------- torch before 2.10

// As many as there are dimensions.
bool integers(PyObject* sequence, int rank, const char* name, int64_t* values) {
  if (!PyTuple_Check(sequence) || PyTuple_Size(sequence) != rank)
    return refuse(PyExc_TypeError, name, "has a shape and strides that are no tuples of one length.");
  for (Py_ssize_t i = 0; i < rank; ++i) values[i] = PyLong_AsLongLong(PyTuple_GetItem(sequence, i));
  return !PyErr_Occurred();
}

bool read_attributes(PyObject* object, const char* name, Tensor& t) {
  static PyObject *const s_dtype = interned("dtype"), *const s_shape = interned("shape"),
                         *const s_stride = interned("stride"), *const s_data_ptr = interned("data_ptr"),
                         *const s_is_cpu = interned("is_cpu"), *const s_device = interned("device");
  const Ref dtype(PyObject_GetAttr(object, s_dtype)), shape(PyObject_GetAttr(object, s_shape));
  const Ref stride(PyObject_CallMethodObjArgs(object, s_stride, nullptr));
  const Ref pointer(PyObject_CallMethodObjArgs(object, s_data_ptr, nullptr));
  const Ref is_cpu(PyObject_GetAttr(object, s_is_cpu));
  if (!dtype || !shape || !stride || !pointer || !is_cpu || !PyTuple_Check(shape.get()) || !PyTuple_Check(stride.get()))
    return refuse_without_memory(name);
  PyObject* known = dtypes ? PyDict_GetItem(dtypes, dtype.get()) : nullptr;
  t.dtype = known ? static_cast<int32_t>(PyLong_AsLong(known)) : -1;
  t.data = PyLong_AsVoidPtr(pointer.get());
  t.device = dlpack::cpu;
  if (is_cpu.get() != Py_True) {
    const Ref device(PyObject_GetAttr(object, s_device));
    const Ref kind(device ? PyObject_GetAttrString(device.get(), "type") : nullptr);
    const Ref index(device ? PyObject_GetAttrString(device.get(), "index") : nullptr);
    if (!kind || !index) return false;
    if (PyUnicode_CompareWithASCIIString(kind.get(), "cuda") != 0) return refuse_without_memory(name);
    t.device = dlpack::cuda;
    t.device_id = index.get() == Py_None ? 0 : static_cast<int32_t>(PyLong_AsLong(index.get()));
  }
  return set_rank(t, PyTuple_Size(shape.get()), name) && integers(shape.get(), t.rank, name, t.shape) &&
         integers(stride.get(), t.rank, name, t.stride);
}

// -------------------------------------------------------------------------------------------------------- NumPy

int32_t numpy_dtype(PyObject* object, PyObject* typestr, int64_t& bytes) {
  const Ref ascii(PyUnicode_AsASCIIString(typestr));
  const char* text = ascii ? PyBytes_AsString(ascii.get()) : nullptr;
  if (!text || std::strlen(text) < 3) return -1;
  bytes = std::strtoll(text + 2, nullptr, 10);
  const std::string type(text + 1);
  if (text[0] == '>') return -1;  // the other byte order
  if (type == "f8") return TESSERA_F64;
  if (type == "f4") return TESSERA_F32;
  if (type == "f2") return TESSERA_F16;
  if (type == "i4") return TESSERA_I32;
  if (type == "b1") return TESSERA_BOOL;
  if (type != "V2" && type != "V1" && type != "f1") return -1;
  const Ref dtype(PyObject_GetAttrString(object, "dtype"));  // those of ml_dtypes have names only
  const Ref name(dtype ? PyObject_GetAttrString(dtype.get(), "name") : nullptr);
  if (!name) return -1;
  if (bytes == 2 && PyUnicode_CompareWithASCIIString(name.get(), "bfloat16") == 0) return TESSERA_BF16;
  if (bytes == 1 && PyUnicode_CompareWithASCIIString(name.get(), "float8_e4m3fn") == 0) return TESSERA_E4M3;
  return -1;
}

bool read_array_interface(PyObject* object, const char* name, Tensor& t, Ref& keeper) {
  keeper = Ref(PyObject_GetAttrString(object, "__array_interface__"));
  if (!keeper) return false;
  PyObject* shape = PyDict_GetItemString(keeper.get(), "shape");
  PyObject* typestr = PyDict_GetItemString(keeper.get(), "typestr");
  PyObject* data = PyDict_GetItemString(keeper.get(), "data");
  PyObject* strides = PyDict_GetItemString(keeper.get(), "strides");
  if (PyObject* mask = PyDict_GetItemString(keeper.get(), "mask"); mask && mask != Py_None)
    return refuse(PyExc_ValueError, name, "has a mask in its __array_interface__, which would be lost.");
  if (!shape || !typestr || !data || !PyTuple_Check(shape) || !PyTuple_Check(data) || PyTuple_Size(data) != 2 ||
      !PyLong_Check(PyTuple_GetItem(data, 0)) || !PyUnicode_Check(typestr))
    return refuse(PyExc_TypeError, name, "has an __array_interface__ without shape, typestr or data.");
  int64_t bytes = 1;
  t.dtype = numpy_dtype(object, typestr, bytes);
  if (PyErr_Occurred()) return false;
  t.device = dlpack::cpu;
  t.data = PyLong_AsVoidPtr(PyTuple_GetItem(data, 0));
  t.read_only = PyTuple_GetItem(data, 1) == Py_True;
  if (!set_rank(t, PyTuple_Size(shape), name) || !integers(shape, t.rank, name, t.shape)) return false;
  if (!strides || strides == Py_None) {
    set_dense(t);
    return true;
  }
  if (!integers(strides, t.rank, name, t.stride)) return false;
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] > 1 && bytes > 0 && t.stride[d] % bytes != 0)
      return refuse(PyExc_ValueError, name,
                    "lies in fields of a structured array, at steps that are no multiple of its element. Pass "
                    "numpy.ascontiguousarray of it.");
    t.stride[d] = bytes > 0 ? t.stride[d] / bytes : 0;
  }
  return true;
}

bool negated(PyObject* object) {
  static PyObject* const s_is_neg = interned("is_neg");
  const Ref answer(PyObject_CallMethodObjArgs(object, s_is_neg, nullptr));
  return answer.get() == Py_True;
}

}  // namespace

PyObject* set_dtypes(PyObject*, PyObject* dict) {
  if (!PyDict_Check(dict)) return PyErr_Format(PyExc_TypeError, "a dict is needed");
  Py_INCREF(dict);
  Py_XDECREF(std::exchange(dtypes, dict));
  Py_RETURN_NONE;
}

bool read(PyObject* object, const char* name, Tensor& t, Ref& keeper, bool ours) {
  const Reader reader = reader_of(Py_TYPE(object));
  t.read_only = false;
  t.device_id = 0;
  t.way = reader.way;
  switch (reader.way) {
    case Way::exchange:
      if (!read_exchange(reader, object, name, t)) return false;
      break;
    case Way::attributes:
      if (!read_attributes(object, name, t)) return false;
      break;
    case Way::array_interface:
      return read_array_interface(object, name, t, keeper);
    case Way::capsule:
      return read_capsule(object, name, t, keeper);
    case Way::masked:
      return refuse(PyExc_ValueError, name,
                    "is a masked array, whose mask would be lost. Pass .data of it, and a "
                    "tessera.Mask for keys.");
    case Way::none: {
      const Ref type(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
      PyErr_Format(PyExc_TypeError,
                   "%s is of type %S; it must be a NumPy array, a torch tensor or anything with __dlpack__.", name,
                   type.get());
      return false;
    }
  }
  // torch's own exchange forgets a pending negation (x.conj().imag), and the numbers would have the wrong sign.
  if (reader.lazy_negation && !ours && negated(object))
    return refuse(PyExc_ValueError, name,
                  "has its negative bit set: its memory holds the negated numbers. Pass "
                  "resolve_neg() of it.");
  return !PyErr_Occurred();
}

int alignment(const Tensor& t) {
  const auto address = reinterpret_cast<uintptr_t>(t.data) | 16;
  return static_cast<int>(address & (~address + 1));
}

PyObject* describe(const Tensor& t) {
  const Ref shape(PyTuple_New(t.rank)), strides(PyTuple_New(t.rank));
  if (!shape || !strides) return nullptr;
  for (int d = 0; d < t.rank; ++d) {
    PyTuple_SetItem(shape.get(), d, PyLong_FromLongLong(t.shape[d]));
    PyTuple_SetItem(strides.get(), d, PyLong_FromLongLong(t.stride[d]));
  }
  return Py_BuildValue("(iiiOONi)", t.dtype, t.device, t.device_id, shape.get(), strides.get(),
                       PyBool_FromLong(t.read_only), alignment(t));
}

}  // namespace tessera::python
