// The entry point; the tool defines TESSERA_SPEC.
#include "device/general/append.h"
#include "device/general/backward.h"
#include "device/general/forward.h"

constexpr tessera::rules::GeneralSpec spec = TESSERA_SPEC;

extern "C" __global__ void __launch_bounds__(32 * tessera::rules::most_warps, tessera::rules::general_blocks_at_once)
    tessera_general(const __grid_constant__ tessera::rules::GeneralParams p) {
  using tessera::rules::Task;
  namespace device = tessera::device;
  extern __shared__ __align__(1024) char memory[];
  if constexpr (spec.task == Task::forward) device::run_items<device::Forward<spec>>(p, memory);
  if constexpr (spec.task == Task::combine) device::combine(p);
  if constexpr (spec.task == Task::append) device::append(p);
  if constexpr (spec.task == Task::terms) device::find_terms(p);
  if constexpr (spec.task == Task::keys) device::run_items<device::KeyGradients<spec>>(p, memory);
  if constexpr (spec.task == Task::queries) device::run_items<device::QueryGradients<spec>>(p, memory);
  if constexpr (spec.task == Task::bias) device::run_items<device::BiasGradients<spec>>(p, memory);
  if constexpr (spec.task == Task::reduce) device::reduce(p);
  if constexpr (spec.task == Task::clear) device::clear_tails(p);
}
