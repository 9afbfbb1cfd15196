#include "core/plan.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/check.h"
#include "core/error.h"
#include "core/line.h"
#include "rules/dtype.h"

namespace tessera::core {
namespace {

// Is `name` one of the comma-separated names or prefixes ("cpu" allows "cpu.avx2")?
bool allowed(const char* list, std::string_view name) {
  if (!list) return true;
  std::string_view rest = list;
  while (true) {
    const size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const bool prefix = name.starts_with(item) && (name.size() == item.size() || name[item.size()] == '.');
    if (!item.empty() && prefix) return true;
    if (comma == std::string_view::npos) return false;
    rest.remove_prefix(comma + 1);
  }
}

// 4.3 GB, 275 GFLOP: four digits at most, thousands as prefixes.
std::string scaled(double amount, const char* unit) {
  constexpr const char* prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  size_t at = 0;
  while (amount >= 1000 && at < 6) amount /= 1000, ++at;
  return fmt::format("{:.{}g} {}{}", amount, at == 0 ? 4 : 3, prefixes[at], unit);
}
std::string bytes_text(int64_t bytes) {
  return scaled(static_cast<double>(bytes), "B");
}

std::string seconds_text(double s) {
  if (s < 1e-3) return fmt::format("{:.3g} us", s * 1e6);
  return s < 1 ? fmt::format("{:.3g} ms", s * 1e3) : fmt::format("{:.3g} s", s);
}

std::string why_not(const Kernel& kernel, const Problem& p, const Device& device, const Hints& hints) {
  if (!kernel.automatic && !hints.kernels) return "never chosen unless named";
  if (!allowed(hints.kernels, kernel.name)) return fmt::format("only {} may be chosen", hints.kernels);
  if (hints.sample_pairs && kernel.automatic)
    return "hints ask for a sample of pairs, which only reference kernels take";
  return kernel.refuse(p, device);
}

std::string small_text(const Kernel& kernel, double flops) {
  return fmt::format("leaves {} to a kernel with narrower registers; {} are worth waking its own",
                     scaled(flops, "FLOP"), scaled(kernel.least_flops, "FLOP"));
}

}  // namespace

std::string threads_text(int threads) {
  return threads == 1 ? "1 thread" : fmt::format("{} threads", threads);
}

int64_t add_region(Plan& plan, const char* name, int64_t bytes) {
  const int64_t offset = plan.workspace_bytes;
  plan.regions.push_back({name, offset, bytes});
  plan.workspace_bytes = rules::round_up(offset + bytes, 64);
  return offset;
}

int64_t region_offset(const Plan& plan, const char* name) {
  for (const Region& r : plan.regions)
    if (r.name == name) return r.offset;
  return 0;
}

Plan choose(std::span<const Kernel* const> kernels, const Problem& p, const Device& device, const Hints& hints) {
  check(p);
  // More threads than that no machine has; each would be made, or the process ended by its runtime.
  require(hints.threads >= 0 && hints.threads <= 1024, "hints.threads is {}; it must be from 0 (all) to 1024.",
          hints.threads);
  require(hints.tile_rows >= 0 && hints.tile_rows <= 1024 && hints.tile_keys >= 0 && hints.tile_keys <= 1024,
          "hints.tile_rows and tile_keys are {} and {}; they must be from 0 (the kernel's choice) to 1024.",
          hints.tile_rows, hints.tile_keys);
  require(hints.sample_pairs >= 0, "hints.sample_pairs is {}; it must be at least 0.", hints.sample_pairs);
  require(!hints.has_workspace_limit || hints.workspace_limit >= 0,
          "hints.workspace_limit is {}; it must be at least 0 bytes.", hints.workspace_limit);
  const auto named = [&](const Kernel* kernel) { return allowed(hints.kernels, kernel->name); };
  if (std::none_of(kernels.begin(), kernels.end(), named)) {
    std::string known;
    for (const Kernel* kernel : kernels) known += (known.empty() ? "" : ", ") + std::string(kernel->name);
    invalid("kernels is \"{}\"; it must name some of {}, or their prefixes.", hints.kernels, known);
  }
  const Cost work = cost(p, device);
  // A row's bits may depend on the kernel, so no choice by size where they must not depend on the batch.
  const auto leaves = [&](const Kernel* kernel) {
    return !hints.kernels && !p.batch_invariant && p.pass != TESSERA_APPEND && work.flops < kernel->least_flops;
  };
  Plan chosen;
  std::vector<Reason> reasons;
  for (const Kernel* kernel : kernels) {
    std::string why = why_not(*kernel, p, device, hints);
    if (why.empty() && chosen.kernel && !leaves(chosen.kernel)) why = "would accept, stands later in the list";
    if (why.empty()) {
      Plan plan;
      plan.problem = p;
      plan.device = device;
      plan.kernel = kernel;
      plan.threads = std::clamp(hints.threads ? hints.threads : device.threads, 1, 1024);
      plan.sample_pairs = hints.sample_pairs;
      kernel->fill(plan, hints);
      if (hints.has_workspace_limit && plan.workspace_bytes > hints.workspace_limit)
        why = fmt::format(
            "needs {} bytes of workspace with {}, the limit is {}; fewer threads or smaller tiles need less",
            plan.workspace_bytes, threads_text(plan.threads), hints.workspace_limit);
      if (why.empty()) {
        if (chosen.kernel) reasons.push_back({chosen.kernel->name, small_text(*chosen.kernel, work.flops)});
        chosen = std::move(plan);
      }
    }
    if (!why.empty()) reasons.push_back({kernel->name, why});
  }
  if (!chosen.kernel) {
    std::string message = fmt::format("no kernel answers \"{}\" on device {}:", print(p), device.name);
    for (const Reason& r : reasons) message += fmt::format("\n  {}: {}", r.kernel, r.why);
    throw Error(TESSERA_UNSUPPORTED, message);
  }
  chosen.reasons = std::move(reasons);
  chosen.cost = work;
  return chosen;
}

std::string to_text(const Plan& plan) {
  const Device& d = plan.device;
  const std::string where = d.kind == TESSERA_GPU ? fmt::format("sm_{}, {} SMs", d.sm_arch, d.sms)
                                                  : fmt::format("{}, {}", isa_text(d.isa), threads_text(plan.threads));
  std::string text = plan.levels.empty() ? print(plan.problem) + "\n" : "";
  for (size_t n = 0; n < plan.levels.size(); ++n)
    text += fmt::format("level {}: {}\n", n, print(plan.levels[n].problem));
  text += fmt::format("  device     {} ({})\n", d.name, where);
  for (size_t i = 0; i < plan.steps.size(); ++i)
    text += fmt::format("  {} {:<8} {}  {}\n", i + 1, plan.steps[i].name, plan.kernel->name, plan.steps[i].text);
  text += fmt::format("  workspace  {}", plan.workspace_bytes ? bytes_text(plan.workspace_bytes) : "none");
  for (size_t i = 0; i < plan.regions.size(); ++i)
    text += fmt::format("{}{} {}", i ? ", " : " (", plan.regions[i].name, bytes_text(plan.regions[i].bytes));
  text += plan.regions.empty() ? "\n" : ")\n";
  text += fmt::format("  work       reads {}, writes {}, {}", bytes_text(plan.cost.bytes_read),
                      bytes_text(plan.cost.bytes_written), scaled(plan.cost.flops, "FLOP"));
  if (plan.cost.seconds > 0) text += fmt::format(", roofline {}", seconds_text(plan.cost.seconds));
  text += fmt::format("; a score matrix would take {}\n", bytes_text(plan.cost.score_bytes));
  for (const Reason& r : plan.reasons) text += fmt::format("  not chosen {}: {}\n", r.kernel, r.why);
  return text;
}

void check_pointers(const Problem& p, const Bindings& bound) {
  std::array<int, TESSERA_NAMES> names;  // of operands that hold something
  size_t count = 0;
  for (int name = 0; name < TESSERA_NAMES; ++name)
    if (has(p, name) && elements(operand(p, name)) > 0) names[count++] = name;
  const std::span present(names.data(), count);
  const auto is_key_or_value = [](int name) { return name == TESSERA_K || name == TESSERA_V; };

  for (const int name : present) {
    const auto address = reinterpret_cast<uintptr_t>(bound.data[name]);
    const auto bytes = static_cast<uintptr_t>(dtype_bytes(operand(p, name).dtype));
    require(address != 0, "{} is bound to NULL; the plan was made with it. Bind its first element.",
            operand_row(name).text);
    require(address % bytes == 0, "{} is at address {:#x}; a {} must stand at a multiple of {} bytes. Copy it.",
            operand_row(name).text, address, rules::dtype_rows[operand(p, name).dtype].text, bytes);
    if (!is_written(role(p, name))) continue;
    for (const int other : present) {
      const bool one_memory = p.cache.v_in_k && is_key_or_value(name) && is_key_or_value(other);
      require(other == name || one_memory || bound.data[other] != bound.data[name],
              "{} and {} are bound to one address; what is written must not be read. Give {} its own memory.",
              operand_row(name).text, operand_row(other).text, operand_row(name).text);
    }
  }
  require(!p.cache.v_in_k || bound.data[TESSERA_K] == bound.data[TESSERA_V],
          "k and v are bound to two addresses; cache.v_in_k says that v lies in k. Bind both to k's.");
}

void check_workspace(const Plan& plan, const Bindings& bound) {
  require(plan.workspace_bytes <= bound.workspace_bytes,
          "workspace_bytes is {}; the plan needs {}. Allocate what tessera_plan_get says.", bound.workspace_bytes,
          plan.workspace_bytes);
  const auto workspace = reinterpret_cast<uintptr_t>(bound.workspace);
  require(plan.workspace_bytes == 0 || (workspace != 0 && workspace % 64 == 0),
          "workspace is at address {:#x}; it must stand at a multiple of 64 bytes. Use aligned_alloc(64, ...).",
          workspace);
}

void check_bindings(const Plan& plan, const Bindings& bound) {
  check_pointers(plan.problem, bound);
  check_workspace(plan, bound);
  if (plan.device.kind == TESSERA_CPU) check_lengths(plan.problem, bound);
}

}  // namespace tessera::core
