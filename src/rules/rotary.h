// Rotary position embedding (Su et al., RoFormer, 2021): pairs of numbers turn by the angle of their position.
#pragma once
#include "rules/base.h"

namespace tessera::rules {

// The two numbers of pair n of `pairs`.
struct RotaryPair {
  Index one, two;
};
TESSERA_RULE RotaryPair rotary_pair(Index n, Index pairs, bool interleaved) {
  return interleaved ? RotaryPair{2 * n, 2 * n + 1} : RotaryPair{n, n + pairs};
}

template <class T>
TESSERA_RULE void rotate(T& one, T& two, T cos, T sin) {
  const T turned = one * cos - two * sin;
  two = one * sin + two * cos;
  one = turned;
}

}  // namespace tessera::rules
