// The module _tessera: Tessera's C interface for Python.
#include "python.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "problem.h"
#include "tensor.h"

namespace tessera::python {

PyObject* raise(const Error& error) {
  PyObject* const kinds[] = {PyExc_RuntimeError, PyExc_AssertionError, PyExc_ValueError, PyExc_NotImplementedError,
                             PyExc_RuntimeError};
  PyErr_SetString(error.code > 0 && error.code <= TESSERA_FAILED ? kinds[error.code] : PyExc_RuntimeError,
                  error.message);
  return nullptr;
}

bool as_bits(PyObject* number, const char* name, uint64_t& bits) {
  const Ref whole(PyNumber_Index(number));
  bits = whole ? PyLong_AsUnsignedLongLong(whole.get()) : 0;
  if (!PyErr_Occurred()) return true;
  PyErr_Clear();
  PyErr_Format(PyExc_ValueError, "%s is %R; it must be a whole number from 0 to 2^64 - 1.", name, number);
  return false;
}

namespace {
std::atomic<bool> exiting{false};
std::thread::id main_thread;

PyObject* note_exit(PyObject*, PyObject*) {
  main_thread = std::this_thread::get_id();
  exiting = true;
  Py_RETURN_NONE;
}
PyMethodDef exit_note = {"note_exit", note_exit, METH_NOARGS, nullptr};
}  // namespace

bool watch_exit() {
  const Ref note(PyCFunction_New(&exit_note, nullptr)), module(PyImport_ImportModule("atexit"));
  return note && module && Ref(PyObject_CallMethod(module.get(), "register", "O", note.get()));
}

Unlocked::~Unlocked() {
  if (!state_) return;
  while (exiting && std::this_thread::get_id() != main_thread) std::this_thread::sleep_for(std::chrono::hours(1));
  PyEval_RestoreThread(state_);
}

PyTypeObject* add_type(PyObject* module, PyType_Spec& spec) {
  PyObject* type = PyType_FromSpec(&spec);
  const char* name = std::strrchr(spec.name, '.') + 1;
  if (!type || PyModule_AddObject(module, name, Ref::to(type).release()) != 0) return nullptr;
  return reinterpret_cast<PyTypeObject*>(type);
}

namespace {

template <class Work>
int32_t unlocked(Work&& work) {
  const Unlocked free;
  return work();
}

// ------------------------------------------------------------------------------------------------------- merging

// The dimension of an array that holds batch, sequence, head and dim; -1: it has none, which is extent 1.
struct Order {
  int at[4];
};

bool read_as(PyObject* array, const char* name, const Order& order, tessera_operand& operand, void*& data,
             std::vector<Ref>& keepers) {
  Tensor t;
  if (!read(array, name, t, keepers.emplace_back())) return false;
  if (t.device != 1) {
    PyErr_Format(PyExc_NotImplementedError, "%s is not on the CPU; this build merges there only.", name);
    return false;
  }
  operand = {};
  operand.dtype = t.dtype;
  int rank = 0;
  for (const int at : order.at) rank += at >= 0;
  if (t.rank != rank) {
    PyErr_Format(PyExc_ValueError, "%s has %d dimensions; it must have %d.", name, t.rank, rank);
    return false;
  }
  for (int d = 0; d < 4; ++d) {
    const int at = order.at[d];
    operand.extent[d] = at < 0 ? 1 : t.shape[at];
    operand.stride[d] = at < 0 ? 1 : t.stride[at];
  }
  data = t.data;
  return true;
}

// All parts share one layout, which the first shows.
bool read_parts(PyObject* list, const char* name, const Order& order, tessera_operand& operand,
                std::vector<void*>& pointers, std::vector<Ref>& keepers) {
  for (Py_ssize_t n = 0; n < PyTuple_Size(list); ++n) {
    tessera_operand mine;
    void* data = nullptr;
    if (!read_as(PyTuple_GetItem(list, n), name, order, mine, data, keepers)) return false;
    if (n == 0) operand = mine;
    bool same = mine.dtype == operand.dtype;
    for (int d = 0; d < 4; ++d)
      same =
          same && mine.extent[d] == operand.extent[d] && (mine.stride[d] == operand.stride[d] || mine.extent[d] == 1);
    if (!same) {
      PyErr_Format(PyExc_ValueError,
                   "%s[%zd] has another shape, dtype or strides than %s[0]; all parts share one layout.", name, n,
                   name);
      return false;
    }
    pointers.push_back(data);
  }
  return true;
}

// merge(outs, lses, out, lse, dout, dlse, douts, dlses, out_order, lse_order, threads); the gradients are None in the
// forward pass.
PyObject* merge(PyObject*, PyObject* args) {
  PyObject *outs, *lses, *out, *lse, *dout, *dlse, *douts, *dlses;
  Order o, l;
  int threads = 0;
  if (!PyArg_ParseTuple(args, "O!O!OOOOOO(iiii)(iiii)i:merge", &PyTuple_Type, &outs, &PyTuple_Type, &lses, &out, &lse,
                        &dout, &dlse, &douts, &dlses, &o.at[0], &o.at[1], &o.at[2], &o.at[3], &l.at[0], &l.at[1],
                        &l.at[2], &l.at[3], &threads))
    return nullptr;
  tessera_merge m;
  tessera_merge_init(&m);
  std::vector<Ref> keepers;
  std::vector<void*> out_parts, lse_parts, dout_parts, dlse_parts;
  void *out_data = nullptr, *lse_data = nullptr, *dout_data = nullptr, *dlse_data = nullptr;
  if (!read_parts(outs, "outs", o, m.part_out, out_parts, keepers) ||
      !read_parts(lses, "lses", l, m.part_lse, lse_parts, keepers))
    return nullptr;
  if (out_parts.size() != lse_parts.size())
    return PyErr_Format(PyExc_ValueError, "outs are %zu and lses %zu; each part has both.", out_parts.size(),
                        lse_parts.size());
  tessera_operand ignored;
  const bool backward = dout != Py_None;
  if (backward) {
    if (!read_as(dout, "dout", o, m.dout, dout_data, keepers) ||
        (dlse != Py_None && !read_as(dlse, "dlse", l, m.dlse, dlse_data, keepers)) ||
        !read_parts(douts, "douts", o, ignored, dout_parts, keepers) ||
        !read_parts(dlses, "dlses", l, ignored, dlse_parts, keepers))
      return nullptr;
    m.out = m.dout;
    m.pass = TESSERA_BACKWARD;
  } else if (!read_as(out, "out", o, m.out, out_data, keepers) || !read_as(lse, "lse", l, m.lse, lse_data, keepers)) {
    return nullptr;
  }
  m.threads = threads;
  m.parts = static_cast<int64_t>(out_parts.size());
  m.batch = m.part_out.extent[0];
  m.len = m.part_out.extent[1];
  m.heads = m.part_out.extent[2];
  m.dim = m.part_out.extent[3];
  m.part_out_data = out_parts.data();
  m.part_lse_data = lse_parts.data();
  m.out_data = out_data;
  m.lse_data = lse_data;
  m.dout_data = dout_data;
  m.dlse_data = dlse_data;
  m.dpart_out_data = dout_parts.data();
  m.dpart_lse_data = dlse_parts.data();
  Error error;
  const int32_t code = unlocked([&] { return tessera_merge_run(&m, &error); });
  if (code != TESSERA_OK) return raise(error);
  Py_RETURN_NONE;
}

// --------------------------------------------------------------------------------------------------------- tools

bool bytes_at(PyObject* array, const char* name, int64_t needed, uint8_t*& data, Ref& keeper) {
  Tensor t;
  if (!read(array, name, t, keeper)) return false;
  int64_t size = 1;
  for (int d = 0; d < t.rank; ++d) size *= t.shape[d];
  data = static_cast<uint8_t*>(t.data);
  if (t.dtype == TESSERA_BOOL && t.device == 1 && !t.read_only && size == needed) return true;
  PyErr_Format(PyExc_ValueError, "%s must be %lld bools on the CPU, dense and writable.", name,
               static_cast<long long>(needed));
  return false;
}

// dropout_mask(dropout, seed, offset, batch, head, heads_q, rows, keys, grid)
PyObject* dropout_mask(PyObject*, PyObject* args) {
  double dropout = 0;
  PyObject *grid = nullptr, *seed_given = nullptr, *offset_given = nullptr;
  uint64_t seed = 0, offset = 0;
  long long batch = 0, head = 0, heads = 0, rows = 0, keys = 0;
  if (!PyArg_ParseTuple(args, "dOOLLLLLO:dropout_mask", &dropout, &seed_given, &offset_given, &batch, &head, &heads,
                        &rows, &keys, &grid))
    return nullptr;
  if (!as_bits(seed_given, "seed", seed) || !as_bits(offset_given, "offset", offset)) return nullptr;
  uint8_t* data = nullptr;
  Ref keeper;
  if (!bytes_at(grid, "grid", rows * keys, data, keeper)) return nullptr;
  Error error;
  const int32_t code = unlocked(
      [&] { return tessera_dropout_mask(dropout, seed, offset, batch, head, heads, rows, keys, data, &error); });
  if (code != TESSERA_OK) return raise(error);
  Py_RETURN_NONE;
}

// verify(problem, {name: array}, seed, offset, sample_pairs): a list of {name, ok, max, ...}, one an output. A wrong
// result is no exception.
PyObject* verify(PyObject*, PyObject* args) {
  PyObject *problem = nullptr, *arrays = nullptr;
  tessera_bindings bound;
  tessera_bindings_init(&bound);
  unsigned long long seed = 0, offset = 0;
  long long sample = 0;
  if (!PyArg_ParseTuple(args, "O!O!KKL:verify", problem_type, &problem, &PyDict_Type, &arrays, &seed, &offset, &sample))
    return nullptr;
  std::vector<Ref> keepers;
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    PyObject* array = PyDict_GetItemString(arrays, tessera_name_text(name));
    Tensor t;
    if (!array) continue;
    if (!read(array, tessera_name_text(name), t, keepers.emplace_back())) return nullptr;
    bound.data[name] = t.data;
  }
  bound.seed = seed;
  bound.offset = offset;
  tessera_verdict verdicts[TESSERA_NAMES] = {};
  verdicts[0].size = sizeof verdicts[0];
  int32_t count = 0;
  Error error;
  const tessera_problem& p = reinterpret_cast<ProblemObject*>(problem)->problem;
  const int32_t code =
      unlocked([&] { return tessera_verify(&p, &bound, sample, verdicts, TESSERA_NAMES, &count, &error); });
  if (code != TESSERA_OK && code != TESSERA_WRONG) return raise(error);
  Ref list(PyList_New(0));
  for (int32_t n = 0; list && n < count; ++n) {
    const tessera_verdict& v = verdicts[n];
    const Ref row(Py_BuildValue("{s:s,s:N,s:N,s:L,s:d,s:d,s:d,s:d,s:d,s:d}", "name", tessera_name_text(v.name), "ok",
                                PyBool_FromLong(v.ok), "nonfinite_equal", PyBool_FromLong(v.nonfinite_equal),
                                "elements", static_cast<long long>(v.elements), "max", v.max, "rms", v.rms, "naive_max",
                                v.naive_max, "naive_rms", v.naive_rms, "bound", v.bound, "bound_rms", v.bound_rms));
    if (!row || PyList_Append(list.get(), row.get()) != 0) return nullptr;
  }
  return list.release();
}

PyObject* describe_array(PyObject*, PyObject* array) {
  Tensor t;
  Ref keeper;
  return read(array, "the array", t, keeper) ? describe(t) : nullptr;
}

PyObject* build_info(PyObject*, PyObject*) {
  return PyUnicode_FromString(tessera_build_info());
}

// The facts of a device ("host"): (name, isa, threads).
PyObject* device(PyObject*, PyObject* args) {
  const char* name = nullptr;
  if (!PyArg_ParseTuple(args, "s:device", &name)) return nullptr;
  tessera_device d = {};
  d.size = sizeof d;
  Error error;
  if (tessera_device_find(name, &d, &error) != TESSERA_OK) return raise(error);
  return Py_BuildValue("(sii)", d.name, d.isa, d.threads);
}

PyMethodDef functions[] = {
    {"merge", merge, METH_VARARGS,
     "merge(outs, lses, out, lse, dout, dlse, douts, dlses, out_order, lse_order, threads)"},
    {"dropout_mask", dropout_mask, METH_VARARGS,
     "dropout_mask(dropout, seed, offset, batch, head, heads_q, rows, keys, grid)"},
    {"verify", verify, METH_VARARGS, "verify(problem, {name: array}, seed, offset, sample_pairs): verdicts"},
    {"describe", describe_array, METH_O, "describe(array): (dtype, device, id, shape, strides, read-only, alignment)"},
    {"set_dtypes", set_dtypes, METH_O, "set_dtypes({torch dtype: number}): for torch before 2.10"},
    {"build_info", build_info, METH_NOARGS, "build_info(): one line a fact: key, tab, value"},
    {"device", device, METH_VARARGS, "device(name): (name, isa, threads)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_tessera", "Tessera's C interface.", -1, functions, nullptr, nullptr, nullptr, nullptr};

bool add_texts(PyObject* module, const char* list, int32_t count, const char* (*text)(int32_t)) {
  Ref names(PyTuple_New(count));
  for (int32_t n = 0; names && n < count; ++n) PyTuple_SetItem(names.get(), n, PyUnicode_FromString(text(n)));
  return names && PyModule_AddObject(module, list, names.release()) == 0;
}

// What Python's own files rely on, checked when they are imported.
bool add_facts(PyObject* module) {
  return add_texts(module, "NAMES", TESSERA_NAMES, tessera_name_text) &&
         add_texts(module, "DTYPES", TESSERA_E4M3 + 1, tessera_dtype_text) &&
         PyModule_AddStringConstant(module, "VERSION", tessera_version()) == 0;
}

}  // namespace
}  // namespace tessera::python

PyMODINIT_FUNC PyInit__tessera() {
  using namespace tessera::python;
  Ref module(PyModule_Create(&definition));
  const bool made = module && add_problem(module.get()) && add_plan(module.get()) && add_caller(module.get()) &&
                    watch_exit() && add_facts(module.get());
  return made ? module.release() : nullptr;
}
