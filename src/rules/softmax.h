// Online softmax: partial states (largest score m, sum of exp(score - m), unnormalised output) and how they join.
// An empty state has m = -inf; every exponent difference is guarded, so that no -inf - -inf is ever taken.
#pragma once
#include "rules/base.h"

namespace tessera::rules {

// The number to subtract before exponentiating: scores of an empty row are all -inf, and -inf - 0 is still -inf.
template <class T>
TESSERA_RULE T reference_score(T largest) {
  return largest == -infinity<T> ? T{0} : largest;
}

// exp(part - whole) for part <= whole, with equal infinities weighing 1 where they are the whole, and an empty part 0.
template <class T, class Exp>
TESSERA_RULE T weight(T part, T whole, Exp&& exponential) {
  if (part == -infinity<T>) return T{0};
  return part == whole ? T{1} : exponential(part - whole);
}

}  // namespace tessera::rules
