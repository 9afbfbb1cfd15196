#include "runner.h"

#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "files.h"
#include "status.h"

namespace tessera::tools {

tessera_device find_device(const std::string& name) {
  tessera_device device{};
  device.size = sizeof device;
  tessera_error error = fresh_error();
  call(tessera_device_find(name.c_str(), &device, &error), error);
  return device;
}

std::string device_of(const Choice& choice) {
  if (!choice.device.empty()) return choice.device;
  return choice.kernels.starts_with("cuda") ? "cuda:0" : "host";
}

Plan::Plan(const tessera_problem& problem, const Choice& choice) {
  const tessera_device device = find_device(device_of(choice));
  tessera_hints hints;
  tessera_hints_init(&hints);
  hints.kernels = choice.kernels.empty() ? nullptr : choice.kernels.c_str();
  hints.threads = choice.threads;
  hints.tile_rows = choice.tile_rows;
  hints.tile_keys = choice.tile_keys;
  hints.has_workspace_limit = choice.workspace_limit.has_value();
  hints.workspace_limit = choice.workspace_limit.value_or(0);
  hints.sample_pairs = choice.sample_pairs;
  tessera_plan* plan = nullptr;
  tessera_error error = fresh_error();
  call(tessera_plan_make(&problem, &device, &hints, &plan, &error), error);
  plan_.reset(plan);
  facts_.size = sizeof facts_;
  call(tessera_plan_get(plan, &facts_, &error), error);
}

std::string Plan::text(const Line& line) const {
  std::string text(tessera_plan_print(get(), nullptr, 0), '\0');
  tessera_plan_print(get(), text.data(), text.size());
  text.resize(std::strlen(text.c_str()));
  return text.replace(0, text.find('\n'), line.text());
}

std::vector<std::pair<std::string, std::string>> Plan::refused() const {
  std::vector<std::pair<std::string, std::string>> all;
  const char* reason = nullptr;
  for (int32_t n = 0; const char* kernel = tessera_plan_reason(get(), n, &reason); ++n)
    all.emplace_back(kernel, reason);
  return all;
}

Runner::Runner(const Case& c, const tessera_problem& problem, const Choice& choice)
    : plan_(problem, choice), bindings_(c.bindings()) {
  const int64_t bytes = plan_.facts().workspace_bytes;
  if (is_gpu(device_of(choice))) {
    gpu_ = std::make_unique<GpuCase>(c, problem, device_of(choice));
    bindings_ = gpu_->bindings();
    bindings_.workspace = gpu_->workspace(bytes);
    bindings_.workspace_bytes = bytes;
    return;
  }
  try {
    workspace_ = allocate(static_cast<size_t>(bytes), 64);
  } catch (const std::bad_alloc&) {
    throw failed("workspace of {} bytes: the machine does not give it; use fewer threads or --workspace", bytes);
  }
  std::memset(workspace_.memory.get(), 0xFF, workspace_.bytes);  // its contents must not matter
  bindings_.workspace = workspace_.memory.get();
  bindings_.workspace_bytes = bytes;
}

void Runner::call_library() {
  tessera_error error = fresh_error();
  call(tessera_run(plan_.get(), &bindings_, nullptr, &error), error);
}

double Runner::run() {
  const auto begin = std::chrono::steady_clock::now();
  call_library();
  if (gpu_) gpu_->wait();
  const auto end = std::chrono::steady_clock::now();
  if (gpu_) gpu_->download();
  return std::chrono::duration<double>(end - begin).count();
}

// A burst of some 30 ms: the clock follows the load, and short bursts run at the one their neighbour left.
double Runner::bench() {
  if (!gpu_) return run();
  if (burst_ == 0) {
    const double once = gpu_->time([&] { call_library(); });
    burst_ = static_cast<int>(std::clamp(0.03 / std::max(once, 1e-6), 1.0, 3000.0));
  }
  return gpu_->time([&] {
    for (int n = 0; n < burst_; ++n) call_library();
  }) / burst_;
}

void run_forward_of(const Case& c, const Choice& choice) {
  Runner(c, forward_of(c.problem()), choice).run();
}

Judgement judge(const Case& c, int64_t sample_pairs) {
  std::vector<tessera_verdict> verdicts(TESSERA_NAMES);
  for (tessera_verdict& verdict : verdicts) verdict.size = sizeof verdict;
  int32_t count = 0;
  tessera_error error = fresh_error();
  const int32_t code = tessera_verify(&c.problem(), &c.bindings(), sample_pairs, verdicts.data(),
                                      static_cast<int32_t>(verdicts.size()), &count, &error);
  if (code != TESSERA_WRONG) call(code, error);
  verdicts.resize(static_cast<size_t>(count));
  return {code == TESSERA_OK, std::move(verdicts)};
}

namespace {

bool near_miss(const tessera_verdict& v) {
  const bool of_rows = v.name == TESSERA_LSE || v.name == TESSERA_MAX_SCORE;  // whose bound owes nothing to naive
  return v.ok || (v.nonfinite_equal && !of_rows && v.max <= 8 * v.bound);
}

void pool(tessera_verdict& all, const tessera_verdict& one) {
  const auto squares = [](double rms, int64_t n) { return rms * rms * static_cast<double>(n); };
  const auto both = [&](double a, double b) {
    return std::sqrt((squares(a, all.elements) + squares(b, one.elements)) /
                     static_cast<double>(std::max<int64_t>(1, all.elements + one.elements)));
  };
  all.rms = both(all.rms, one.rms);
  all.naive_rms = both(all.naive_rms, one.naive_rms);
  all.elements += one.elements;
  all.max = std::max(all.max, one.max);
  all.naive_max = std::max(all.naive_max, one.naive_max);
  all.bound = std::max(all.bound, one.bound);
  all.bound_rms = std::max(all.bound_rms, one.bound_rms);
  all.nonfinite_equal &= one.nonfinite_equal;
  all.ok = all.nonfinite_equal && all.max <= all.bound && (all.bound_rms == 0 || all.rms <= all.bound_rms) &&
           (one.ok || near_miss(one));
}

}  // namespace

Judgement judge_with_others(const Line& line, const Choice& choice, int64_t sample_pairs, const Judgement& missed) {
  if (!std::all_of(missed.verdicts.begin(), missed.verdicts.end(), near_miss)) return missed;
  Judgement all;
  for (uint64_t seed = 1001; seed <= 1008; ++seed) {
    Case c(line);
    fill_random(c, seed);
    poison(c);
    if (c.problem().pass == TESSERA_BACKWARD) run_forward_of(c, choice);
    Runner(c, choice).run();
    const std::vector<tessera_verdict> one = judge(c, sample_pairs).verdicts;
    if (all.verdicts.empty()) all.verdicts = one;
    for (size_t n = 0; seed > 1001 && n < one.size(); ++n) {
      const bool rows_ok = all.verdicts[n].ok || near_miss(all.verdicts[n]);
      pool(all.verdicts[n], one[n]);
      if (!rows_ok) all.verdicts[n].ok = 0;
    }
  }
  all.ok = std::all_of(all.verdicts.begin(), all.verdicts.end(), [](const tessera_verdict& v) { return v.ok != 0; });
  return all;
}

int64_t sample_for(const tessera_problem& p) {
  for (const int name : {TESSERA_DBIAS, TESSERA_DSLOPES, TESSERA_DSINKS})
    if (p.operand[name].dtype != TESSERA_ABSENT) return 0;
  const double work = static_cast<double>(p.batch) * static_cast<double>(p.heads_q) * static_cast<double>(p.len_q) *
                      static_cast<double>(p.len_k) * static_cast<double>(p.dim + p.dim_v);
  return work > 2e9 ? 1 : 0;  // the oracle takes about a second for 10^9
}

int64_t peak_memory() {
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

void forget_peak() {
  ::malloc_trim(0);
  // proc(5): 5 resets the peak resident set size. Where it may not be written the peak stays that of the whole process.
  if (const File file{std::fopen("/proc/self/clear_refs", "w")}) std::fputs("5", file.get());
}

}  // namespace tessera::tools
