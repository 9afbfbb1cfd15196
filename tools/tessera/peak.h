// The yardstick of arithmetic: how many float32 FLOP/s this machine does when nothing else is in the way.
#pragma once

namespace tessera::tools {

double fma_peak(int threads);  // FLOP/s

}  // namespace tessera::tools
