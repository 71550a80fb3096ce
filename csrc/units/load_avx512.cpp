#define QUIRE_UNIT avx512vnni
#define QUIRE_UNIT_VEC "vec_avx512.h"
#include "load.h"
