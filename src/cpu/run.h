#pragma once
#include "core/plan.h"
#include "cpu/task.h"

namespace tessera::cpu {

// A gradient of few numbers that each sum over many pairs is made in float64: in single precision its error, and so the
// bound that it is judged by, would be a matter of luck.
bool bias_in_f64(const Problem& p);
bool sums_in_f64(const Problem& p);  // that one, dSlopes or dSinks

// Does the plan give the chunks of a row's keys to several threads?
bool splits(const core::Plan& plan);

struct Bodies {
  const Body& f32;
  const Body& f64;
};

// Runs a plan's steps with one instruction set's functions. Allocates nothing.
void run(const core::Plan& plan, const Bindings& bound, const Bodies& bodies);

}  // namespace tessera::cpu
