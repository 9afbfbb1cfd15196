// What the verbs share. Each verb adds itself to the command line and, if it is called, says what to do.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "case.h"
#include "runner.h"
#include "safetensors.h"
#include "status.h"

namespace tessera::tools {

using Json = nlohmann::ordered_json;
using Action = std::function<int()>;  // returns the exit code; throws Error

void add_run(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
void add_mask(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_check(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_kernels(CLI::App& app, Action& action);
void add_info(CLI::App& app, Action& action);

// A subcommand whose options live as long as the command line, and which always has --json.
template <class Options>
CLI::App* add_verb(CLI::App& app, Action& action, const char* name, const char* about, const char* example,
                   int (*perform)(const Options&), std::shared_ptr<Options>& options) {
  options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(name, about);
  verb->footer(std::string("Example:\n  ") + example);
  verb->add_flag("--json", options->json, "print one JSON object on stdout");
  verb->callback([&action, options = options, perform] { action = [options, perform] { return perform(*options); }; });
  return verb;
}

// A whole number from 0 to `most`.
template <class T>
CLI::Validator whole(T most = std::numeric_limits<T>::max()) {
  return CLI::Validator(
      [most](const std::string& text) -> std::string {
        T value = 0;
        const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (code == std::errc() && end == text.data() + text.size() && value >= 0 && value <= most) return "";
        return fmt::format("is {}; it must be a whole number from 0 to {}", text, most);
      },
      "");
}
CLI::Validator positive();          // a number above 0
CLI::Validator place_to_run();      // host, cuda or cuda:N: a device that is here
constexpr int most_threads = 1024;  // the library's limit

constexpr const char* engine_help =
    "kernels that may be chosen: names or prefixes (cpu, cpu.avx2, cuda), comma between";
constexpr const char* device_help = "host or cuda:N, where it runs; cuda:0 if --engine begins with cuda, else host";

void print_json(const Json& object);
// One result as it is, several as {"results": [...]}.
void print_results(const Json& results);
Json error_json(int code, const std::string& message);
// Inside `catch (...)`: what was thrown, as an Error; memory that the machine does not give is TESSERA_FAILED.
Error caught();

// ------------------------------------------------------------------------------------------------- many problems

// A line of the command line, of a file or of stdin, and where it stands.
struct Source {
  std::string text;
  std::string place;  // "cases/smoke.txt:3: "; empty for the command line
};
// An argument that names a file is a file of lines, "-" is stdin; anything else is a line.
std::vector<Source> read_sources(const std::vector<std::string>& arguments);

// A wrong answer is the worst; then what could not be asked, then what nobody answers.
int worse(int a, int b);

// Fills a case at random, poisons what cannot matter and, for backward, runs forward. All a judge needs.
void prepare(Case& c, uint64_t seed, int threads);

// ------------------------------------------------------------------------------------------------------- verdicts

Json verdicts_json(const std::vector<tessera_verdict>& verdicts);
std::string verdicts_table(const std::vector<tessera_verdict>& verdicts);
std::string verdicts_brief(const std::vector<tessera_verdict>& verdicts);  // "out 1.2e-07 of 4.1e-07, lse ..."

std::string one_line(const std::string& message);  // lines joined by "; "
std::string bytes_text(double bytes);              // "4.3 GB"
std::string flops_text(double flops);              // "1.2 TFLOP"
std::string seconds_text(double seconds);          // "12.5 ms"

}  // namespace tessera::tools
