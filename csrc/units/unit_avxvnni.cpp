// AVX2 with the VNNI dot product in its 256-bit form (Alder Lake and later, Zen 5).
#define QUIRE_UNIT avxvnni
#define QUIRE_UNIT_VEC "vec_avx2.h"
#include "unit.h"
