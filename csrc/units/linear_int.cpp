// Kernels of integer weights, with activations of one digit and of two.
#include "linear_int.h"
#include "linear_kernels.h"

namespace quire::QUIRE_UNIT {

constinit const KernelSet kInt8Kernels = kernel_set<Int8, Ints<8, false, 2>>();
constinit const KernelSet kInt4Kernels = kernel_set<Int4, Ints<4, false, 2>>();
constinit const KernelSet kTable4Kernels = kernel_set<Table4, Ints<4, true, 2>, Ints<4, true, 1, 2>, Ints<4, true, 2, 2>>();

}  // namespace quire::QUIRE_UNIT
