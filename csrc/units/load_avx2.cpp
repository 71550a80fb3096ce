#define QUIRE_UNIT avx2
#define QUIRE_UNIT_VEC "vec_avx2.h"
#include "load.h"
