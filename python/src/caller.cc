// The type Caller: calls with the same options, each planned once for each set of shapes, strides, dtypes and
// alignments. This is what an eager call costs: read the arrays, find the plan by what was read, allocate results, run.
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "problem.h"
#include "tensor.h"

namespace tessera::python {
namespace {

constexpr size_t most_plans = 512;  // of one Caller; past it all are forgotten, so that ever new lengths hold no memory
constexpr int most_arrays = 32;

struct Output {
  enum class Kind { array, given, plan, none } kind;
  int32_t name;                  // of an array; of a given one its place among the arrays of the call
  Ref allocate, args, keywords;  // of an array: allocate(*args, **keywords) makes one
};
struct Entry {
  Ref plan;
  std::vector<Output> outputs;
  Output workspace;  // on a GPU, whose memory the caller's library gives
};

// The type of what a call returns: tuple or one derived from it, whose own constructor would take the fields one by
// one.
class ResultType {
 public:
  explicit ResultType(PyObject* type) : type_(Ref::to(type)) {}
  PyObject* allocate(size_t fields) const {
    auto* type = reinterpret_cast<PyTypeObject*>(type_.get());
    const auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    return type == &PyTuple_Type ? PyTuple_New(static_cast<Py_ssize_t>(fields))
                                 : alloc(type, static_cast<Py_ssize_t>(fields));
  }

 private:
  Ref type_;
};

struct Calls {
  std::vector<int32_t> names;  // of the arrays of a call, in their order
  size_t ours = 0;             // the first so many were read before, or made here
  Ref make;
  std::unique_ptr<ResultType> result;
  std::unordered_map<std::string, std::shared_ptr<Entry>> entries;
  std::string last_key;  // of the last call: most are followed by their like
  std::shared_ptr<Entry> last;
};

struct CallerObject {
  PyObject_HEAD Calls* calls;
};

Calls& calls_of(PyObject* self) {
  return *reinterpret_cast<CallerObject*>(self)->calls;
}

// What a plan depends on, of all arrays; never what they hold.
class Key {
 public:
  // Of one shape NumPy's arrays and torch's have results of different kinds.
  explicit Key(PyObject* first) {
    const PyTypeObject* type = Py_TYPE(first);
    std::memcpy(end_, &type, sizeof type);
    end_ += sizeof type;
  }
  void absent() { put(-1); }
  void add(const Tensor& t) {
    put(t.rank | t.dtype << 8 | t.device << 16 | (t.read_only ? 1 << 24 : 0) | static_cast<int32_t>(t.way) << 25);
    put(t.device_id | alignment(t) << 16);
    const size_t bytes = static_cast<size_t>(t.rank) * sizeof(int64_t);
    std::memcpy(end_, t.shape, bytes);
    std::memcpy(end_ + bytes, t.stride, bytes);
    end_ += 2 * bytes;
  }
  bool is(const std::string& other) const {
    return other.size() == size() && std::memcmp(other.data(), bytes_, size()) == 0;
  }
  std::string text() const { return {bytes_, size()}; }

 private:
  void put(int32_t value) {
    std::memcpy(end_, &value, sizeof value);
    end_ += sizeof value;
  }
  size_t size() const { return static_cast<size_t>(end_ - bytes_); }

  char bytes_[sizeof(void*) +
              static_cast<size_t>(most_arrays) * (2 * sizeof(int32_t) + 2 * most_dims * sizeof(int64_t))];
  char* end_ = bytes_;
};

int init(PyObject* self, PyObject* args, PyObject*) {
  PyObject *names = nullptr, *make = nullptr, *type = reinterpret_cast<PyObject*>(&PyTuple_Type);
  int ours = 0;
  if (!PyArg_ParseTuple(args, "OO|Oi:Caller", &names, &make, &type, &ours)) return -1;
  if (!PyType_Check(type) || !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type), &PyTuple_Type)) {
    PyErr_SetString(PyExc_TypeError, "the result's type must be derived from tuple");
    return -1;
  }
  if (!PyTuple_Check(names) || PyTuple_Size(names) > most_arrays) {
    PyErr_SetString(PyExc_TypeError, "names must be a tuple of at most 32");
    return -1;
  }
  auto calls = std::make_unique<Calls>();
  for (Py_ssize_t n = 0; n < PyTuple_Size(names); ++n)
    calls->names.push_back(static_cast<int32_t>(PyLong_AsLong(PyTuple_GetItem(names, n))));
  if (PyErr_Occurred()) return -1;
  for (const int32_t name : calls->names)
    if (name < 0 || name >= TESSERA_NAMES) {
      PyErr_Format(PyExc_ValueError, "%d is no operand", name);
      return -1;
    }
  calls->make = Ref::to(make);
  calls->ours = static_cast<size_t>(ours);
  calls->result = std::make_unique<ResultType>(type);
  delete std::exchange(reinterpret_cast<CallerObject*>(self)->calls, calls.release());
  return 0;
}

void dealloc(PyObject* self) {
  delete reinterpret_cast<CallerObject*>(self)->calls;
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// A new array as (name, allocate, args, keywords), one of the call as its place, the plan as ..., nothing as None.
bool parse_output(PyObject* given, size_t arrays, Output& o) {
  o.kind = Output::Kind::none;
  if (given == Py_None) return true;
  o.kind = Output::Kind::plan;
  if (given == Py_Ellipsis) return true;
  if (PyLong_Check(given)) {
    o.kind = Output::Kind::given;
    o.name = static_cast<int32_t>(PyLong_AsLong(given));
    return o.name >= 0 && static_cast<size_t>(o.name) < arrays;
  }
  o.kind = Output::Kind::array;
  PyObject *allocate = nullptr, *args = nullptr, *keywords = nullptr;
  if (!PyArg_ParseTuple(given, "iOO!O!", &o.name, &allocate, &PyTuple_Type, &args, &PyDict_Type, &keywords))
    return false;
  o.allocate = Ref::to(allocate);
  o.args = Ref::to(args);
  o.keywords = Ref::to(keywords);
  return true;
}

// make(arrays, descriptions) returns (Plan, (output, ...)) or (Plan, (output, ...), workspace).
std::shared_ptr<Entry> make_entry(Calls& calls, PyObject* arrays, const Tensor* tensors) {
  const auto count = static_cast<Py_ssize_t>(calls.names.size());
  const Ref descriptions(PyTuple_New(count));
  if (!descriptions) return nullptr;
  for (Py_ssize_t n = 0; n < count; ++n) {
    const bool there = PyTuple_GetItem(arrays, n) != Py_None;
    Ref description(there ? describe(tensors[n]) : Ref::to(Py_None).release());
    if (!description) return nullptr;
    PyTuple_SetItem(descriptions.get(), n, description.release());
  }
  const Ref made(PyObject_CallFunctionObjArgs(calls.make.get(), arrays, descriptions.get(), nullptr));
  if (!made) return nullptr;
  PyObject *plan = nullptr, *outputs = nullptr, *workspace = Py_None;
  if (!PyArg_ParseTuple(made.get(), "O!O|O", plan_type, &plan, &outputs, &workspace)) return nullptr;
  auto entry = std::make_shared<Entry>();
  entry->plan = Ref::to(plan);
  for (Py_ssize_t n = 0; n < PyTuple_Size(outputs); ++n) {
    if (!parse_output(PyTuple_GetItem(outputs, n), calls.names.size(), entry->outputs.emplace_back())) return nullptr;
  }
  if (!parse_output(workspace, 0, entry->workspace)) return nullptr;
  return entry;
}

std::shared_ptr<Entry> find(Calls& calls, const Key& key, PyObject* arrays, const Tensor* tensors) {
  if (calls.last && key.is(calls.last_key)) return calls.last;
  std::string text = key.text();
  const auto found = calls.entries.find(text);
  std::shared_ptr<Entry> entry = found != calls.entries.end() ? found->second : make_entry(calls, arrays, tensors);
  if (!entry) return nullptr;
  if (calls.entries.size() >= most_plans) calls.entries.clear();
  calls.entries[text] = entry;
  calls.last_key = std::move(text);
  calls.last = entry;
  return entry;
}

Ref make_array(const Output& o, void*& data) {
  Ref result(PyObject_Call(o.allocate.get(), o.args.get(), o.keywords.get()));
  Tensor t;
  Ref keeper;  // an array of ours owns its memory
  if (!result || !read(result.get(), tessera_name_text(o.name), t, keeper, true)) return Ref();
  data = t.data;
  return result;
}

Ref make_output(const Output& o, const Entry& entry, PyObject* arrays, tessera_bindings& bound) {
  if (o.kind == Output::Kind::none) return Ref::to(Py_None);
  if (o.kind == Output::Kind::plan) return Ref::to(entry.plan.get());
  if (o.kind == Output::Kind::given) return Ref::to(PyTuple_GetItem(arrays, o.name));
  return make_array(o, bound.data[o.name]);
}

// call(arrays, seed, offset, stream): the outputs as a tuple.
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (!reinterpret_cast<CallerObject*>(self)->calls) return PyErr_Format(PyExc_TypeError, "the Caller was never made");
  Calls& calls = calls_of(self);
  const size_t arrays = calls.names.size();
  if (count != 4 || !PyTuple_Check(args[0]) || PyTuple_Size(args[0]) != static_cast<Py_ssize_t>(arrays))
    return PyErr_Format(PyExc_TypeError, "call takes a tuple of %zu arrays, seed, offset and stream", arrays);
  tessera_bindings bound;
  tessera_bindings_init(&bound);
  if (!as_bits(args[1], "seed", bound.seed) || !as_bits(args[2], "offset", bound.offset)) return nullptr;
  void* stream = args[3] == Py_None ? nullptr : PyLong_AsVoidPtr(args[3]);
  if (PyErr_Occurred()) return nullptr;

  Tensor tensors[most_arrays];
  Ref keepers[most_arrays];
  Key key(arrays > 0 ? PyTuple_GetItem(args[0], 0) : Py_None);
  for (size_t n = 0; n < arrays; ++n) {
    PyObject* array = PyTuple_GetItem(args[0], static_cast<Py_ssize_t>(n));
    if (array == Py_None) {
      key.absent();
      continue;
    }
    if (!read(array, tessera_name_text(calls.names[n]), tensors[n], keepers[n], n < calls.ours)) return nullptr;
    key.add(tensors[n]);
    bound.data[calls.names[n]] = tensors[n].data;
  }
  const std::shared_ptr<Entry> entry = find(calls, key, args[0], tensors);
  if (!entry) return nullptr;

  Ref results(calls.result->allocate(entry->outputs.size()));
  for (size_t n = 0; results && n < entry->outputs.size(); ++n) {
    Ref result = make_output(entry->outputs[n], *entry, args[0], bound);
    if (!result) return nullptr;
    PyTuple_SetItem(results.get(), static_cast<Py_ssize_t>(n), result.release());
  }
  const auto* plan = reinterpret_cast<const PlanObject*>(entry->plan.get());
  Ref workspace;  // freed when the run is queued; what takes its place is queued behind it
  if (entry->workspace.kind == Output::Kind::array) {
    workspace = make_array(entry->workspace, bound.workspace);
    if (!workspace) return nullptr;
    bound.workspace_bytes = plan->facts.workspace_bytes;
  }
  return results && run(plan, bound, stream) ? results.release() : nullptr;
}

PyMethodDef methods[] = {{"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL,
                          "call(arrays, seed, offset, stream): the outputs. An array may be None."},
                         {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_caller(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_doc,
       const_cast<char*>(
           "Caller(names, make, result=tuple, ours=0): calls planned once for each set of shapes and strides. "
           "make(arrays, descriptions) returns (Plan, outputs): an array as (name, allocate, "
           "args, keywords), the plan as ..., nothing as None.")},
      {Py_tp_init, reinterpret_cast<void*>(init)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
      {Py_tp_methods, methods},
      {0, nullptr}};
  static PyType_Spec spec = {"tessera._tessera.Caller", sizeof(CallerObject), 0, Py_TPFLAGS_DEFAULT, slots};
  return add_type(module, spec) != nullptr;
}

}  // namespace tessera::python
