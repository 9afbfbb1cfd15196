// The kernels' source, as text inside the library (made by sources.cmake).
#pragma once
#include <span>

namespace tessera::cuda {

struct Source {
  const char* name;  // "device/tile.h"
  const char* text;
};
std::span<const Source> sources();
const char* source_digest();  // of all names and texts

}  // namespace tessera::cuda
