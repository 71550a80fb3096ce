// Attention over a cache of latents (multi-head latent attention), and the indexer that chooses its tokens.
#include "block_indexer.h"
#include "entries.h"
#include "indexer.h"
#include "latent_attention.h"
#include "latent_cache.h"
#include "pooled_indexer.h"
#include "pooled_keys.h"

namespace quire::QUIRE_UNIT {

constexpr OpEntry kOps[] = {
    op_entry<&head_linear>("head_linear"),
    op_entry<&latent_rope_and_cache>("latent_rope_and_cache"),
    op_entry<&latent_attention>("latent_attention"),
    op_entry<&index_rope_and_cache>("index_rope_and_cache"),
    op_entry<&choose_tokens>("choose_tokens"),
    op_entry<&choose_blocks>("choose_blocks"),
    op_entry<&choose_pooled>("choose_pooled"),
    op_entry<&pool_keys>("pool_keys"),
    op_entry<&pool_entries>("pool_entries"),
    op_entry<&choose_entries>("choose_entries"),
    op_entry<&entry_attention>("entry_attention"),
};
extern const OpList kLatentOps;
const OpList kLatentOps = list_of(kOps);

}  // namespace quire::QUIRE_UNIT
