// The AVX-512 kernels, and the tile registers (AMX) where a kernel has a use for them.
#define QUIRE_UNIT amx
#define QUIRE_UNIT_VEC "vec_avx512.h"
#define QUIRE_AMX
#include "unit.h"
