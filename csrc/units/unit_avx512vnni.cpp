// AVX-512 with VNNI and without BF16 (Cascade Lake, Ice Lake): products of bf16 are two multiply-adds.
#define QUIRE_UNIT avx512vnni
#define QUIRE_UNIT_VEC "vec_avx512.h"
#include "unit.h"
