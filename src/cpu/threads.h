// Work for several threads.
#pragma once
#include <omp.h>

#include "rules/base.h"

namespace tessera::cpu {

// In a process that was forked, OpenMP's threads are gone and its run time waits for them forever. Results do not
// depend on the number of threads, so such a process takes one.
bool is_forked();

// f(item, thread) for all items, taken by threads in order.
template <class F>
void parallel_for(int threads, rules::Index items, F&& f) {
  if (threads == 1 || is_forked()) {  // a region of one thread costs an allocation and a system call, too
    for (rules::Index item = 0; item < items; ++item) f(item, 0);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (rules::Index item = 0; item < items; ++item) f(item, omp_get_thread_num());
}

}  // namespace tessera::cpu
