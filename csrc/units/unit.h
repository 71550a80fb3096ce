// One instruction-set unit: the kernels, compiled with the vector types of QUIRE_UNIT_VEC into namespace QUIRE_UNIT.
// Nothing here may be emitted as a shared inline function (the linker could pick the AVX-512 copy for every machine), so all
// of it lies in an unnamed namespace and the op table is a constant without code at load.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(QUIRE_X86)
#include <immintrin.h>
#elif defined(QUIRE_ARM64)
#include <arm_neon.h>
#endif

#include "matrix.h"
#include "pool.h"
#include "registry.h"
#include "sample.h"
#include "sharing.h"
#include "sparse.h"
#include "super_blocks.h"
#include "tuning.h"

namespace quire::QUIRE_UNIT {
namespace {

#include QUIRE_UNIT_VEC
#if defined(QUIRE_AMX)
#include "amx.h"
#endif

#include "dispatch.h"
#include "pieces.h"
#include "math.h"
#include "elementwise.h"
#include "rowwise.h"
#include "linear_call.h"
#include "linear_tiles.h"
#include "linear_int.h"
#include "linear_chosen.h"
#include "linear_parts.h"
#include "linear_bf12.h"
#include "expand.h"
#include "linear_sparse.h"
#include "linear_super.h"
#include "linear_fp8_groups.h"
#if defined(QUIRE_AMX)
#include "linear_amx_few.h"
#include "linear_amx.h"
#include "linear_amx_bf16.h"
#include "linear_amx_fp8.h"
#endif
#include "linear.h"
#include "linear_fp8.h"
#include "rows.h"
#include "kind.h"
#include "linear_op.h"
#include "round_groups.h"
#include "cache.h"
#include "mlp.h"
#include "look_up.h"
#include "kinds.h"
#include "embedding.h"
#include "rope.h"
#include "rope_queries.h"
#include "lora.h"
#include "attention_call.h"
#include "attention_tiles.h"
#include "attention_pages.h"
#include "attention_softmax.h"
#include "attention_tree.h"
#if defined(QUIRE_AMX)
#include "attention_amx.h"
#endif
#include "attention.h"
#include "attention_plan.h"
#include "attention_op.h"
#include "probe.h"
#include "sample_rows.h"
#include "moe.h"
#include "expert_rows.h"
#include "experts.h"
#include "latent_cache.h"
#include "latent_call.h"
#include "latent_attention.h"

}  // namespace

extern const OpEntry kOps[];
extern const size_t kOpCount;
constexpr OpEntry kOps[] = {
    op_entry<&embedding>("embedding"),
    op_entry<&rmsnorm>("rmsnorm"),
    op_entry<&add_rmsnorm>("add_rmsnorm"),
    op_entry<&embedding_packed>("embedding_packed"),
    op_entry<&linear>("linear"),
    op_entry<&round_groups>("round_groups"),
    op_entry<&gated_mlp>("gated_mlp"),
    op_entry<&plain_mlp>("plain_mlp"),
    op_entry<&rope_and_cache>("rope_and_cache"),
    op_entry<&rope_queries>("rope_queries"),
    op_entry<&lora_shrink>("lora_shrink"),
    op_entry<&lora_expand>("lora_expand"),
    op_entry<&attention>("attention"),
    op_entry<&fold_states>("fold_states"),
    op_entry<&cache_rows>("cache_rows"),
    op_entry<&gated_activation>("gated_activation"),
    op_entry<&activation>("activation"),
    op_entry<&take_rows>("take_rows"),
    op_entry<&layernorm>("layernorm"),
    op_entry<&add_layernorm>("add_layernorm"),
    op_entry<&norm_spans>("norm_spans"),
    op_entry<&place_columns>("place_columns"),
    op_entry<&add_rows>("add"),
    op_entry<&add_positions>("add_positions"),
    op_entry<&scale>("scale"),
    op_entry<&softcap>("softcap"),
    op_entry<&clip>("clip"),
    op_entry<&sample>("sample"),
    op_entry<&top_logprobs>("top_logprobs"),
    op_entry<&head_linear>("head_linear"),
    op_entry<&latent_rope_and_cache>("latent_rope_and_cache"),
    op_entry<&latent_attention>("latent_attention"),
    op_entry<&route>("route"),
    op_entry<&grouped_linear>("grouped_linear"),
    op_entry<&expert_mlp>("expert_mlp"),
    op_entry<&combine>("combine"),
    op_entry<&clamped_swiglu>("clamped_swiglu"),
    op_entry<&scale_by_sigmoid>("scale_by_sigmoid"),
    op_entry<&probe_read>("probe_read"),
    op_entry<&probe_f32>("probe_f32"),
    op_entry<&probe_bf16>("probe_bf16"),
    op_entry<&probe_int8>("probe_int8"),
#if defined(QUIRE_AMX)
    op_entry<&probe_tiles_int8>("probe_tiles_int8"),
    op_entry<&probe_tiles_bf16>("probe_tiles_bf16"),
    op_entry<&probe_tiles_g32>("probe_tiles_g32"),
    op_entry<&probe_tiles_g64>("probe_tiles_g64"),
    op_entry<&probe_tiles_g128>("probe_tiles_g128"),
#endif
};
constexpr size_t kOpCount = sizeof(kOps) / sizeof(kOps[0]);

}  // namespace quire::QUIRE_UNIT
