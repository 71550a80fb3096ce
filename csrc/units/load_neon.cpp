#define QUIRE_UNIT neon
#define QUIRE_UNIT_VEC "vec_neon.h"
#include "load.h"
