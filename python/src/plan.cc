// The type Plan: which kernel answers, what it takes, why not the others; and running it.
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "problem.h"
#include "tensor.h"

namespace tessera::python {

PyTypeObject* plan_type = nullptr;

namespace {

PlanObject* self_of(PyObject* self) {
  return reinterpret_cast<PlanObject*>(self);
}

// Memory for one run, aligned as plans ask for. Small ones are kept by the thread: the system's allocator tidies its
// whole heap when it is asked for some kilobytes.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) {
    const size_t needed = (static_cast<size_t>(bytes) + 63) / 64 * 64;
    if (needed <= kept_bytes) {
      thread_local std::unique_ptr<void, decltype(&std::free)> kept(std::aligned_alloc(64, kept_bytes), &std::free);
      memory_ = kept.get();
    } else {
      own_.reset(std::aligned_alloc(64, needed));
      memory_ = own_.get();
    }
    if (!memory_) PyErr_Format(PyExc_MemoryError, "the plan's workspace of %lld bytes", static_cast<long long>(bytes));
  }
  void* memory() const { return memory_; }
  explicit operator bool() const { return memory_ != nullptr; }

 private:
  static constexpr size_t kept_bytes = size_t{1} << 16;
  std::unique_ptr<void, decltype(&std::free)> own_{nullptr, &std::free};
  void* memory_ = nullptr;
};

struct Wishes {
  tessera_device device;
  tessera_hints hints;
};

// device, kernels, threads, workspace_limit, tile_rows, tile_keys
bool parse_wishes(PyObject* args, PyObject*& first, Wishes& w) {
  const char *device = "host", *kernels = nullptr;
  long long limit = -1, sample = 0;
  tessera_hints_init(&w.hints);
  if (!PyArg_ParseTuple(args, "O|sziLiiL", &first, &device, &kernels, &w.hints.threads, &limit, &w.hints.tile_rows,
                        &w.hints.tile_keys, &sample))
    return false;
  w.hints.kernels = kernels;
  w.hints.has_workspace_limit = limit >= 0;
  w.hints.workspace_limit = limit >= 0 ? limit : 0;
  w.hints.sample_pairs = sample;
  w.device = {};
  w.device.size = sizeof w.device;
  Error error;
  if (tessera_device_find(device, &w.device, &error) == TESSERA_OK) return true;
  raise(error);
  return false;
}

bool is_problem(PyObject* object) {
  if (PyObject_TypeCheck(object, problem_type)) return true;
  PyErr_SetString(PyExc_TypeError, "a Problem is needed");
  return false;
}

PyObject* line_of(const tessera_problem& p) {
  return text_of([&](char* b, size_t n) { return tessera_problem_print(&p, b, n); });
}

bool own(PlanObject* self, tessera_plan* plan, Ref line, int32_t levels) {
  tessera_plan_free(std::exchange(self->plan, plan));
  Py_XDECREF(std::exchange(self->line, line.release()));
  self->levels = levels;
  self->facts.size = sizeof self->facts;
  Error error;
  if (self->line && tessera_plan_get(plan, &self->facts, &error) == TESSERA_OK) return true;
  if (self->line) raise(error);
  return false;
}

bool make_cascade(PlanObject* self, PyObject* list, const Wishes& w) {
  std::vector<const tessera_problem*> levels;
  Ref lines(PyList_New(0));
  for (Py_ssize_t n = 0; lines && n < PyTuple_Size(list); ++n) {
    PyObject* item = PyTuple_GetItem(list, n);
    if (!is_problem(item)) return false;
    levels.push_back(&reinterpret_cast<ProblemObject*>(item)->problem);
    const Ref line(line_of(*levels.back()));
    if (!line || PyList_Append(lines.get(), line.get()) != 0) return false;
  }
  const Ref between(PyUnicode_FromString("\n"));
  if (!lines || !between) return false;
  Error error;
  tessera_plan* plan = nullptr;
  const auto count = static_cast<int32_t>(levels.size());
  if (tessera_cascade_make(levels.data(), count, &w.device, &w.hints, &plan, &error) != TESSERA_OK) {
    raise(error);
    return false;
  }
  return own(self, plan, Ref(PyUnicode_Join(between.get(), lines.get())), count);
}

int init(PyObject* self, PyObject* args, PyObject*) {
  PyObject* first = nullptr;
  Wishes w;
  if (!parse_wishes(args, first, w)) return -1;
  if (PyTuple_Check(first)) return make_cascade(self_of(self), first, w) ? 0 : -1;
  if (!is_problem(first)) return -1;
  const tessera_problem& problem = reinterpret_cast<ProblemObject*>(first)->problem;
  Error error;
  tessera_plan* plan = nullptr;
  if (tessera_plan_make(&problem, &w.device, &w.hints, &plan, &error) != TESSERA_OK) {
    raise(error);
    return -1;
  }
  return own(self_of(self), plan, Ref(line_of(problem)), 0) ? 0 : -1;
}

void dealloc(PyObject* self) {
  tessera_plan_free(self_of(self)->plan);
  Py_XDECREF(self_of(self)->line);
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* text(PyObject* self, PyObject*) {
  return text_of([&](char* b, size_t n) { return tessera_plan_print(self_of(self)->plan, b, n); });
}

PyObject* str(PyObject* self) {
  return text(self, nullptr);
}

PyObject* repr(PyObject* self) {
  if (!self_of(self)->plan) return PyUnicode_FromString("<Plan that was never made>");
  return PyUnicode_FromFormat("<Plan %s: %S>", self_of(self)->facts.kernel, self_of(self)->line);
}

PyObject* steps(PyObject* self, PyObject*) {
  Ref list(PyList_New(0));
  for (int32_t n = 0; list && n < self_of(self)->facts.steps; ++n) {
    const Ref step(PyUnicode_FromString(tessera_plan_step(self_of(self)->plan, n)));
    if (!step || PyList_Append(list.get(), step.get()) != 0) return nullptr;
  }
  return list.release();
}

// [(kernel, why it was not chosen), ...]
PyObject* reasons(PyObject* self, PyObject*) {
  Ref list(PyList_New(0));
  for (int32_t n = 0; list && n < self_of(self)->facts.reasons; ++n) {
    const char* why = nullptr;
    const char* kernel = tessera_plan_reason(self_of(self)->plan, n, &why);
    const Ref row(Py_BuildValue("(ss)", kernel, why));
    if (!row || PyList_Append(list.get(), row.get()) != 0) return nullptr;
  }
  return list.release();
}

// Binds {name: array}. The caller vouches for shapes; this is how lines run, whose arrays Python made itself.
bool bind(PyObject* arrays, tessera_bindings& bound, std::vector<Ref>& keepers) {
  tessera_bindings_init(&bound);
  for (int name = 0; name < TESSERA_NAMES; ++name) {
    PyObject* array = PyDict_GetItemString(arrays, tessera_name_text(name));
    if (!array || array == Py_None) continue;
    Tensor t;
    if (!read(array, tessera_name_text(name), t, keepers.emplace_back())) return false;
    if (t.device != 1) {
      PyErr_Format(PyExc_NotImplementedError, "%s is not on the CPU; lines run there only.", tessera_name_text(name));
      return false;
    }
    bound.data[name] = t.data;
  }
  return !PyErr_Occurred();
}

bool run_cascade(const PlanObject* self, std::vector<tessera_bindings>& levels) {
  const Workspace workspace(self->facts.workspace_bytes);
  if (!workspace) return false;
  levels.back().workspace = workspace.memory();
  levels.back().workspace_bytes = self->facts.workspace_bytes;
  std::vector<const tessera_bindings*> pointers;
  for (const tessera_bindings& b : levels) pointers.push_back(&b);
  Error error;
  int32_t code = TESSERA_OK;
  {
    const Unlocked free;
    code = tessera_cascade_run(self->plan, pointers.data(), nullptr, &error);
  }
  if (code != TESSERA_OK) raise(error);
  return code == TESSERA_OK;
}

PyObject* run_arrays(PyObject* self, PyObject* args) {
  PyObject* arrays = nullptr;
  unsigned long long seed = 0, offset = 0;
  if (!PyArg_ParseTuple(args, "O|KK:run", &arrays, &seed, &offset)) return nullptr;
  const bool cascade = self_of(self)->levels > 0;
  const Py_ssize_t count = PyTuple_Check(arrays) ? PyTuple_Size(arrays) : 1;
  if (PyTuple_Check(arrays) != cascade || (cascade && count != self_of(self)->levels))
    return PyErr_Format(PyExc_TypeError, "run takes {name: array}, or of a cascade a tuple of one a level");
  std::vector<tessera_bindings> bound(static_cast<size_t>(count));
  std::vector<Ref> keepers;
  for (Py_ssize_t n = 0; n < count; ++n) {
    PyObject* level = cascade ? PyTuple_GetItem(arrays, n) : arrays;
    if (!PyDict_Check(level)) return PyErr_Format(PyExc_TypeError, "run takes {name: array}");
    if (!bind(level, bound[static_cast<size_t>(n)], keepers)) return nullptr;
  }
  bound[0].seed = seed;
  bound[0].offset = offset;
  const bool ran = cascade ? run_cascade(self_of(self), bound) : run(self_of(self), bound[0], nullptr);
  if (!ran) return nullptr;
  Py_RETURN_NONE;
}

#define FACT(member, type) \
  { #member, type, offsetof(PlanObject, facts.member), READONLY, nullptr }
PyMemberDef members[] = {FACT(engine, T_STRING),
                         FACT(kernel, T_STRING),
                         FACT(device, T_STRING),
                         FACT(threads, T_INT),
                         FACT(tile_rows, T_INT),
                         FACT(tile_keys, T_INT),
                         FACT(workspace_bytes, T_LONGLONG),
                         FACT(bytes_read, T_LONGLONG),
                         FACT(bytes_written, T_LONGLONG),
                         FACT(score_bytes_avoided, T_LONGLONG),
                         FACT(flops, T_DOUBLE),
                         FACT(roofline_seconds, T_DOUBLE),
                         {"line", T_OBJECT, offsetof(PlanObject, line), READONLY, nullptr},
                         {nullptr, 0, 0, 0, nullptr}};

PyMethodDef methods[] = {
    {"text", text, METH_NOARGS, "text(): the plan for a person."},
    {"steps", steps, METH_NOARGS, "steps(): what a run does, in words."},
    {"reasons", reasons, METH_NOARGS, "reasons(): (kernel, why it was not chosen) of each that was not."},
    {"run", run_arrays, METH_VARARGS, "run({name: array}, seed=0, offset=0): runs on arrays as the problem declares."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool run(const PlanObject* plan, tessera_bindings& bound, void* stream) {
  std::optional<Workspace> workspace;
  if (!bound.workspace) {
    if (!workspace.emplace(plan->facts.workspace_bytes)) return false;
    bound.workspace = workspace->memory();
    bound.workspace_bytes = plan->facts.workspace_bytes;
  }
  Error error;
  // To give the lock away and to take it back cost 0.1 to 0.4 us of a tiny call's 7.
  // On a GPU the first run loads code.
  const bool on_gpu = std::strcmp(plan->facts.engine, "cuda") == 0;
  const bool brief = !on_gpu && plan->facts.flops < 1e5 && plan->facts.bytes_read < (1 << 16);
  int32_t code = TESSERA_OK;
  {
    const Unlocked free(!brief);
    code = tessera_run(plan->plan, &bound, stream, &error);
  }
  if (code != TESSERA_OK) raise(error);
  return code == TESSERA_OK;
}

bool add_plan(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("Plan(problem or tuple of problems, device='host', kernels=None, threads=0, "
                                    "workspace_limit=-1, tile_rows=0, tile_keys=0, sample_pairs=0)")},
      {Py_tp_init, reinterpret_cast<void*>(init)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
      {Py_tp_repr, reinterpret_cast<void*>(repr)},
      {Py_tp_str, reinterpret_cast<void*>(str)},
      {Py_tp_members, members},
      {Py_tp_methods, methods},
      {0, nullptr}};
  static PyType_Spec spec = {"tessera._tessera.Plan", sizeof(PlanObject), 0, Py_TPFLAGS_DEFAULT, slots};
  plan_type = add_type(module, spec);
  return plan_type != nullptr;
}

}  // namespace tessera::python
