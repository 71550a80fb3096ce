// The ops of this unit: a list for each file that has some.
#include "unit.h"

namespace quire::QUIRE_UNIT {

extern const OpList kRowwiseOps, kRoundingOps, kLinearOps, kAttentionOps, kLatentOps, kConvolutionOps, kRecurrentOps, kProbeOps;

extern const OpList* const kOpLists[];
const OpList* const kOpLists[] = {&kRowwiseOps,     &kRoundingOps,  &kLinearOps, &kAttentionOps, &kLatentOps,
                                  &kConvolutionOps, &kRecurrentOps, &kProbeOps,  nullptr};

}  // namespace quire::QUIRE_UNIT
