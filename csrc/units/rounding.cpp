// Quantization of weights as they are loaded.
#include "round_groups.h"
#include "round_pack.h"

namespace quire::QUIRE_UNIT {

constexpr OpEntry kOps[] = {
    op_entry<&round_groups>("round_groups"),
    op_entry<&round_pack>("round_pack"),
};
extern const OpList kRoundingOps;
const OpList kRoundingOps = list_of(kOps);

}  // namespace quire::QUIRE_UNIT
