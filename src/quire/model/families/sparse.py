"""Rows of families whose layers attend to tokens that an indexer chooses (sparse attention, `quire.ops.indexer`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.mixtures import LOCAL, deepseek_v3
from quire.model.families.names import GATE_UP, LLAMA, MIXTRAL_WRITTEN, without
from quire.model.families.readers import read_mla, read_moe
from quire.model.families.rope import Rope
from quire.model.families.row import Family, spec_facts
from quire.model.spec import MLA, MoE
from quire.ops.experts import Clamp
from quire.ops.indexer import NO_BLOCK_INDEXER, BlockIndexer, Indexer

INDEXER = {
    "index_q": "self_attn.indexer.wq_b",
    "index_k": "self_attn.indexer.wk",
    "index_k_norm": "self_attn.indexer.k_norm",
    "index_weights": "self_attn.indexer.weights_proj",
}


def indexers(config: HfConfig, layers: int) -> tuple[bool, ...]:
    """Which layers choose tokens: `indexer_types`, or `index_topk_pattern`, or by `index_topk_freq` every so many.

    Layers without an indexer read what the last one before them chose (cross-layer sharing, GLM-5.2).
    """
    pattern = config.raw.get("index_topk_pattern")
    if isinstance(pattern, str):
        kinds: tuple[str, ...] = tuple({"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern)
    else:
        kinds = config.texts("indexer_types") or config.texts("index_topk_pattern")
    if not kinds:
        every, first = config.integer("index_topk_freq", 1), config.integer("index_skip_topk_offset", 2, low=0)
        kinds = tuple("shared" if max(i - first + 1, 0) % every else "full" for i in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise config.fail("indexer_types", f"needs a list of {layers} times 'full' or 'shared', 'full' first")
    return tuple(kind == "full" for kind in kinds)


def read_indexed(interleaved: bool, shared: bool) -> Callable[[HfConfig, int], MLA]:
    """A reader of latent attention with an indexer. `interleaved`: how it turns, unless the file says so; `shared`:
    layers may have none of their own."""

    def read(config: HfConfig, layers: int) -> MLA:
        mla = read_mla(config, layers)
        dim = config.integer("index_head_dim", high=1 << 12)
        if not mla.q_rank:
            raise config.fail("q_lora_rank", "is not there, and the indexer reads the space that it is the size of")
        if dim < mla.rope or dim % 8:
            raise config.fail("index_head_dim", f"is {dim}, needs a multiple of 8 from qk_rope_head_dim {mla.rope} on")
        indexer = Indexer(
            config.integer("index_n_heads", high=1 << 10),
            dim,
            config.integer("index_topk", high=1 << 16),
            indexers(config, layers) if shared else (True,) * layers,
            config.flag("indexer_rope_interleave", interleaved),
        )
        return replace(mla, indexer=indexer)

    return read


def indexed(config: HfConfig, defaults: Mapping[str, Any], interleaved: bool = False, shared: bool = False) -> Family:
    """DeepSeek-V3 with indexers. The last arguments are those of `read_indexed`."""
    base = deepseek_v3(config)
    return replace(
        base,
        names={**base.names, **INDEXER},
        defaults={**base.defaults, "index_topk": 2048, "index_head_dim": 128, **defaults},
        read={**base.read, "mla": read_indexed(interleaved, shared)},
        required=(*base.required, *INDEXER, "index_k_norm.bias"),
    )


def deepseek_v32(config: HfConfig) -> Family:
    """Every layer has an indexer, whose halves turn."""
    return indexed(config, {"max_position_embeddings": 163840, "index_n_heads": 64})


def glm_moe_dsa(config: HfConfig) -> Family:
    """Layers may share an indexer, whose neighbours turn."""
    return indexed(config, GLM_5, interleaved=True, shared=True)


NORM_GATES = {
    f"{norm}_norm_{way}": f"{LLAMA[f'{norm}_norm']}.W_{way}" for norm in ("attn", "mlp") for way in ("down", "up")
}
AXK2_WRITTEN = (
    Rewrite(r"(.*_layernorm)\.norm\.weight", r"\1.weight", release=r"\1.norm.weight"),
    Rewrite(r"(.*_layernorm)\.mlp\.fc1\.weight", r"\1.W_down.weight"),
    Rewrite(r"(.*_layernorm)\.mlp\.fc2\.weight", r"\1.W_up.weight"),
    Rewrite(r"(.*\.self_attn)\.q_gate_proj\.(.+)", r"\1.q_b_proj.\2"),
)


def axk2(config: HfConfig) -> Family:
    """DeepSeek-V3.2 with gates: of results, from the space of queries, and of norms before attention and experts."""
    base = indexed(config, AXK2)
    gates = {"latent_q_gate": "self_attn.q_b_proj", **NORM_GATES}
    return replace(
        base,
        names={**without(base.names, "q_b"), **gates},
        read={**base.read, "norm_gate": lambda c, layers: c.integer("gated_norm_rank", 16, high=1 << 12)},
        required=(*(part for part in base.required if part != "q_b"), *gates, "latent_q", "latent_gate"),
        rewrites=(*AXK2_WRITTEN, *base.rewrites),
        mtp=None,
    )


MINIMAX_M3 = LLAMA | {
    "router": "block_sparse_moe.gate",
    "router_bias": "block_sparse_moe.gate_correction",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
    "shared_gate": "block_sparse_moe.shared_experts.gate_proj",
    "shared_up": "block_sparse_moe.shared_experts.up_proj",
    "shared_down": "block_sparse_moe.shared_experts.down_proj",
    "block_index_q": "self_attn.index_q_proj",
    "block_index_k": "self_attn.index_k_proj",
    "block_index_q_norm": "self_attn.index_q_norm",
    "block_index_k_norm": "self_attn.index_k_norm",
}
MINIMAX_M3_WRITTEN = (
    Rewrite(
        r"(.*\.)(?:mlp\.gate|block_sparse_moe)\.e_score_correction_bias",
        r"\1block_sparse_moe.gate_correction.weight",
        release=r"\1block_sparse_moe.e_score_correction_bias",
    ),
    Rewrite(
        r"(.*)\.mlp\.shared_experts\.gate_up_proj\.weight",
        r"\1.block_sparse_moe.shared_experts.{}.weight",
        parts=GATE_UP,
    ),
    Rewrite(r"(.*)\.mlp\.(shared_experts\..+)", r"\1.block_sparse_moe.\2"),
    Rewrite(r"(.*\.mlp)\.gate_up_proj\.weight", r"\1.{}.weight", parts=GATE_UP),
    Rewrite(r"(.*\.self_attn)\.indexer\.([qk]_(?:proj|norm)\..+)", r"\1.index_\2"),
    *MIXTRAL_WRITTEN,
)
"""The names that transformers writes: those of its modules, with gate above up."""
FIELDS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""What transformers calls fields of `sparse_attention_config`."""


def chosen_blocks(config: HfConfig, layers: int) -> BlockIndexer:
    """`sparse_attention_config`, or the fields that transformers makes of it, and layers by `layer_types`."""
    old, kinds = config.child("sparse_attention_config"), config.texts("layer_types")
    marks = old.integers("sparse_attention_freq")
    own = tuple(map(bool, marks)) if marks and not kinds else tuple(kind == "minimax_m3_sparse" for kind in kinds)
    if not any(own):
        return NO_BLOCK_INDEXER
    if len(own) != layers:
        raise config.fail("sparse_attention_config", f"names {len(own)} layers, num_hidden_layers is {layers}")

    def size(name: str, default: int, high: int) -> int:
        return old.integer(FIELDS[name], 0, high=high) or config.integer(name, default, high=high)

    heads, tokens = size("index_n_heads", 4, 1 << 10), size("index_block_size", 128, 512)
    if heads != config.integer("num_key_value_heads"):
        raise config.fail("index_n_heads", f"is {heads}, must be the number of heads of keys and values")
    if 512 % tokens:
        raise config.fail("index_block_size", f"is {tokens}, must divide 512")
    most = size("index_topk_blocks", 16, 1 << 12)
    return BlockIndexer(size("index_head_dim", 128, 1 << 12), tokens, most, size("index_local_blocks", 1, most), own)


def turned_parts(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """The part of a head that `partial_rotary_factor` names, as transformers has it; `rotary_dim` may say no other."""
    ropes: tuple[Rope, ...] = spec_facts(config)["rope"]
    if config.integer("rotary_dim") != ropes[0].dim:
        raise config.fail(
            "rotary_dim", f"is {config.integer('rotary_dim')}, but by partial_rotary_factor {ropes[0].dim} numbers turn"
        )
    return ropes


def clamped_experts(config: HfConfig, layers: int) -> MoE:
    """Sigmoid scores with a correction bias, in the layers that `mlp_layer_types` or `moe_layer_freq` names; the
    activation of all MLPs is limited."""
    moe, marks = read_moe("sigmoid", True)(config, layers), config.raw.get("moe_layer_freq")
    sparse = tuple(map(bool, marks)) if isinstance(marks, list) else moe.sparse
    if len(sparse) != layers:
        raise config.fail("moe_layer_freq", f"names {len(sparse)} layers, num_hidden_layers is {layers}")
    width = config.integer("shared_intermediate_size", high=1 << 24)
    clamp = Clamp(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    return replace(moe, sparse=sparse, shared=width, clamp=clamp)


GLM_5 = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
}
AXK2 = {
    "max_position_embeddings": 131072,
    "kv_lora_rank": 128,
    "q_lora_rank": 384,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 128,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 16,
}
SPARSE: dict[str, Family | Callable[[HfConfig], Family]] = {
    "deepseek_v32": deepseek_v32,
    "glm_moe_dsa": glm_moe_dsa,
    "axk2": axk2,
    "minimax_m3_vl_text": Family(
        MINIMAX_M3,
        {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 524288, "rope_theta": 5e6,
         "rotary_dim": 64, "dense_intermediate_size": 12288, "shared_intermediate_size": 3072, "num_local_experts": 128,
         "num_experts_per_tok": 4, "routed_scaling_factor": 2.0},
        {"moe": clamped_experts, "blocks": chosen_blocks, "rope": turned_parts,
         "intermediate": lambda c, layers: c.integer("dense_intermediate_size", high=1 << 24)},
        ("q_norm", "k_norm", "router_bias"),
        facts={"norm": "rms1p"},
        spelling=LOCAL,
        skipped=("mtp.",),
        rewrites=MINIMAX_M3_WRITTEN,
    ),
}  # fmt: skip
