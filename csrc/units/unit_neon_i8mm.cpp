// aarch64 with I8MM as well (Neoverse V1 and N2, Apple M2): dot products of unsigned with signed bytes.
#define QUIRE_UNIT neon_i8mm
#define QUIRE_UNIT_VEC "vec_neon.h"
#include "unit.h"
