// The entry point; the tool defines TESSERA_SPEC.
#include "device/portable/backward.h"

constexpr tessera::rules::BackwardSpec spec = TESSERA_SPEC;
static_assert(tessera::rules::legal(spec));

extern "C" __global__ void __launch_bounds__(32 * spec.warps, tessera::rules::blocks_at_once(spec))
    tessera_backward(const __grid_constant__ tessera::rules::BackwardParams p) {
  extern __shared__ __align__(1024) char memory[];
  tessera::device::run_part<spec>(p, memory);
}
