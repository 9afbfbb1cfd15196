#include "core/error.h"

namespace tessera::core {
namespace {

// Length of the UTF-8 character at the start of `text`; 0 if there is none.
size_t character(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned lead = byte(0);
  const size_t length = lead < 0x80                   ? 1
                        : lead >= 0xC2 && lead < 0xE0 ? 2
                        : (lead & 0xF0) == 0xE0       ? 3
                        : lead >= 0xF0 && lead < 0xF5 ? 4
                                                      : 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  return length;
}

}  // namespace

std::string printable(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const auto first = static_cast<unsigned char>(text[at]);
    const bool control = (first < 0x20 && first != '\n') || first == 0x7F;
    const size_t length = control ? 0 : character(std::string_view(text).substr(at));
    if (length == 0) out += fmt::format("\\x{:02x}", first), at += 1;
    else out.append(text, at, length), at += length;
  }
  return out;
}

}  // namespace tessera::core
