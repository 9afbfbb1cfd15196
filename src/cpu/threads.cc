#include "cpu/threads.h"

#include <atomic>

#if defined(__unix__)
#include <pthread.h>
#endif

namespace tessera::cpu {
namespace {

std::atomic<bool> forked{false};

[[maybe_unused]] const bool watches = [] {
#if defined(__unix__)
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif
  return true;
}();

}  // namespace

bool is_forked() {
  return forked.load(std::memory_order_relaxed);
}

}  // namespace tessera::cpu
