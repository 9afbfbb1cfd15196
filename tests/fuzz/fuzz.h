// What the targets share: a claim about an input that must hold, and text as the library prints it.
#pragma once
#include <fmt/format.h>
#include <tessera/tessera.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace tessera::fuzz {

// libFuzzer keeps the input of a process that aborts.
template <class... Args>
void need(bool holds, fmt::format_string<Args...> text, Args&&... args) {
  if (holds) return;
  std::fprintf(stderr, "FOUND: %s\n", fmt::format(text, std::forward<Args>(args)...).c_str());
  std::abort();
}

// What `print(buffer, capacity)` writes, in buffers of several sizes without a byte to spare.
template <class Print>
std::string printed(Print print) {
  const size_t needed = print(nullptr, 0);
  std::string whole;
  for (const size_t capacity : {size_t{1}, needed / 2, needed - 1, needed}) {
    if (capacity == 0) continue;
    std::vector<char> buffer(capacity, '?');
    need(print(buffer.data(), capacity) == needed, "{} bytes are needed, but others with a capacity of {}", needed,
         capacity);
    const size_t length = ::strnlen(buffer.data(), capacity);
    need(length < capacity, "no zero within {} bytes", capacity);
    const std::string text(buffer.data(), length);
    need(text.starts_with(whole), "{} bytes hold \"{}\", fewer held \"{}\"", capacity, text, whole);
    whole = text;
  }
  return whole;
}

}  // namespace tessera::fuzz
