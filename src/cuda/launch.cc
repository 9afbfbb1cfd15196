#include "cuda/launch.h"

#include "core/error.h"
#include "cuda/loaded.h"

namespace tessera::cuda {

Launcher::Launcher(const core::Plan& plan, const core::Bindings& bound, int name, void* stream)
    : driver_(need_driver()),
      here_(driver_, bound.data[name], core::operand_row(name).text),
      device_(device_at(driver_, here_.ordinal())),
      stream_(static_cast<Stream>(stream)) {
  core::require(device_.sm_arch == plan.device.sm_arch,
                "the plan was made for {} (sm_{}); {} lies on {} (sm_{}). Make it for \"cuda:{}\".", plan.device.name,
                plan.device.sm_arch, core::operand_row(name).text, device_.name, device_.sm_arch, here_.ordinal());
}

void Launcher::launch(const core::Step& step, void* params) const {
  const core::Launch& l = step.launch;
  if (l.blocks == 0) return;
  const Function function = static_cast<const Loaded*>(l.code)->on(here_.ordinal(), device_.sm_arch, stream_);
  void* arguments[] = {params};
  const LaunchAttribute cluster = {.id = launch_cluster, .value = {static_cast<unsigned>(l.cluster), 1, 1}};
  const LaunchConfig config = {.grid = {static_cast<unsigned>(l.blocks), 1, 1},
                               .block = {static_cast<unsigned>(l.threads), 1, 1},
                               .shared_bytes = static_cast<unsigned>(l.shared_bytes),
                               .stream = stream_,
                               .attributes = &cluster,
                               .count = l.cluster > 1 ? 1u : 0u};
  const Result result = driver_.cuLaunchKernelEx(&config, function, arguments, nullptr);
  if (result != 0) require_ok(driver_, result, ("launching the step " + step.name).c_str());
}

}  // namespace tessera::cuda
