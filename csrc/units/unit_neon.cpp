// aarch64 with the dot products of 8-bit integers (ARMv8.2 and later: Cortex-A76, Neoverse N1, Apple M1).
#define QUIRE_UNIT neon
#define QUIRE_UNIT_VEC "vec_neon.h"
#include "unit.h"
