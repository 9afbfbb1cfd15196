// From a scaled product to a score. T is a number or a vector of numbers.
#pragma once
#include "rules/base.h"

namespace tessera::rules {

template <class T>
struct Capped {
  T value;  // t = softcap * tanh(z / softcap)
  T slope;  // dt/dz = 1 - (t / softcap)^2
};
template <class T, class Tanh>
TESSERA_RULE Capped<T> softcapped(T z, T softcap, T inverse, Tanh&& tangent) {
  const T u = tangent(z * inverse);
  return {softcap * u, 1 - u * u};
}

// ALiBi: what is taken off the score of a key at distance |p - j|.
template <class T>
TESSERA_RULE T alibi(T slope, T distance) {
  return slope * distance;
}

}  // namespace tessera::rules
