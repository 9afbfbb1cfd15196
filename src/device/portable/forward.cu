// The entry point; the tool defines TESSERA_SPEC.
#include "device/portable/forward.h"

constexpr tessera::rules::ForwardSpec spec = TESSERA_SPEC;
static_assert(tessera::rules::legal(spec));
static_assert(sizeof(tessera::device::Shared<spec>) <= tessera::rules::shared_bytes(spec));

extern "C" __global__ void __launch_bounds__(32 * spec.warps, tessera::rules::blocks_at_once(spec))
    tessera_forward(const __grid_constant__ tessera::rules::ForwardParams p) {
  extern __shared__ __align__(1024) char memory[];
  tessera::device::forward<spec>(p, *reinterpret_cast<tessera::device::Shared<spec>*>(memory));
}
