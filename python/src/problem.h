#pragma once
#include "python.h"

namespace tessera::python {

struct ProblemObject {
  PyObject_HEAD tessera_problem problem;
  tessera_line* line;
  unsigned long long seed, offset;  // of dropout, as the line says
};

struct PlanObject {
  PyObject_HEAD tessera_plan* plan;
  tessera_plan_facts facts;
  PyObject* line;  // the problem in words; of a cascade one line a level
  int32_t levels;  // of a cascade; 0: none
};

// Runs, if no workspace is bound with memory of its own as one, and without the interpreter's lock. False with an
// exception.
bool run(const PlanObject* plan, tessera_bindings& bound, void* stream);

}  // namespace tessera::python
