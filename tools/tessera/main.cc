// The command line of Tessera. Exit codes: 0 right; 1 wrong result; 2 invalid, a file that cannot be read or written,
// or the machine failed (out of memory); 3 unsupported.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "verb.h"

namespace {

using namespace tessera::tools;

int complain(int code, const std::string& message, bool json) {
  fmt::print(stderr, "tessera: {}\n", message);
  if (json) print_json({{"error", error_json(code, message)}});
  return exit_code(code);
}

// The first word that is no option, if no verb has that name: CLI11 itself would only ask for a verb.
std::string unknown_verb(const CLI::App& app, int argc, char** argv) {
  char** const word = std::find_if(argv + 1, argv + argc, [](const char* text) { return text[0] != '-'; });
  if (word == argv + argc) return "";
  return app.get_subcommands([&](const CLI::App* verb) { return verb->get_name() == *word; }).empty() ? *word : "";
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the user's limit is an error to report, not a sudden end
  CLI::App app("Exact attention by tiles. A problem is one line of text: ADDING.md.", "tessera");
  app.set_version_flag("--version", tessera_version());
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 right; 1 wrong result; 2 invalid, a file that cannot be read or written,\n"
      "or the machine failed (out of memory); 3 unsupported.");
  Action action;
  for (const auto add : {add_run, add_verify, add_check, add_bench, add_plan, add_mask, add_kernels, add_info}) add(app, action);

  // Asked of the words themselves: a command line that cannot be parsed must be answered in JSON too.
  bool json = false;
  for (int n = 1; n < argc; ++n) json = json || std::strcmp(argv[n], "--json") == 0;
  try {
    app.parse(argc, argv);
    const int code = action();
    if (std::fflush(stdout) != 0) return complain(TESSERA_INVALID, "stdout: cannot write all of the output", false);
    return code;
  } catch (const CLI::Success& wish) {  // --help, --version
    return app.exit(wish);
  } catch (const CLI::ParseError& error) {
    if (const std::string verb = unknown_verb(app, argc, argv); !verb.empty())
      return complain(TESSERA_INVALID, fmt::format("{} is not a verb; tessera --help lists them", verb), json);
    return complain(TESSERA_INVALID, fmt::format("{}; see tessera --help", error.what()), json);
  } catch (...) {
    const Error error = caught();
    return complain(error.code, error.what(), json);
  }
}
