#include "picture.h"

#include <png.h>

#include <algorithm>

#include "files.h"
#include "status.h"

namespace tessera::tools {

void write_png(const std::string& path, const std::vector<uint8_t>& grid, int64_t rows, int64_t columns) {
  constexpr int64_t most = 1'000'000;  // libpng's own limit of a side
  const int64_t longest = std::max(rows, columns);
  if (std::min(rows, columns) < 1 || longest > most)
    throw invalid("--png: the grid is {} x {}; a picture's sides are 1 to {}; use --counts", rows, columns, most);
  const int64_t cell = std::max<int64_t>(1, 512 / longest);
  const int64_t width = columns * cell, height = rows * cell;
  std::vector<uint8_t> pixels(static_cast<size_t>(width * height));
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; ++x)
      pixels[static_cast<size_t>(y * width + x)] = grid[static_cast<size_t>(y / cell * columns + x / cell)] ? 255 : 0;

  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.format = PNG_FORMAT_GRAY;
  image.width = static_cast<png_uint_32>(width);
  image.height = static_cast<png_uint_32>(height);
  write_file(path, [&](std::FILE* file) {
    if (!png_image_write_to_stdio(&image, file, 0, pixels.data(), static_cast<png_int_32>(width), nullptr))
      throw invalid("{}: cannot write: {}; nothing was left there", path, image.message);
  });
}

}  // namespace tessera::tools
