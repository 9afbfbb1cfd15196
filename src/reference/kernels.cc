#include "core/error.h"
#include "reference/formulas.h"

namespace tessera::reference {
namespace {

std::string refuse(const core::Problem&, const core::Device& device) {
  if (device.kind == TESSERA_CPU) return "";
  return fmt::format("device {} is a GPU; the reference engine runs on the host's memory", device.name);
}

template <void (*attend)(const core::Problem&, const core::Bindings&, const Task&)>
void run(const core::Plan& plan, const core::Bindings& bound, void*) {
  check_targets(plan.problem, bound);
  attend(plan.problem, bound, {.sample_pairs = plan.sample_pairs, .threads = plan.threads});
}

void fill(core::Plan& plan, const char* append, const char* attend) {
  if (core::appends(plan.problem)) plan.steps.push_back({"append", append});
  if (plan.problem.pass != TESSERA_APPEND) plan.steps.push_back({"attend", attend});
}

constexpr core::Kernel oracle_kernel = {
    .name = "reference.oracle",
    .engine = "reference",
    .automatic = false,
    .least_flops = 0,
    .refuse = refuse,
    .fill =
        [](core::Plan& plan, const core::Hints&) {
          fill(plan, "row by row in float64, rounded as it is stored", "row by row in float64");
        },
    .run = run<oracle>,
    .merge_bytes = [](const tessera_merge&) { return int64_t{0}; },
    .merge = [](const tessera_merge& m, std::byte*) { merge(m); },
};
constexpr core::Kernel naive_kernel = {
    .name = "reference.naive",
    .engine = "reference",
    .automatic = false,
    .least_flops = 0,
    .refuse = refuse,
    .fill =
        [](core::Plan& plan, const core::Hints&) {
          fill(plan, "row by row in the accumulation type, rounded as it is stored",
               "row by row in the accumulation type, P and dS rounded to the input dtype");
        },
    .run = run<naive>,
    .merge_bytes = [](const tessera_merge&) { return int64_t{0}; },
    .merge = [](const tessera_merge& m, std::byte*) { merge(m); },
};
constexpr const core::Kernel* all[] = {&oracle_kernel, &naive_kernel};

}  // namespace

std::span<const core::Kernel* const> kernels() {
  return all;
}

}  // namespace tessera::reference
