// Files that are whole or not there: written under a temporary name beside the target, then renamed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::tools {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

// Opens a regular file for reading and tells its size.
File open_file(const std::string& path, int64_t& bytes);

// Calls `fill` on the temporary file; on any failure, or a signal, removes it and leaves `path` as it was.
void write_file(const std::string& path, const std::function<void(std::FILE*)>& fill);

// Throws what write_file would throw at its beginning, and if the file is one of `inputs`.
void check_writable(const std::string& path, const std::vector<std::string>& inputs);

}  // namespace tessera::tools
