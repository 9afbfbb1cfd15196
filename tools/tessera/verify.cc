// tessera verify: judge outputs that somebody else computed.
#include <algorithm>

#include "bind.h"
#include "progress.h"
#include "verb.h"

namespace tessera::tools {
namespace {

struct Options {
  bool json = false;
  std::string line, got;
  std::vector<std::string> in;
  int64_t sample = 0;
};

int perform(const Options& o) {
  const Line line(o.line);
  Progress progress("filling", 0, !o.json);
  Case c(line);
  const TensorFiles files(o.in);
  if (const std::string notes = unused_inputs(c, files); !notes.empty()) progress.print(notes, stderr);
  bind_files(c, files);
  const TensorFile got(o.got);
  std::vector<int> judged;
  std::string names;
  std::vector<int> results = outputs(c.problem());
  for (const int name : updates(c.problem())) results.push_back(name);
  for (const int name : results) {
    const std::string text = result_text(c.problem(), name);
    names += (names.empty() ? "" : ", ") + text;
    if (!got.has(text)) continue;
    bind_tensor(c, name, got, text);
    judged.push_back(name);
  }
  if (judged.empty()) throw invalid("{}: has no output of the line; it needs at least one of: {}", o.got, names);

  progress.label("judging");
  std::vector<tessera_verdict> verdicts = judge(c, o.sample).verdicts;
  // Outputs that the file does not have were judged as NaN: their verdicts say nothing.
  std::erase_if(verdicts, [&](const tessera_verdict& v) {
    return std::find(judged.begin(), judged.end(), v.name) == judged.end();
  });
  if (verdicts.size() != judged.size())  // what nobody judged is not right
    throw invalid("--sample {}: a sample cannot judge all outputs of {}; leave --sample out", o.sample, o.got);
  const bool ok = std::all_of(verdicts.begin(), verdicts.end(), [](const tessera_verdict& v) { return v.ok != 0; });
  if (o.json) print_json({{"line", line.text()}, {"ok", ok}, {"tensors", verdicts_json(verdicts)}});
  else progress.print(verdicts_table(verdicts));
  return ok ? TESSERA_OK : TESSERA_WRONG;
}

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  std::shared_ptr<Options> o;
  CLI::App* verb = add_verb(
      app, action, "verify", "Judge outputs that somebody else computed (docs/contract.md, 9)",
      "tessera verify \"forward bf16 h8 q128 k128 d64\" --in in.safetensors --got theirs.safetensors", perform, o);
  verb->add_option("LINE", o->line, "a problem as one line (ADDING.md)")->required();
  verb->add_option("--in", o->in, "safetensors file of the inputs; may be repeated")
      ->required()
      ->allow_extra_args(false);
  verb->add_option("--got", o->got, "safetensors file of the outputs; those it has are judged")->required();
  verb->add_option("--sample", o->sample, "judge only so many (batch, KV head) pairs; 0: all")->check(whole<int64_t>());
}

}  // namespace tessera::tools
