// Kernels of weights without their zeros, and of those of which each four columns have two at most.
#include "linear_kernels.h"
#include "linear_two_of_four.h"

namespace quire::QUIRE_UNIT {

constinit const KernelSet kSparse16Kernels = kernel_set<Sparse<Bf16>>();
constinit const KernelSet kSparse8Kernels = kernel_set<Sparse<Int8>>();
constinit const KernelSet kSparse4Kernels = kernel_set<Sparse<Int4>>();
constinit const KernelSet kTwoOfFour16Kernels = kernel_set<TwoOfFour<Bf16>>();
constinit const KernelSet kTwoOfFour8Kernels = kernel_set<TwoOfFour<Int8>>();
constinit const KernelSet kTwoOfFour4Kernels = kernel_set<TwoOfFour<Int4>>();

}  // namespace quire::QUIRE_UNIT
