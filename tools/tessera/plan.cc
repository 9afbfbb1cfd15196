// tessera plan: how a problem would be answered, and why so.
#include "verb.h"

namespace tessera::tools {
namespace {

struct Options {
  bool json = false;
  std::string line;
  Choice choice;
};

int perform(const Options& o) {
  const Line line(o.line);
  const Plan plan(line.problem(), o.choice);
  if (!o.json) {
    fmt::print("{}", plan.text(line));
    return 0;
  }
  const tessera_plan_facts& f = plan.facts();
  Json steps = Json::array(), refused = Json::array();
  for (int32_t n = 0; const char* step = tessera_plan_step(plan.get(), n); ++n) steps.push_back(step);
  for (const auto& [kernel, reason] : plan.refused()) refused.push_back({{"kernel", kernel}, {"reason", reason}});
  print_json({{"line", line.text()},
              {"device", f.device},
              {"engine", f.engine},
              {"kernel", f.kernel},
              {"threads", f.threads},
              {"tile_rows", f.tile_rows},
              {"tile_keys", f.tile_keys},
              {"workspace_bytes", f.workspace_bytes},
              {"bytes_read", f.bytes_read},
              {"bytes_written", f.bytes_written},
              {"score_bytes_avoided", f.score_bytes_avoided},
              {"flops", f.flops},
              {"roofline_seconds", f.roofline_seconds},
              {"steps", steps},
              {"refused", refused}});
  return 0;
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  std::shared_ptr<Options> o;
  CLI::App* verb =
      add_verb(app, action, "plan", "Say how a problem would be answered, and why so",
               "tessera plan \"forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal\" --device host", perform, o);
  verb->add_option("LINE", o->line, "a problem as one line (ADDING.md)")->required();
  verb->add_option("--device", o->choice.device, "host, or a known device (tessera info lists them)");
  verb->add_option("--engine", o->choice.kernels, engine_help);
  verb->add_option("--threads", o->choice.threads, "0: all")->check(whole(most_threads));
  verb->add_option("--workspace", o->choice.workspace_limit, "most workspace bytes")->check(whole<int64_t>());
}

}  // namespace tessera::tools
