// What went wrong, on its way to the caller's tessera_error.
#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "tessera/tessera.h"

namespace tessera::core {

// Valid UTF-8 without control characters but the line feed; other bytes as \xNN. Messages quote what the caller wrote.
std::string printable(const std::string& text);

struct Error : std::runtime_error {
  Error(tessera_code c, const std::string& message, tessera_status s = TESSERA_STATUS_SOUND)
      : std::runtime_error(printable(message)), code(c), status(s) {}
  tessera_code code;
  tessera_status status;  // what a device would have noted instead
};

// Not a question at all. The message gives the argument, its value, the rule and the way out.
template <class... Args>
[[noreturn]] void invalid(fmt::format_string<Args...> text, Args&&... args) {
  throw Error(TESSERA_INVALID, fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
void require(bool holds, fmt::format_string<Args...> text, Args&&... args) {
  if (!holds) invalid(text, std::forward<Args>(args)...);
}

// Metadata that a device can only note in the status word.
template <class... Args>
void require_sound(bool holds, tessera_status status, fmt::format_string<Args...> text, Args&&... args) {
  if (!holds) throw Error(TESSERA_INVALID, fmt::format(text, std::forward<Args>(args)...), status);
}

}  // namespace tessera::core
