// tessera bench: how fast, beside whom, and only if right.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <sstream>

#include "cache.h"
#include "manifest.h"
#include "materialised.h"
#include "peak.h"
#include "progress.h"
#include "verb.h"

namespace tessera::tools {
namespace {

struct Options {
  bool json = false;
  std::vector<std::string> lines;
  std::string engines;
  int threads = 0;
  double seconds = 1;
  bool peak = false;
};

constexpr const char* materialised = "materialised";

// One way to answer the line: an engine of the library, or the yardstick.
struct Contestant {
  std::string engine, kernel;
  std::unique_ptr<Runner> runner;
  std::unique_ptr<Materialised> yardstick;
  int64_t workspace = 0, peak = 0;
  int code = TESSERA_OK;
  std::string message;
  std::vector<tessera_verdict> verdicts;
  std::vector<double> times;

  double run() { return runner ? runner->run() : yardstick->run(); }
  double bench() { return runner ? runner->bench() : yardstick->run(); }
};

// What a line costs is the same for everybody; any kernel's plan tells, the oracle's at the least.
tessera_plan_facts cost_of(const tessera_problem& problem) {
  try {
    return Plan(problem, {}).facts();
  } catch (const Error& error) {
    if (error.code != TESSERA_UNSUPPORTED) throw;
    return Plan(problem, {.kernels = "reference.oracle"}).facts();
  }
}

Contestant enter(const Case& c, const std::string& engine, int threads, int64_t sample) {
  Contestant one;
  one.engine = one.kernel = engine;
  try {
    forget_peak();
    if (engine == materialised) {
      one.yardstick = std::make_unique<Materialised>(c, threads);
      one.workspace = one.yardstick->bytes();
    } else {
      one.runner = std::make_unique<Runner>(c, Choice{.kernels = engine, .threads = threads});
      one.engine = one.runner->plan().facts().engine;
      one.kernel = one.runner->plan().facts().kernel;
      one.workspace = one.runner->plan().facts().workspace_bytes;
    }
    one.run();  // which also warms up
    one.peak = peak_memory();
    Judgement judgement = judge(c, sample);
    one.verdicts = std::move(judgement.verdicts);
    one.code = judgement.ok ? TESSERA_OK : TESSERA_WRONG;
    if (!judgement.ok) one.message = "wrong: " + verdicts_brief(one.verdicts);
  } catch (...) {
    const Error error = caught();
    one.code = error.code;
    one.message = error.what();
  }
  return one;
}

// Rounds go over all contestants, so that a machine that slows down slows all.
void race(std::vector<Contestant>& all, double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  std::vector<Contestant*> able;
  for (Contestant& one : all)
    if (one.code == TESSERA_OK) able.push_back(&one);
  if (able.empty()) return;
  for (int round = 0; round < 3 || elapsed() < seconds * static_cast<double>(able.size()); ++round)
    for (Contestant* one : able) one->times.push_back(one->bench());
  for (Contestant* one : able) std::sort(one->times.begin(), one->times.end());
}

double quantile(const std::vector<double>& sorted, double share) {
  const double place = std::ceil(share * static_cast<double>(sorted.size())) - 1;
  return sorted[static_cast<size_t>(std::max(0.0, place))];
}

Json json(const Contestant& one, const std::string& line, const tessera_plan_facts& cost, const Json& facts) {
  Json row{{"line", line}, {"engine", one.engine}, {"kernel", one.kernel}};
  if (!one.times.empty()) {
    const double median = quantile(one.times, 0.5);
    row["median_us"] = median * 1e6;
    row["p95_us"] = quantile(one.times, 0.95) * 1e6;
    row["gflops"] = cost.flops / median * 1e-9;
    row["gbs"] = static_cast<double>(cost.bytes_read + cost.bytes_written) / median * 1e-9;
    row["rounds"] = one.times.size();
    row["peak_bytes"] = one.peak;
    row["workspace_bytes"] = one.workspace;
  }
  row["ok"] = one.code == TESSERA_OK;
  if (!one.message.empty()) row["error"] = error_json(one.code, one.message);
  row.update(facts);
  return row;
}

std::string text(const Json& row) {
  const std::string kernel = row["kernel"].get<std::string>();
  if (!row.contains("median_us"))
    return fmt::format("  {:<18}{}\n", kernel, one_line(row["error"]["message"].get<std::string>()));
  const auto number = [&](const char* key) { return row[key].get<double>(); };
  return fmt::format("  {:<18}{:>12}{:>12}{:>15}{:>10.2f}{:>12}{:>12}\n", kernel,
                     seconds_text(number("median_us") * 1e-6), seconds_text(number("p95_us") * 1e-6),
                     flops_text(number("gflops") * 1e9) + "/s", number("gbs"), bytes_text(number("peak_bytes")),
                     bytes_text(number("workspace_bytes")));
}

std::vector<std::string> split(const std::string& engines) {
  std::vector<std::string> all;
  std::istringstream list(engines);
  for (std::string engine; std::getline(list, engine, ',');) all.push_back(engine);
  return all.empty() ? std::vector<std::string>{""} : all;  // "": the planner's choice
}

// The rows of one line; `worst` gathers the exit code.
std::vector<Json> measure(const Source& source, const Options& o, int threads, const Json& facts, int& worst) {
  std::vector<Contestant> all;
  std::string name = source.text;
  std::unique_ptr<Case> c;  // outlives the contestants' bindings
  tessera_plan_facts cost{};
  try {
    const Line line(source.text);
    name = line.text();
    cost = cost_of(line.problem());
    c = std::make_unique<Case>(line);
    prepare(*c, 0, threads);
    for (const std::string& engine : split(o.engines)) {
      for (const int output : outputs(c->problem())) c->wipe(output);  // or the former's answer would be judged
      wipe_new(*c);
      all.push_back(enter(*c, engine, threads, sample_for(c->problem())));
    }
    race(all, o.seconds);
  } catch (...) {
    const Error error = caught();
    all.clear();
    Contestant nobody;
    nobody.engine = nobody.kernel = o.engines.empty() ? "-" : o.engines;
    nobody.code = error.code;
    nobody.message = source.place + error.what();
    all.push_back(std::move(nobody));
  }
  std::vector<Json> rows;
  for (const Contestant& one : all) {
    worst = worse(one.code, worst);
    rows.push_back(json(one, name, cost, facts));
  }
  return rows;
}

int perform(const Options& o) {
  const int threads = o.threads > 0 ? o.threads : find_device("host").threads;
  Json facts = manifest(threads);
  if (o.peak) facts["fma_peak_gflops"] = std::stod(fmt::format("{:.4g}", fma_peak(threads) * 1e-9));
  if (o.lines.empty() && !o.peak) throw invalid("no problem line was given; give one, a file of them, or --peak");

  int worst = TESSERA_OK;
  Json results = Json::array();
  if (!o.lines.empty()) {
    const std::vector<Source> sources = read_sources(o.lines);
    Progress progress("measuring", static_cast<int64_t>(sources.size()), !o.json);
    for (const Source& source : sources) {
      const std::vector<Json> rows = measure(source, o, threads, facts, worst);
      progress.step();
      for (const Json& row : rows) results.push_back(row);
      if (o.json) continue;
      std::string table = fmt::format("{}\n  {:<18}{:>12}{:>12}{:>15}{:>10}{:>12}{:>12}\n", source.text, "kernel",
                                      "median", "p95", "speed", "GB/s", "peak", "workspace");
      for (const Json& row : rows) table += text(row);
      progress.print(table + "\n");
    }
  }
  if (!o.json) fmt::print("{}", text_of(facts));
  else if (results.empty()) print_json(facts);
  else print_results(results);
  return exit_code(worst);
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  std::shared_ptr<Options> o;
  CLI::App* verb = add_verb(
      app, action, "bench", "Measure problems; a wrong result has no speed",
      "tessera bench \"forward f32 h8 q2048 k2048 d64 mask=causal\" --engine cpu,materialised --peak", perform, o);
  verb->add_option("LINE", o->lines, "problem lines, files of them, or - for stdin");
  verb->add_option(
      "--engine", o->engines,
      "who is measured: names or prefixes of kernels, comma between; \"materialised\" is the textbook's way, as a "
      "yardstick");
  verb->add_option("--threads", o->threads, "0: all")->check(whole(most_threads));
  verb->add_option("--seconds", o->seconds, "for each line and engine; at least three rounds")->check(positive());
  verb->add_flag("--peak", o->peak, "measure the float32 peak of multiply and add as well");
}

}  // namespace tessera::tools
