// Does cmake/fmt/fmt.cc fit the installed version of fmt?
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

int main() {
  const std::vector<int> numbers = {1, 2};
  const std::string text = fmt::format("{:>4}{:.3g}{:.17g}{:#x}{}{}", 1, 2.5f, 2.5, 3u, fmt::join(numbers, ","), "x");
  return text.empty();
}
