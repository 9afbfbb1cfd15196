// The CPU kernels for avx512.
#define TESSERA_ISA avx512
#define TESSERA_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define TESSERA_VECTOR_BYTES 64
#define TESSERA_REGISTERS 32
#include "cpu/target.h"
