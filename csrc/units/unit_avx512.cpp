#define QUIRE_UNIT avx512
#define QUIRE_UNIT_VEC "vec_avx512.h"
#include "unit.h"
