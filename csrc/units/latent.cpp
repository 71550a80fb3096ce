// Attention over a cache of latents (multi-head latent attention).
#include "latent_attention.h"
#include "latent_cache.h"

namespace quire::QUIRE_UNIT {

constexpr OpEntry kOps[] = {
    op_entry<&head_linear>("head_linear"),
    op_entry<&latent_rope_and_cache>("latent_rope_and_cache"),
    op_entry<&latent_attention>("latent_attention"),
};
extern const OpList kLatentOps;
const OpList kLatentOps = list_of(kOps);

}  // namespace quire::QUIRE_UNIT
