// Kernels of integer weights, with activations of one digit and of two.
#include "linear_int.h"
#include "linear_kernels.h"

namespace quire::QUIRE_UNIT {

constinit const KernelSet kInt8Kernels = kernel_set<Int8, Ints<8, false, 2>>();
constinit const KernelSet kInt4Kernels = kernel_set<Int4, Ints<4, false, 2>>();
constinit const KernelSet kTable4Kernels = kernel_set<Table4, Ints<4, true, 2>, Ints<4, true, 1, 2>, Ints<4, true, 2, 2>>();

// For panels that widened_panel (linear_sparse.h) makes.
Tile int8_tile_for(int64_t m);
Tile int4_tile_for(int64_t m);
Tile int8_tile_for(int64_t m) { return tile_for<Int8>(m); }
Tile int4_tile_for(int64_t m) { return tile_for<Int4>(m); }

}  // namespace quire::QUIRE_UNIT
