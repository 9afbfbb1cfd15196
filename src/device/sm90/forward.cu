// The entry point; the tool defines TESSERA_SPEC.
#include "device/sm90/forward.h"

constexpr tessera::rules::Sm90ForwardSpec spec = TESSERA_SPEC;
static_assert(tessera::rules::legal(spec));

extern "C" __global__ void __launch_bounds__(tessera::rules::threads(spec), 1)
    tessera_sm90_forward(const __grid_constant__ tessera::rules::Sm90ForwardParams p) {
  extern __shared__ __align__(1024) char memory[];
  tessera::device::sm90_forward<spec>(p, *reinterpret_cast<tessera::device::Sm90Shared<spec>*>(memory));
}
