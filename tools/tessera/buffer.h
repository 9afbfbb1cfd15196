// Memory of a given alignment. Exactly as many bytes as asked for, so that a sanitizer sees one byte too far.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace tessera::tools {

struct FreeAligned {
  std::align_val_t alignment{16};
  void operator()(std::byte* memory) const { ::operator delete[](memory, alignment); }
};

struct Buffer {
  std::unique_ptr<std::byte[], FreeAligned> memory;
  size_t bytes = 0;
};

inline Buffer allocate(size_t bytes, size_t alignment) {
  const auto align = static_cast<std::align_val_t>(alignment);
  return {{static_cast<std::byte*>(::operator new[](bytes, align)), FreeAligned{align}}, bytes};
}

}  // namespace tessera::tools
