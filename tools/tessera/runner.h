// Plans and runs of a case, their time and their memory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "buffer.h"
#include "case.h"
#include "gpu.h"

namespace tessera::tools {

// What a caller may choose; speed only.
struct Choice {
  std::string kernels = {};  // names or prefixes, comma between; empty: the planner's
  int threads = 0;           // 0: all
  int tile_rows = 0;         // 0: the kernel's own choice
  int tile_keys = 0;
  std::string device = {};  // empty: cuda:0 if the kernels begin with cuda, else host
  std::optional<int64_t> workspace_limit = {};
  int64_t sample_pairs = 0;  // reference kernels only
};

tessera_device find_device(const std::string& name);
std::string device_of(const Choice& choice);

// Owns a tessera_plan.
class Plan {
 public:
  Plan(const tessera_problem& problem, const Choice& choice);
  const tessera_plan* get() const { return plan_.get(); }
  const tessera_plan_facts& facts() const { return facts_; }
  std::string text(const Line& line) const;  // under the line: the problem alone has no lists and no seed
  std::vector<std::pair<std::string, std::string>> refused() const;  // kernel, reason

 private:
  struct Free {
    void operator()(tessera_plan* plan) const { tessera_plan_free(plan); }
  };
  std::unique_ptr<tessera_plan, Free> plan_;
  tessera_plan_facts facts_{};
};

// A plan with its workspace, 0xFF bytes, bound to a case; on a GPU with the case's operands there.
class Runner {
 public:
  Runner(const Case& c, const Choice& choice) : Runner(c, c.problem(), choice) {}
  Runner(const Case& c, const tessera_problem& problem, const Choice& choice);
  const Plan& plan() const { return plan_; }
  // Seconds. On a GPU results are waited for and back in the case; `bench` leaves them there and asks the device for
  // the time of a burst of runs.
  double run();
  double bench();

 private:
  void call_library();

  Plan plan_;
  std::unique_ptr<GpuCase> gpu_;
  Buffer workspace_;
  tessera_bindings bindings_;
  int burst_ = 0;
};

// The out and lse that a backward case reads, from a forward run on its inputs.
void run_forward_of(const Case& c, const Choice& choice);

struct Judgement {
  bool ok = false;
  std::vector<tessera_verdict> verdicts;
};
Judgement judge(const Case& c, int64_t sample_pairs);

// Contract section 9 allows twice the naive error, which for a result of few numbers may be small by luck: a few
// correct results in a hundred miss by a little. Then eight other random inputs are judged together, as one tensor
// eight times as large: a fault fails on any data. `missed` itself where it is no near miss.
Judgement judge_with_others(const Line& line, const Choice& choice, int64_t sample_pairs, const Judgement& missed);

// Which share of a large case is judged: one (batch, KV head) pair instead of all (0). Gradients that are sums over all
// pairs cannot be judged by a share.
int64_t sample_for(const tessera_problem& problem);

// The most memory that this process held since the last `forget_peak`, bytes.
int64_t peak_memory();
void forget_peak();

}  // namespace tessera::tools
