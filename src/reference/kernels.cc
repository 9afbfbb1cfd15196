#include "core/error.h"
#include "reference/reference.h"

namespace tessera::reference {
namespace {

std::string refuse(const core::Problem&, const core::Device& device) {
  if (device.kind == TESSERA_CPU) return "";
  return fmt::format("device {} is a GPU; the reference engine runs on the host's memory", device.name);
}

template <void (*attend)(const core::Problem&, const core::Bindings&, const Task&)>
void run(const core::Plan& plan, const core::Bindings& bound, void*) {
  attend(plan.problem, bound, {.sample_pairs = plan.sample_pairs, .threads = plan.threads});
}

constexpr core::Kernel oracle_kernel = {
    .name = "reference.oracle",
    .engine = "reference",
    .automatic = false,
    .refuse = refuse,
    .fill =
        [](core::Plan& plan, const core::Hints&) {
          plan.steps.push_back({"attend", "row by row in float64"});
        },
    .run = run<oracle>,
};
constexpr core::Kernel naive_kernel = {
    .name = "reference.naive",
    .engine = "reference",
    .automatic = false,
    .refuse = refuse,
    .fill =
        [](core::Plan& plan, const core::Hints&) {
          plan.steps.push_back({"attend", "row by row in the accumulation type, P and dS rounded to the input dtype"});
        },
    .run = run<naive>,
};
constexpr const core::Kernel* all[] = {&oracle_kernel, &naive_kernel};

}  // namespace

std::span<const core::Kernel* const> kernels() {
  return all;
}

}  // namespace tessera::reference
