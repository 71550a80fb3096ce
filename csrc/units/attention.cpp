// Attention over a paged cache, and what fills it.
#include "attention_op.h"
#include "rope.h"
#include "rope_queries.h"

namespace quire::QUIRE_UNIT {

constexpr OpEntry kOps[] = {
    op_entry<&rope_and_cache>("rope_and_cache"),
    op_entry<&rope_queries>("rope_queries"),
    op_entry<&attention>("attention"),
    op_entry<&fold_states>("fold_states"),
    op_entry<&cache_rows>("cache_rows"),
};
extern const OpList kAttentionOps;
const OpList kAttentionOps = list_of(kOps);

}  // namespace quire::QUIRE_UNIT
