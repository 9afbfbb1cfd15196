// What was compiled on this machine, kept on disk: $TESSERA_CACHE, else $XDG_CACHE_HOME/tessera, else ~/.cache/tessera.
// Several processes may use one folder: a file is written whole under its own name and then renamed. A file that is
// truncated, or was made of something else, is as good as none. A folder that cannot be written costs a compilation a
// process, never an answer.
#pragma once
#include <optional>
#include <string>

#include "cuda/compile.h"

namespace tessera::cuda {

std::string cache_folder();  // empty: none is known

// `key` is all that the image was made of.
std::optional<Image> read_cached(const std::string& folder, const std::string& key, const Target& target);
// Empty, or why it could not be kept.
std::string write_cached(const std::string& folder, const std::string& key, const Image& image);

}  // namespace tessera::cuda
