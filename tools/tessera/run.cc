// tessera run: attend the tensors of a file.
#include <CLI/CLI.hpp>
#include <optional>

#include "bind.h"
#include "cache.h"
#include "files.h"
#include "progress.h"
#include "verb.h"

namespace tessera::tools {
namespace {

struct Options {
  bool json = false;
  std::string line, out;
  std::vector<std::string> in;
  const CLI::Option* random = nullptr;  // given or not: its seed may be left out
  uint64_t seed = 0;
  bool verify = false;
  int64_t sample = 0;
  Choice choice;
};

void fill(Case& c, const Options& o, Progress& progress) {
  const bool random = o.random->count() > 0;
  if (!o.in.empty() && random) throw invalid("--in and --random were both given; inputs come from one of them");
  if (!o.in.empty()) {
    const TensorFiles files(o.in);
    if (const std::string notes = unused_inputs(c, files); !notes.empty()) progress.print(notes, stderr);
    return bind_files(c, files);
  }
  if (!random)
    throw invalid("no inputs: give --in FILE with the tensors of the line, or --random [SEED] to try it out");
  fill_random(c, o.seed);
  if (c.problem().pass != TESSERA_BACKWARD) return;
  progress.label("running forward, which backward reads");
  run_forward_of(c, {.threads = o.choice.threads});
}

int perform(const Options& o) {
  const Line line(o.line);
  if (!o.out.empty()) check_writable(o.out, o.in);  // rather than after a long run
  Progress progress("filling", 0, !o.json);
  Case c(line);
  fill(c, o, progress);
  Runner runner(c, o.choice);
  const tessera_plan_facts& f = runner.plan().facts();
  if (!o.json) progress.print(runner.plan().text(line));

  forget_peak();
  progress.label(std::string("running ") + f.kernel);
  const std::optional<Guard> guard = o.verify ? std::optional<Guard>(c) : std::nullopt;
  const double seconds = runner.run();
  const int64_t peak = peak_memory();
  if (guard) guard->check();

  std::optional<Judgement> judgement;
  if (o.verify) {
    progress.label("judging");
    judgement = judge(c, o.sample);
  }
  if (!o.out.empty()) {
    progress.label("writing");
    std::vector<int> results = outputs(c.problem());
    for (const int name : updates(c.problem())) results.push_back(name);
    write_tensors(o.out, to_tensors(c, results), {{"line", line.text()}, {"kernel", f.kernel}});
  }

  if (o.json) {
    Json result{{"line", line.text()},
                {"engine", f.engine},
                {"kernel", f.kernel},
                {"seconds", seconds},
                {"peak_bytes", peak},
                {"workspace_bytes", f.workspace_bytes},
                {"out", o.out.empty() ? Json() : Json(o.out)}};
    if (judgement) {
      result["ok"] = judgement->ok;
      result["tensors"] = verdicts_json(judgement->verdicts);
    }
    print_json(result);
  } else {
    progress.print(fmt::format("  took       {}, {}/s; peak memory {}, {} of it operands\n", seconds_text(seconds),
                               flops_text(f.flops / seconds), bytes_text(static_cast<double>(peak)),
                               bytes_text(static_cast<double>(c.bytes()))));
    if (!o.out.empty()) progress.print(fmt::format("  wrote      {}\n", o.out));
    if (judgement) progress.print(verdicts_table(judgement->verdicts));
  }
  return judgement && !judgement->ok ? TESSERA_WRONG : TESSERA_OK;
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  std::shared_ptr<Options> o;
  CLI::App* verb = add_verb(app, action, "run", "Attend the tensors of a safetensors file",
                            "tessera run \"forward f32 b4 h12 q30 k30 d32 mask=exclude_keys\" --in in.safetensors"
                            " --out out.safetensors --verify",
                            perform, o);
  verb->add_option("LINE", o->line, "a problem as one line (ADDING.md)")->required();
  verb->add_option("--in", o->in,
                   "safetensors file of the inputs: q k v ...; backward also out lse dout; may be repeated")
      ->allow_extra_args(false);
  verb->add_option("--out", o->out, "safetensors file to write: out lse, or dq dk dv ...");
  o->random = verb->add_option("--random", o->seed, "random inputs instead of --in, of this seed (0)")
                  ->expected(0, 1)
                  ->check(whole<uint64_t>());
  verb->add_flag("--verify", o->verify, "judge the result by the oracle; exit code 1 if it is wrong");
  verb->add_option("--sample", o->sample, "verify only so many (batch, KV head) pairs; 0: all")
      ->check(whole<int64_t>());
  verb->add_option("--engine", o->choice.kernels, engine_help);
  verb->add_option("--device", o->choice.device, device_help)->check(place_to_run());
  verb->add_option("--threads", o->choice.threads, "0: all")->check(whole(most_threads));
  verb->add_option("--workspace", o->choice.workspace_limit, "most workspace bytes")->check(whole<int64_t>());
}

}  // namespace tessera::tools
