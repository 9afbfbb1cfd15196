// CPython by its stable interface of 3.10, and how the C interface's errors become exceptions.
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <structmember.h>

#include <memory>
#include <utility>

#include "tessera/tessera.h"

namespace tessera::python {

// A reference that is owned.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* object) : object_(object) {}  // takes over the reference
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref to(PyObject* object) {  // one more reference
    Py_XINCREF(object);
    return Ref(object);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

struct Error : tessera_error {
  Error() : tessera_error{} { size = sizeof(tessera_error); }
};
// Raises: INVALID is a ValueError, UNSUPPORTED a NotImplementedError, WRONG an AssertionError, FAILED a RuntimeError.
PyObject* raise(const Error& error);

// A number from 0 to 2^64 - 1 of any kind that is whole. False with an exception that calls it `name`.
bool as_bits(PyObject* number, const char* name, uint64_t& bits);

// The interpreter's lock is given away for the life of this. At the program's end a thread that comes back waits
// forever: the interpreter would end it by unwinding through C++, which aborts the process.
class Unlocked {
 public:
  explicit Unlocked(bool really = true) : state_(really ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};
bool watch_exit();  // once, with the module

// The types, made once with the module.
extern PyTypeObject* problem_type;
extern PyTypeObject* plan_type;
bool add_problem(PyObject* module);
bool add_plan(PyObject* module);
bool add_caller(PyObject* module);
PyTypeObject* add_type(PyObject* module, PyType_Spec& spec);

// The text of something that prints itself into a buffer.
template <class Print>
PyObject* text_of(Print&& print) {
  const size_t bytes = print(nullptr, 0);
  const std::unique_ptr<char[]> buffer(new char[bytes]);
  print(buffer.get(), bytes);
  return PyUnicode_FromString(buffer.get());
}

}  // namespace tessera::python
