#include "verb.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

namespace tessera::tools {

void print_json(const Json& object) {
  fmt::print("{}\n", object.dump(-1, ' ', false, Json::error_handler_t::replace));
}

void print_results(const Json& results) {
  print_json(results.size() == 1 ? results[0] : Json{{"results", results}});
}

Json error_json(int code, const std::string& message) {
  constexpr std::array names{"ok", "wrong", "invalid", "unsupported", "failed"};
  return {{"code", names[static_cast<size_t>(code)]}, {"message", message}};
}

Error caught() {
  const Error no_memory = failed("out of memory; make the problem smaller");
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return no_memory;
  } catch (const std::length_error&) {  // what a vector says of a size that no machine has
    return no_memory;
  } catch (const std::exception& error) {
    return failed("{}", error.what());
  }
}

int worse(int a, int b) {
  constexpr std::array<int, 5> rank{0, 4, 2, 1, 3};  // by code
  return rank[static_cast<size_t>(a)] > rank[static_cast<size_t>(b)] ? a : b;
}

namespace {

void read_lines(std::istream& in, const std::string& name, std::vector<Source>& sources) {
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string::npos || line[begin] == '#') continue;
    line.erase(line.find_last_not_of(" \t\r") + 1);
    sources.push_back({line.substr(begin), fmt::format("{}:{}: ", name, number)});
  }
  if (in.bad()) throw invalid("{}: cannot read; give a file of problem lines", name);
}

}  // namespace

std::vector<Source> read_sources(const std::vector<std::string>& arguments) {
  std::vector<Source> sources;
  for (const std::string& argument : arguments) {
    std::error_code ignored;
    if (argument == "-") {
      read_lines(std::cin, "stdin", sources);
    } else if (std::filesystem::exists(argument, ignored)) {
      std::ifstream file(argument);
      if (!file || std::filesystem::is_directory(argument, ignored))
        throw invalid("{}: cannot read; give a file of problem lines", argument);
      read_lines(file, argument, sources);
    } else if (argument.find(' ') == std::string::npos) {
      throw invalid("{}: neither a file nor a problem line; a line has at least two words, such as \"forward d64\"",
                    argument);
    } else {
      sources.push_back({argument, ""});
    }
  }
  if (sources.empty()) throw invalid("no problem line was given; give one, a file of them, or - for stdin");
  return sources;
}

void prepare(Case& c, uint64_t seed, int threads) {
  fill_random(c, seed);
  poison(c);
  if (c.problem().pass == TESSERA_BACKWARD) run_forward_of(c, {.threads = threads});
}

Json verdicts_json(const std::vector<tessera_verdict>& verdicts) {
  Json tensors = Json::object();
  for (const tessera_verdict& v : verdicts)
    tensors[tessera_name_text(v.name)] = {{"ok", v.ok != 0},
                                          {"max", v.max},
                                          {"rms", v.rms},
                                          {"naive_max", v.naive_max},
                                          {"naive_rms", v.naive_rms},
                                          {"bound", v.bound},
                                          {"bound_rms", v.bound_rms},
                                          {"nonfinite_equal", v.nonfinite_equal != 0},
                                          {"elements", v.elements}};
  return tensors;
}

std::string verdicts_table(const std::vector<tessera_verdict>& verdicts) {
  std::string table = fmt::format("{:<10}{:<7}{:>10}{:>11}{:>11}{:>11}{:>11}{:>11}  {}\n", "tensor", "", "max", "bound",
                                  "naive", "rms", "bound", "naive", "inf, nan");
  for (const tessera_verdict& v : verdicts)
    table += fmt::format("{:<10}{:<7}{:>10.2e}{:>11.2e}{:>11.2e}{:>11.2e}{:>11}{:>11.2e}  {}\n",
                         tessera_name_text(v.name), v.ok ? "ok" : "WRONG", v.max, v.bound, v.naive_max, v.rms,
                         v.bound_rms > 0 ? fmt::format("{:.2e}", v.bound_rms) : "-", v.naive_rms,
                         v.nonfinite_equal ? "as they should be" : "DIFFER");
  return table;
}

std::string verdicts_brief(const std::vector<tessera_verdict>& verdicts) {
  std::string brief;
  for (const tessera_verdict& v : verdicts)
    brief += fmt::format("{}{} {:.1e} of {:.1e}{}", brief.empty() ? "" : ", ", tessera_name_text(v.name), v.max,
                         v.bound, v.nonfinite_equal ? "" : " (inf or nan differ)");
  return brief;
}

CLI::Validator positive() {
  return CLI::Validator(
      [](const std::string& text) -> std::string {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        if (end != text.c_str() && *end == '\0' && std::isfinite(value) && value > 0) return "";
        return fmt::format("is {}; it must be a number above 0", text);
      },
      "");
}

CLI::Validator place_to_run() {
  return CLI::Validator(
      [](const std::string& text) -> std::string {
        if (text == "host" || is_gpu(text)) return "";
        return fmt::format("is {}; a run is on host or on cuda:N (plans can be made for other devices)", text);
      },
      "");
}

std::string one_line(const std::string& message) {
  std::string joined;
  std::istringstream lines(message);
  for (std::string line; std::getline(lines, line);) {
    line.erase(0, line.find_first_not_of(' '));
    joined += (joined.empty() ? "" : joined.ends_with(':') ? " " : "; ") + line;
  }
  return joined;
}

std::string flops_text(double flops) {
  constexpr std::array units{"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"};
  size_t unit = 0;
  for (; flops >= 1000 && unit + 1 < units.size(); ++unit) flops /= 1000;
  return fmt::format("{:.4g} {}", flops, units[unit]);
}

std::string bytes_text(double bytes) {
  constexpr std::array units{"B", "KB", "MB", "GB", "TB", "PB", "EB"};
  size_t unit = 0;
  for (; bytes >= 1000 && unit + 1 < units.size(); ++unit) bytes /= 1000;
  return fmt::format("{:.4g} {}", bytes, units[unit]);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.4g} us", seconds * 1e6);
  return seconds < 1 ? fmt::format("{:.4g} ms", seconds * 1e3) : fmt::format("{:.4g} s", seconds);
}

}  // namespace tessera::tools
