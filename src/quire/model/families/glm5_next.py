"""GLM-5-Next: streams that each layer mixes, Kimi's delta rule, and latent attention to pools of tokens.

Z.ai 2026 (GLM-5.3-Flash), as transformers has its text part (`glm5_next_text`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.delta_sizes import DeltaSizes
from quire.model.families.hybrids import DELTA_READS, delta_mixers
from quire.model.families.kimi import NAMES as KIMI
from quire.model.families.kimi import sizes
from quire.model.families.mixtures import CORRECTED, EXPERTS, LATENTS, ROUTED, SHARED, layers_ahead, sigmoid_experts
from quire.model.families.names import CORRECTION, LLAMA, STACKED, without
from quire.model.families.readers import no_rope
from quire.model.families.row import Family
from quire.model.families.sparse import INDEXER, indexers
from quire.model.layer_sizes import Streams
from quire.model.spec import ATTENTION, MLA, MoE
from quire.ops.experts import Clamp
from quire.ops.indexer import Indexer

MOST_POOL = 256
CONNECTED = {
    f"hyper_{ours}{end}": f"hc_{part}_{name}"
    for ours, part in (("attn", "attn"), ("mlp", "ffn"))
    for name, end in (("fn", ""), ("base", "_base"), ("scale", "_scale"))
}
POOLED = {role: f"self_attn.indexer.index_kpool_compress_{name}"
          for role, name in (("index_gate", "gate"), ("index_bias", "ape"))}  # fmt: skip
NAMES = (
    without(LLAMA, "q", "k", "v", "q_norm", "k_norm")
    | LATENTS
    | {role: name for role, name in KIMI.items() if role.startswith("delta_")}
    | EXPERTS | SHARED | CORRECTED | INDEXER | POOLED | CONNECTED
)  # fmt: skip
WRITTEN = (
    *(
        Rewrite(rf"(.*\.)(?:hc_{part}_{name}|{part}_hc\.{name})", rf"\1hc_{part}_{name}.weight",
                release=rf"\1hc_{part}_{name}")
        for part in ("attn", "ffn") for name in ("fn", "base", "scale")
    ),
    *(
        Rewrite(rf"(.*\.self_attn)\.(?:forget_gate\.)?{vector}", rf"\1.{vector}.weight", release=rf"\1.{vector}")
        for vector in ("A_log", "dt_bias")
    ),
    *(Rewrite(rf"(.*\.index_kpool_compress_{part})", r"\1.weight", release=r"\1") for part in ("ape", "gate")),
    Rewrite(r"(.*\.self_attn)\.forget_gate\.(.+)", r"\1.\2"),
    Rewrite(r"(.*\.self_attn)\.conv1d\.weight", r"\1.{}_conv1d.weight", parts=("q", "k", "v")),
    CORRECTION,
    *STACKED,
)  # fmt: skip
"""Names of releases, and those of transformers' modules."""
OF_DELTA = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
    "linear_lower_bound": "gate_lower_bound",
}


def flattened(config: HfConfig) -> Mapping[str, Any]:
    """Fields of `linear_attn_config` as transformers has them; the size of a head is not that of its turned part."""
    given = config.child("linear_attn_config").raw
    found = {ours: given[name] for ours, name in OF_DELTA.items() if name in given}
    return {name: value for name, value in config.raw.items() if name != "head_dim"} | found


def kinds(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: every fourth layer attends."""
    layers = config.integer("num_hidden_layers", high=1024)
    return ["linear_attention" if i % 4 != 3 else "full_attention" for i in range(layers)]


def lower_bound(config: HfConfig, layers: int) -> DeltaSizes:
    """Kimi's rule; decays have a bound unless the file says null and, if at all, no `safe_gate`."""
    field, safe = "linear_lower_bound", config.child("linear_attn_config").raw.get("safe_gate", True)
    unbounded = config.raw.get(field, -5.0) is None and not (config.has("linear_attn_config") and safe)
    bound = 0.0 if unbounded else config.number(field, -5.0, low=-1e4, high=0.0)
    return replace(sizes(config, layers), lower_bound=bound)


def read_pools(config: HfConfig, layers: int) -> MLA:
    """Latent attention that turns nothing, with an indexer of pools in layers that attend."""
    rank, dim = config.integer("kv_lora_rank", high=1 << 16), config.integer("index_head_dim", high=1 << 12)
    pool, most = config.integer("index_kpool", high=MOST_POOL), config.integer("index_topk", high=1 << 16)
    if config.integer("qk_rope_head_dim", 0, low=0):
        raise config.fail("qk_rope_head_dim", "is not 0: only attention without positions is known")
    if rank % 16 or dim % 8:
        raise config.fail("kv_lora_rank", f"is {rank}, index_head_dim is {dim}: need multiples of 16 and of 8")
    if pool < 2 or most % pool:
        raise config.fail("index_kpool", f"is {pool}, must be from 2 on and divide index_topk {most}")
    if not config.flag("index_kpool_always_select_tail", True):
        raise config.fail("index_kpool_always_select_tail", "is false: the first rows would read nothing")
    mixers = delta_mixers(config, layers)
    own = tuple(full and kind == ATTENTION for full, kind in zip(indexers(config, layers), mixers, strict=True))
    if any(kind == ATTENTION and not own[i] and (not i or mixers[i - 1] != ATTENTION) for i, kind in enumerate(mixers)):
        raise config.fail("indexer_types", "has a shared indexer behind a layer that does not attend")
    indexer = Indexer(config.integer("index_n_heads", high=1 << 10), dim, most, own, pool=pool)
    nope, value = (config.integer(name, high=1 << 12) for name in ("qk_nope_head_dim", "v_head_dim"))
    q_rank, eps = config.integer("q_lora_rank", high=1 << 16), config.number("rms_norm_eps", high=1.0)
    return MLA(q_rank, rank, nope, 0, value, False, indexer, eps=eps)


def read_streams(config: HfConfig, layers: int) -> Streams:
    """How many there are, and how often the matrix that mixes them is brought to sums of 1."""
    count, rounds = config.integer("hc_mult", 4, low=2, high=15), config.integer("hc_sinkhorn_iters", 20, high=1000)
    return Streams(count, most=2.0, least=config.number("hc_eps", 1e-6), rounds=rounds)


def limited(config: HfConfig, layers: int) -> MoE:
    """Sigmoid scores, chosen with a correction bias; the activation of all MLPs is limited."""
    limit = config.number("swiglu_limit", 10.0, low=0.0)
    return replace(sigmoid_experts(True)(config, layers), clamp=Clamp(1.0, limit, 0.0))


SIZES = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "num_key_value_heads": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256,
    "moe_intermediate_size": 2048, "n_routed_experts": 288, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "index_topk": 2048,
    "index_head_dim": 128, "index_n_heads": 32, "index_kpool": 16, "linear_head_dim": 128, "linear_num_heads": 64,
    "linear_conv_kernel_dim": 4, "layer_types": kinds,
    "linear_key_head_dim": lambda c: c.integer("linear_head_dim"),
    "head_dim": lambda c: c.integer("qk_nope_head_dim"),
}  # fmt: skip
"""Of a release, where its files do not say."""


def glm5_next(config: HfConfig) -> Family:
    """The text part, which a folder of the whole model holds, too."""
    return Family(
        NAMES,
        SIZES,
        DELTA_READS | {"delta": lower_bound, "rope": no_rope, "mla": read_pools, "streams": read_streams,
                       "moe": limited},
        ("q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "router_bias", *INDEXER, *POOLED, *CONNECTED,
         "index_k_norm.bias"),
        facts={"join": "own"}, spelling=ROUTED, skipped=layers_ahead(config), rewrites=WRITTEN, older=flattened,
    )  # fmt: skip
