#include "reference/attention.h"

namespace tessera::reference {
namespace {

template <class T>
void run(const Problem& p, const Bindings& bound, const Task& task) {
  // A product on the matrix units takes its operands in the input dtype, so P and dZ must be rounded to it.
  const auto round = [dtype = core::data_dtype(p)](T x) {
    return static_cast<T>(rounded(dtype, static_cast<double>(x)));
  };
  Attention<T, decltype(round)>(p, bound, task, round).run();
}

}  // namespace

void naive(const Problem& p, const Bindings& bound, const Task& task) {
  core::data_dtype(p) == TESSERA_F64 ? run<double>(p, bound, task) : run<float>(p, bound, task);
}

}  // namespace tessera::reference
