// Builds the kernel pack, as `tessera kernels build` does, for builds that have no command line.
// usage: tessera_pack FILE [NVRTC]
#include <tessera/tessera.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) return std::fprintf(stderr, "usage: tessera_pack FILE [NVRTC]\n"), 2;
  tessera_error error{};
  error.size = sizeof error;
  const int32_t code = tessera_kernels_build(argv[1], nullptr, argc == 3 ? argv[2] : nullptr, &error);
  if (code != TESSERA_OK) std::fprintf(stderr, "tessera_pack: %s\n", error.message);
  return code;
}
