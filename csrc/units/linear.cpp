// Products of activations and packed matrices, and what a mixture of experts does around them.
#include "embedding.h"
#include "experts.h"
#include "kinds.h"

namespace quire::QUIRE_UNIT {

constexpr OpEntry kOps[] = {
    op_entry<&embedding_packed>("embedding_packed"),
    op_entry<&linear>("linear"),
    op_entry<&gated_mlp>("gated_mlp"),
    op_entry<&plain_mlp>("plain_mlp"),
    op_entry<&grouped_linear>("grouped_linear"),
    op_entry<&expert_mlp>("expert_mlp"),
    op_entry<&route>("route"),
    op_entry<&route_by_token>("route_by_token"),
    op_entry<&scale_choices>("scale_choices"),
    op_entry<&combine>("combine"),
    op_entry<&clamped_swiglu>("clamped_swiglu"),
    op_entry<&scale_by_sigmoid>("scale_by_sigmoid"),
};
extern const OpList kLinearOps;
const OpList kLinearOps = list_of(kOps);

}  // namespace quire::QUIRE_UNIT
