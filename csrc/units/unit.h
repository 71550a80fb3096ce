// What every file of an instruction-set unit begins with: the vector types, and what kernels know of the rest of csrc/.
//
// Each .cpp of this folder is compiled once per unit, with the flags, the name (QUIRE_UNIT) and the vector types (QUIRE_UNIT_VEC) that
// units.cmake gives it. All of it lies in namespace quire::QUIRE_UNIT; what its files do not share lies there in an unnamed one. No function may
// be emitted as a shared inline one (the linker could pick the AVX-512 copy for every machine), and an op table is a constant without code
// at load.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(QUIRE_X86)
#include <immintrin.h>
#elif defined(QUIRE_ARM64)
#include <arm_neon.h>
#endif

#include "facts.h"
#include "matrix.h"
#include "pool.h"
#include "registry.h"
#include "sample.h"
#include "sharing.h"
#include "sparse.h"
#include "super_blocks.h"
#include "tuning.h"

#if !defined(QUIRE_UNIT)  // a header that is read alone
#define QUIRE_UNIT portable
#define QUIRE_UNIT_VEC "vec_portable.h"
#endif
#if defined(__AMX_INT8__)
#define QUIRE_AMX  // tile registers
#endif
#include QUIRE_UNIT_VEC
