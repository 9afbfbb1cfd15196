// The command line of Tessera. Exit codes: 0 right, 1 wrong result, 2 invalid, 3 unsupported.
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "verb.h"

namespace {

using namespace tessera::tools;

int complain(int code, const std::string& message, bool json) {
  fmt::print(stderr, "tessera: {}\n", message);
  if (json) print_json({{"error", error_json(code, message)}});
  return exit_code(code);
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the user's limit is an error to report, not a sudden end
  CLI::App app("Exact attention by tiles. A problem is one line of text: ADDING.md.", "tessera");
  app.set_version_flag("--version", tessera_version());
  app.require_subcommand(1);
  app.footer("Exit codes: 0 right, 1 wrong result, 2 invalid, 3 unsupported.");
  Action action;
  for (const auto add : {add_run, add_verify, add_check, add_bench, add_plan, add_mask, add_info}) add(app, action);

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
    return complain(TESSERA_INVALID, fmt::format("{}; see tessera --help", error.what()), json);
  } catch (const Error& error) {
    return complain(error.code, error.what(), json);
  } catch (const std::bad_alloc&) {
    return complain(TESSERA_FAILED, "out of memory; make the problem smaller", json);
  } catch (const std::exception& error) {
    return complain(TESSERA_FAILED, error.what(), json);
  }
}
