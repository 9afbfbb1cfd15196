// Builds the kernel pack, as `tessera kernels build` does, for builds that have no command line.
// usage: tessera_pack FILE NVRTC [TARGETS]
#include <tessera/tessera.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return std::fprintf(stderr, "usage: tessera_pack FILE NVRTC [TARGETS]\n"), 2;
  tessera_error error{};
  error.size = sizeof error;
  const int32_t code = tessera_kernels_build(argv[1], argc == 4 ? argv[3] : nullptr, argv[2], &error);
  if (code != TESSERA_OK) std::fprintf(stderr, "tessera_pack: %s\n", error.message);
  return code;
}
