// A mask as a picture: kept is white. Small grids are enlarged so that a cell can be seen.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::tools {

constexpr int64_t most_side = 1'000'000;  // libpng's own limit, frame included

void write_png(const std::string& path, const std::vector<uint8_t>& grid, int64_t rows, int64_t columns);

}  // namespace tessera::tools
