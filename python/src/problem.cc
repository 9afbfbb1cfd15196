// The type Problem: tessera_problem with its fields as attributes. It is made from a line (ADDING.md has the grammar),
// so that masks and options have one spelling everywhere; Python then gives sizes and operands.
#include <cstddef>

#include "problem.h"

namespace tessera::python {

PyTypeObject* problem_type = nullptr;

namespace {

ProblemObject* self_of(PyObject* self) {
  return reinterpret_cast<ProblemObject*>(self);
}

int init(PyObject* self, PyObject* args, PyObject*) {
  const char* text = nullptr;
  if (!PyArg_ParseTuple(args, "s:Problem", &text)) return -1;
  Error error;
  tessera_line* line = nullptr;
  if (tessera_line_parse(text, &line, &error) != TESSERA_OK) {
    raise(error);
    return -1;
  }
  tessera_line_free(std::exchange(self_of(self)->line, line));
  self_of(self)->problem = *tessera_line_problem(line);
  self_of(self)->seed = tessera_line_seed(line);
  self_of(self)->offset = tessera_line_offset(line);
  return 0;
}

void dealloc(PyObject* self) {
  tessera_line_free(self_of(self)->line);
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* clear(PyObject* self, PyObject*) {
  for (tessera_operand& o : self_of(self)->problem.operand) o = {};
  Py_RETURN_NONE;
}

PyObject* declare(PyObject* self, PyObject* args) {
  int name = 0;
  tessera_operand o = {};
  long long e[4], s[4];
  if (!PyArg_ParseTuple(args, "ii(LLLL)(LLLL):declare", &name, &o.dtype, &e[0], &e[1], &e[2], &e[3], &s[0], &s[1],
                        &s[2], &s[3]))
    return nullptr;
  if (name < 0 || name >= TESSERA_NAMES) return PyErr_Format(PyExc_ValueError, "name is %d; it is no operand", name);
  for (int d = 0; d < 4; ++d) {
    o.extent[d] = e[d];
    o.stride[d] = s[d];
  }
  self_of(self)->problem.operand[name] = o;
  Py_RETURN_NONE;
}

PyObject* check(PyObject* self, PyObject*) {
  Error error;
  if (tessera_check(&self_of(self)->problem, &error) != TESSERA_OK) return raise(error);
  Py_RETURN_NONE;
}

PyObject* text(PyObject* self, PyObject*) {
  return text_of([&](char* b, size_t n) { return tessera_problem_print(&self_of(self)->problem, b, n); });
}

// {"q": (dtype, extents, strides), ...} of what is present.
PyObject* operands(PyObject* self, PyObject*) {
  Ref dict(PyDict_New());
  for (int name = 0; dict && name < TESSERA_NAMES; ++name) {
    const tessera_operand& o = self_of(self)->problem.operand[name];
    if (o.dtype == TESSERA_ABSENT) continue;
    const auto *e = o.extent, *s = o.stride;
    const Ref row(Py_BuildValue("(i(LLLL)(LLLL))", o.dtype, e[0], e[1], e[2], e[3], s[0], s[1], s[2], s[3]));
    if (!row || PyDict_SetItemString(dict.get(), tessera_name_text(name), row.get()) != 0) return nullptr;
  }
  return dict.release();
}

// The int32 values that the line gives to an operand, as a list; empty if none.
PyObject* values(PyObject* self, PyObject* args) {
  int name = 0;
  if (!PyArg_ParseTuple(args, "i:values", &name)) return nullptr;
  int64_t count = 0;
  const int32_t* given = tessera_line_values(self_of(self)->line, name, &count);
  Ref list(PyList_New(count));
  for (int64_t n = 0; list && n < count; ++n) PyList_SetItem(list.get(), n, PyLong_FromLong(given[n]));
  return list.release();
}

#define FIELD(member, type) \
  { #member, type, offsetof(ProblemObject, problem.member), 0, nullptr }
#define MASK(member, type) \
  { #member, type, offsetof(ProblemObject, problem.mask.member), 0, nullptr }
#define CACHE(member, type) \
  { #member, type, offsetof(ProblemObject, problem.cache.member), 0, nullptr }
static_assert(sizeof(long long) == sizeof(int64_t) && sizeof(int) == sizeof(int32_t));
PyMemberDef members[] = {{"pass_", T_INT, offsetof(ProblemObject, problem.pass), 0, nullptr},
                         FIELD(deterministic, T_INT),
                         FIELD(batch_invariant, T_INT),
                         FIELD(allow_tf32, T_INT),
                         FIELD(has_scale, T_INT),
                         FIELD(scale, T_DOUBLE),
                         FIELD(softcap, T_DOUBLE),
                         FIELD(dropout, T_DOUBLE),
                         FIELD(batch, T_LONGLONG),
                         FIELD(heads_q, T_LONGLONG),
                         FIELD(heads_kv, T_LONGLONG),
                         FIELD(len_q, T_LONGLONG),
                         FIELD(len_k, T_LONGLONG),
                         FIELD(rows_q, T_LONGLONG),
                         FIELD(rows_k, T_LONGLONG),
                         FIELD(len_new, T_LONGLONG),
                         FIELD(rows_new, T_LONGLONG),
                         FIELD(dim, T_LONGLONG),
                         FIELD(dim_v, T_LONGLONG),
                         FIELD(alignment, T_LONGLONG),
                         MASK(corner, T_INT),
                         MASK(causal, T_INT),
                         MASK(corner_at, T_LONGLONG),
                         MASK(has_window, T_INT),
                         MASK(window_left_unbounded, T_INT),
                         MASK(window_right_unbounded, T_INT),
                         MASK(has_prefix, T_INT),
                         MASK(window_left, T_LONGLONG),
                         MASK(window_right, T_LONGLONG),
                         MASK(prefix, T_LONGLONG),
                         MASK(chunk, T_LONGLONG),
                         MASK(first, T_LONGLONG),
                         CACHE(page_size, T_LONGLONG),
                         CACHE(pages, T_LONGLONG),
                         CACHE(rows, T_LONGLONG),
                         CACHE(slots, T_LONGLONG),
                         CACHE(ring, T_INT),
                         CACHE(v_in_k, T_INT),
                         CACHE(rotary_interleaved, T_INT),
                         CACHE(rotary_dim, T_LONGLONG),
                         CACHE(rotary_positions, T_LONGLONG),
                         {"seed", T_ULONGLONG, offsetof(ProblemObject, seed), 0, nullptr},
                         {"offset", T_ULONGLONG, offsetof(ProblemObject, offset), 0, nullptr},
                         {nullptr, 0, 0, 0, nullptr}};

PyMethodDef methods[] = {
    {"clear", clear, METH_NOARGS, "clear(): every operand absent."},
    {"declare", declare, METH_VARARGS, "declare(name, dtype, extents, strides): one operand; strides in elements."},
    {"check", check, METH_NOARGS, "check(): ValueError with the reason if it is not a question."},
    {"text", text, METH_NOARGS, "text(): the problem as one line."},
    {"operands", operands, METH_NOARGS, "operands(): {name: (dtype, extents, strides)} of those present."},
    {"values", values, METH_VARARGS, "values(name): the numbers that the line gives to an int32 operand."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_problem(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("Problem(line): shapes, strides, dtypes and options, never a pointer.")},
      {Py_tp_init, reinterpret_cast<void*>(init)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
      {Py_tp_members, members},
      {Py_tp_methods, methods},
      {0, nullptr}};
  static PyType_Spec spec = {"tessera._tessera.Problem", sizeof(ProblemObject), 0, Py_TPFLAGS_DEFAULT, slots};
  problem_type = add_type(module, spec);
  return problem_type != nullptr;
}

}  // namespace tessera::python
