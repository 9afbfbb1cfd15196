#include "picture.h"

#include <png.h>

#include <algorithm>

#include "files.h"
#include "status.h"

namespace tessera::tools {

void write_png(const std::string& path, const std::vector<uint8_t>& grid, int64_t rows, int64_t columns) {
  const int64_t longest = std::max(rows, columns);
  if (std::min(rows, columns) < 1 || longest + 2 > most_side)
    throw invalid("--png: the grid is {} x {}; a picture's sides are 1 to {}; use --counts", rows, columns,
                  most_side - 2);
  const int64_t cell = std::max<int64_t>(1, 512 / longest);
  const int64_t width = columns * cell + 2, height = rows * cell + 2;  // a grey frame: a white edge would not show
  std::vector<uint8_t> pixels(static_cast<size_t>(width * height), 128);
  for (int64_t y = 0; y < height - 2; ++y)
    for (int64_t x = 0; x < width - 2; ++x)
      pixels[static_cast<size_t>((y + 1) * width + x + 1)] =
          grid[static_cast<size_t>(y / cell * columns + x / cell)] ? 255 : 0;

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
