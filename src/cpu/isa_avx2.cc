// The CPU kernels for avx2.
#define TESSERA_ISA avx2
#define TESSERA_TARGET "avx2,fma,f16c"
#define TESSERA_VECTOR_BYTES 32
#define TESSERA_REGISTERS 16
#include "cpu/target.h"
