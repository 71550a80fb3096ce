// Kernels of float weights: f32, float16, bf16, bf16 in 12 bits, and float8.
#include "linear_bf12.h"
#include "linear_float.h"
#include "linear_fp8.h"
#include "linear_kernels.h"

#if defined(QUIRE_AMX)
#include "linear_amx_bf16.h"
#endif

namespace quire::QUIRE_UNIT {

constinit const KernelSet kF32Kernels = kernel_set<Floats<F32>>();
constinit const KernelSet kF16Kernels = kernel_set<Floats<F16>>();
constinit const KernelSet kBf16FloatsKernels = kernel_set<Floats<Bf16Floats>>();
constinit const KernelSet kBf12Kernels = kernel_set<Bf12>();
constinit const KernelSet kFp8Kernels = {&decode_fp8_row, 1, true, {{{}, kFp8Tiles}, {{}, {}}}};
#if defined(QUIRE_AMX)
constinit const KernelSet kBf16Kernels = {&Bf16::decode_row, 1, false, {{kBf16Tiles, {}}, {{}, {}}}};
#else
constinit const KernelSet kBf16Kernels = kernel_set<Bf16>();
#endif

// For panels that widened_panel (linear_sparse.h) makes.
Tile bf16_tile_for(int64_t m);
Tile bf16_tile_for(int64_t m) { return tile_for<Bf16>(m); }

}  // namespace quire::QUIRE_UNIT
