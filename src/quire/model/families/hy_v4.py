"""Hy4: several streams (hyper-connections), latent attention with gates and sinks to tokens that an indexer chooses.

Tencent 2026, as transformers has it (`hy_v4`): layers share an indexer by turns of four.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.mixtures import sigmoid_experts
from quire.model.families.row import Family
from quire.model.families.sparse import indexed, read_indexed
from quire.model.layer_sizes import Streams
from quire.model.spec import MLA, MoE
from quire.ops.experts import Clamp

PARTS = {"fn": "", "base": "_base", "scale": "_scale"}
NAMES = {
    "value_gate": "self_attn.linear_gate",
    "sinks": "self_attn.sinks",
    **{f"hyper_{part}{end}": f"hc_{part}_layer.{name}" for part in ("attn", "mlp") for name, end in PARTS.items()},
    **{f"hyper_head{end}": f"model.hc_head.{name}" for name, end in PARTS.items()},
}
WRITTEN = (
    *(
        Rewrite(
            rf"(.*?\.)(?:hc_pre\.)?{module}\.(?:hc_pre\.)?(?:hc_)?(?:head_)?{name}",
            rf"\1{module}.{name}.weight",
            release=rf"\1hc_pre.{module}.{prefix}{name}",
        )
        for module, prefix in (("hc_attn_layer", "hc_"), ("hc_mlp_layer", "hc_"), ("hc_head", "hc_head_"))
        for name in PARTS
    ),
    Rewrite(r"(.*\.self_attn)\.(?:learnable_sink_param|sinks)", r"\1.sinks.weight", release=r"\1.learnable_sink_param"),
    Rewrite(r"(.*\.self_attn)\.gate_proj\.(.+)", r"\1.linear_gate.\2"),
    Rewrite(r"(.*\.mlp(?:\.shared_experts)?)\.linear_gate\.(.+)", r"\1.gate_proj.\2"),
)
"""Names of releases, and those that transformers writes."""


def read_attention(config: HfConfig, layers: int) -> MLA:
    """Latent attention whose indexers turn the last part of a head, every fourth layer behind the second unless the
    file says it."""
    if not config.texts("indexer_types"):
        kinds = ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(layers)]
        config = HfConfig({**config.raw, "indexer_types": kinds}, config.where)
    mla = read_indexed(False, True)(config, layers)
    return replace(mla, indexer=replace(mla.indexer, behind=True, eps=config.number("rms_norm_eps")))


def read_streams(config: HfConfig, layers: int) -> Streams:
    """How many there are, and between what their gates lie."""
    count = config.integer("hc_mult", 4, low=2, high=16)
    return Streams(count, most=config.number("hc_magnitude", 2.0), least=config.number("hc_eps", 1e-6))


def limited_experts(config: HfConfig, layers: int) -> MoE:
    """Sigmoid scores, chosen with a correction bias; the activation of the experts that routers choose is limited."""
    limit = config.number("swiglu_limit", 10.0, low=-1e9)
    if limit <= 0:
        raise config.fail("swiglu_limit", f"is {limit}, must be above 0")
    return replace(sigmoid_experts(True)(config, layers), clamps=(Clamp(1.0, limit, 0.0),) * layers)


DEFAULTS: dict[str, Any] = {
    "rope_interleave": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 16,
}


def hy_v4(config: HfConfig) -> Family:
    """DeepSeek-V3.2 with streams, gates, sinks and limits."""
    base = indexed(config, DEFAULTS, shared=True)
    return replace(
        base,
        names={**base.names, **NAMES},
        read={**base.read, "mla": read_attention, "streams": read_streams, "moe": limited_experts},
        required=(*base.required, *NAMES),
        facts={**base.facts, "join": "own"},
        rewrites=(*WRITTEN, *base.rewrites),
        mtp=None,
        skipped=(*base.skipped, "model.mtp_layers."),
    )
