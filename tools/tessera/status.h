// Codes of the C interface as C++ exceptions, so that a verb reads as a story and main alone turns them into exits.
#pragma once

#include <fmt/format.h>
#include <tessera/tessera.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace tessera::tools {

struct Error : std::runtime_error {
  Error(int code_, const std::string& message) : std::runtime_error(message), code(code_) {}
  int code;  // a tessera_code, never TESSERA_OK
};

// Makes one: `throw invalid("{}: cannot open: {}; check the name", path, why);`
template <class... Args>
Error invalid(fmt::format_string<Args...> format, Args&&... args) {
  return {TESSERA_INVALID, fmt::format(format, std::forward<Args>(args)...)};
}

template <class... Args>
Error failed(fmt::format_string<Args...> format, Args&&... args) {
  return {TESSERA_FAILED, fmt::format(format, std::forward<Args>(args)...)};
}

inline tessera_error fresh_error() {
  tessera_error error{};
  error.size = sizeof error;
  return error;
}

inline void call(int code, const tessera_error& error) {
  if (code != TESSERA_OK) throw Error(code, error.message);
}

// The exit code of the command for a code of the library: 2 also says that the machine failed.
inline int exit_code(int code) {
  return code == TESSERA_FAILED ? 2 : code;
}

}  // namespace tessera::tools
