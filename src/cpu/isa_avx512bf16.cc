// The CPU kernels for avx512bf16.
#define TESSERA_ISA avx512bf16
#define TESSERA_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"
#define TESSERA_VECTOR_BYTES 64
#define TESSERA_REGISTERS 32
#define TESSERA_BF16_DOT 1
#include "cpu/target.h"
