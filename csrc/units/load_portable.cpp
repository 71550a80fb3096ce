#define QUIRE_UNIT portable
#define QUIRE_UNIT_VEC "vec_portable.h"
#include "load.h"
