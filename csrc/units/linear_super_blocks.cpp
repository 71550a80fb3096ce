// Kernels of weights in super-blocks.
#include "linear_kernels.h"
#include "linear_super_blocks.h"

namespace quire::QUIRE_UNIT {

constinit const KernelSet kSuper2Kernels = kernel_set<Super<Kind::kSuper2>>();
constinit const KernelSet kSuper3Kernels = kernel_set<Super<Kind::kSuper3>>();
constinit const KernelSet kSuper4Kernels = kernel_set<Super<Kind::kSuper4>>();
constinit const KernelSet kSuper5Kernels = kernel_set<Super<Kind::kSuper5, Kind::kSuper4>>();
constinit const KernelSet kSuper6Kernels = kernel_set<Super<Kind::kSuper6, Kind::kSuper3>>();
constinit const KernelSet kSuperTable4Kernels = kernel_set<Super<Kind::kSuperTable4>>();

}  // namespace quire::QUIRE_UNIT
