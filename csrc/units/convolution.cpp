// Causal convolutions over tokens.
#include "convolution.h"

namespace quire::QUIRE_UNIT {

constexpr OpEntry kOps[] = {
    op_entry<&causal_conv>("causal_conv"),
};
extern const OpList kConvolutionOps;
const OpList kConvolutionOps = list_of(kOps);

}  // namespace quire::QUIRE_UNIT
