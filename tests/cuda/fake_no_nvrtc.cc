// Preloaded, it hides NVRTC from a process, wherever NVRTC lies: the library also looks in /usr/local/cuda.
#include <dlfcn.h>

#include <cstring>

extern "C" void* dlopen(const char* name, int flags) noexcept {
  using Open = void* (*)(const char*, int);
  static const auto open = reinterpret_cast<Open>(::dlsym(RTLD_NEXT, "dlopen"));
  return name && std::strstr(name, "nvrtc") ? nullptr : open(name, flags);
}
