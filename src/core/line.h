// A problem as one line of text; the grammar is ADDING.md.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/operand.h"

namespace tessera::core {

struct Line {
  Problem problem = {};
  std::map<int, std::vector<int32_t>> values;  // of int32 operands, by tessera_name
  uint64_t seed = 0, offset = 0;               // dropout
};

Line parse(const std::string& text);  // throws Error(TESSERA_INVALID)
std::string print(const Line& line);
std::string print(const Problem& problem);

}  // namespace tessera::core
