// The CPU kernels for baseline.
#define TESSERA_ISA baseline
#define TESSERA_VECTOR_BYTES 16
#define TESSERA_REGISTERS 16
#include "cpu/target.h"
