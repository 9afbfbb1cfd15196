// tessera check: are the answers right? Random inputs, NaN where nothing may look, judged by the oracle.
#include <algorithm>
#include <optional>

#include "cache.h"
#include "progress.h"
#include "verb.h"

namespace tessera::tools {
namespace {

struct Options {
  bool json = false;
  std::vector<std::string> lines;
  uint64_t seed = 0;
  std::optional<int64_t> sample;
  Choice choice;
};

struct Row {
  int code = TESSERA_OK;
  std::string line;
  std::string engine, kernel;
  std::vector<tessera_verdict> verdicts;
  std::string message;
};

Row check(const Source& source, const Options& o) {
  Row row;
  row.line = source.text;
  try {
    const Line line(source.text);
    row.line = line.text();
    Choice choice = o.choice;
    const int64_t sample = o.sample.value_or(sample_for(line.problem()));
    if (choice.kernels.starts_with("reference")) choice.sample_pairs = sample;
    const Plan plan(line.problem(), choice);  // before memory is filled for a problem that nobody answers
    row.engine = plan.facts().engine;
    row.kernel = plan.facts().kernel;
    Case c(line);
    prepare(c, o.seed, choice.threads);
    const Guard guard(c);
    Runner(c, choice).run();
    guard.check();
    Judgement judgement = judge(c, sample);
    if (!judgement.ok) judgement = judge_with_others(line, choice, sample, judgement);
    row.code = judgement.ok ? TESSERA_OK : TESSERA_WRONG;
    row.verdicts = std::move(judgement.verdicts);
  } catch (...) {
    const Error error = caught();
    row.code = error.code;
    row.message = source.place + error.what();
  }
  return row;
}

Json json(const Row& row) {
  Json object{{"line", row.line},
              {"engine", row.engine},
              {"kernel", row.kernel},
              {"ok", row.code == TESSERA_OK},
              {"tensors", verdicts_json(row.verdicts)}};
  if (!row.message.empty()) object["error"] = error_json(row.code, row.message);
  return object;
}

std::string text(const Row& row, const Source& source) {
  constexpr std::array words{"ok", "WRONG", "invalid", "unsupported", "failed"};
  const std::string detail = row.message.empty() ? verdicts_brief(row.verdicts) : one_line(row.message);
  const std::string place = row.message.empty() ? source.place : "";
  return fmt::format("{:<12}{:<18}{}{}  | {}\n", words[static_cast<size_t>(row.code)],
                     row.kernel.empty() ? "-" : row.kernel, place, row.line, detail);
}

int perform(const Options& o) {
  const std::vector<Source> sources = read_sources(o.lines);
  Progress progress("checking", static_cast<int64_t>(sources.size()), !o.json);
  Json results = Json::array();
  int worst = TESSERA_OK;
  int64_t passed = 0, wrong = 0;
  for (const Source& source : sources) {
    const Row row = check(source, o);
    worst = worse(row.code, worst);
    ++(row.code == TESSERA_OK ? passed : wrong);
    progress.step();
    if (o.json) results.push_back(json(row));
    else progress.print(text(row, source));
  }
  if (o.json) print_results(results);
  else progress.print(fmt::format("{} passed, {} failed\n", passed, wrong));
  return exit_code(worst);
}

}  // namespace

void add_check(CLI::App& app, Action& action) {
  std::shared_ptr<Options> o;
  CLI::App* verb =
      add_verb(app, action, "check", "Check problems on random inputs against the oracle",
               "tessera check \"backward f32 b2 h6/2 q127 k300 d80/48 mask=window(64,0)\" cases/smoke.txt", perform, o);
  verb->add_option("LINE", o->lines, "problem lines, files of them, or - for stdin")->required();
  verb->add_option("--engine", o->choice.kernels, engine_help);
  verb->add_option("--device", o->choice.device, device_help)->check(place_to_run());
  verb->add_option("--seed", o->seed, "of the random inputs")->check(whole<uint64_t>());
  verb->add_option("--sample", o->sample, "judge only so many (batch, KV head) pairs; 0: all; large problems: 1")
      ->check(whole<int64_t>());
  verb->add_option("--threads", o->choice.threads, "0: all")->check(whole(most_threads));
}

}  // namespace tessera::tools
