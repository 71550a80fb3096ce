"""DeepSeek V4: several streams, attention to the last tokens and to entries, experts that tokens choose.

DeepSeek-AI 2026, as transformers has it (`deepseek_v4`): the first layers with experts choose by a table of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.readers import read_moe
from quire.model.families.rope import Rope, read_rope
from quire.model.families.row import Family
from quire.model.layer_sizes import Streams
from quire.model.spec import MoE
from quire.ops.entries import EntrySizes
from quire.ops.experts import Clamp

SLIDING, PAIRED, SINGLE = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {0: SLIDING, 4: PAIRED, 128: SINGLE}
"""What releases call layers: by the tokens of an entry."""
HYPER = {f"hc_{part}_{name}": f"hyper_{ours}{end}" for part, ours in (("attn", "attn"), ("ffn", "mlp"))
         for name, end in (("fn", ""), ("base", "_base"), ("scale", "_scale"))}  # fmt: skip


def _made(prefix: str, module: str) -> dict[str, str]:
    parts = {"numbers": "wkv", "gates": "wgate", "bias": "ape", "norm": "norm"}
    return {f"{prefix}_{role}": f"attn.{module}.{name}" for role, name in parts.items()}


NAMES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "head",
    "layer": "model.layers.{}.",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "entry_q_a": "attn.wq_a",
    "entry_q_a_norm": "attn.q_norm",
    "entry_q_b": "attn.wq_b",
    "entry_k": "attn.wkv",
    "entry_k_norm": "attn.norm",
    "entry_o_a": "attn.wo_a",
    "entry_o": "attn.wo_b",
    "sinks": "attn.attn_sink",
    **_made("entry", "compressor"),
    **_made("paired", "compressor"),
    **_made("entry_index", "indexer.compressor"),
    "entry_index_q": "attn.indexer.wq_b",
    "entry_index_weights": "attn.indexer.weights_proj",
    "router": "ffn.gate",
    "router_bias": "ffn.gate_correction",
    "token_experts": "ffn.gate.tid2eid",
    "expert_gate": "ffn.experts.{}.w1",
    "expert_up": "ffn.experts.{}.w3",
    "expert_down": "ffn.experts.{}.w2",
    "shared_gate": "ffn.shared_experts.w1",
    "shared_up": "ffn.shared_experts.w3",
    "shared_down": "ffn.shared_experts.w2",
    **{ours: name for name, ours in HYPER.items()},
    **{f"hyper_head{end}": f"model.hc_head_{name}" for name, end in
       (("fn", ""), ("base", "_base"), ("scale", "_scale"))},
}  # fmt: skip
REQUIRED = tuple(role for role in NAMES if role.startswith(("entry_", "paired_", "hyper_", "sinks")))
WRITTEN = (
    *(Rewrite(rf"(.*\.)?{name}", rf"\1{name}.weight", release=rf"\1{name}")
      for name in (*HYPER, "attn_sink", "ape", "tid2eid")),
    *(Rewrite(rf"(model\.)?hc_head(?:\.hc)?_{name}", rf"\1hc_head_{name}.weight", release=rf"\1hc_head.hc_{name}")
      for name in ("fn", "base", "scale")),
    Rewrite(r"(.*\.ffn\.)gate\.bias", r"\1gate_correction.weight", release=r"\1gate.bias"),
)  # fmt: skip
"""Vectors and tables that files have without the word at the end."""


def fields_of_older(config: HfConfig) -> Mapping[str, Any]:
    """The fields as transformers writes them, where releases have others; kinds of layers under names of their own."""
    raw = dict(config.raw)
    layers = config.integer("num_hidden_layers", 43)
    kinds = config.texts("layer_types")
    if not kinds and config.has("compress_ratios"):
        kinds = tuple(KINDS.get(every, str(every)) for every in config.integers("compress_ratios"))
    if not kinds:
        kinds = tuple((PAIRED if i % 2 and i > 1 else SINGLE) for i in range(layers))
    raw["entry_layers"], raw["layer_types"] = list(kinds[:layers]), None
    raw["token_layers"] = list(config.texts("mlp_layer_types")[:layers]) or [
        "hash_moe" if i < config.integer("num_hash_layers", 3, low=0) else "moe" for i in range(layers)
    ]
    raw["mlp_layer_types"] = None
    return raw


def read_entries(config: HfConfig, layers: int) -> EntrySizes:
    """Sizes of attention, checked against what kernels read."""
    kinds, heads = config.texts("entry_layers"), config.integer("num_attention_heads")
    if len(kinds) != layers or not set(kinds) <= set(KINDS.values()):
        raise config.fail("layer_types", f"needs {layers} words of {', '.join(KINDS.values())}")
    rates, head_dim = config.child("compress_rates"), config.integer("head_dim", high=1 << 12)
    every = {
        SLIDING: 0,
        PAIRED: config.integer("compress_rate_csa", rates.integer(PAIRED, 4, high=1 << 16), high=1 << 16),
        SINGLE: config.integer("compress_rate_hca", rates.integer(SINGLE, 128, high=1 << 16), high=1 << 16),
    }
    sizes = EntrySizes(
        config.integer("q_lora_rank", high=1 << 16),
        turned_numbers(config, head_dim),
        config.integer("o_groups", high=heads),
        config.integer("o_lora_rank", high=1 << 16),
        config.integer("sliding_window"),
        tuple(every[kind] for kind in kinds),
        tuple(kind == PAIRED for kind in kinds),
        config.integer("index_n_heads", high=1 << 10),
        config.integer("index_head_dim", high=1 << 12),
        config.integer("index_topk", high=1 << 16),
    )
    if head_dim % 16 or heads % sizes.groups:
        raise config.fail(
            "head_dim", f"is {head_dim}, must be a multiple of 16; and o_groups must divide {heads} heads"
        )
    if sizes.index_dim % 8 or sizes.index_dim < sizes.turned:
        raise config.fail("index_head_dim", f"is {sizes.index_dim}, needs a multiple of 8 from {sizes.turned} on")
    return sizes


def turned_numbers(config: HfConfig, head_dim: int) -> int:
    """Numbers of a head that turn."""
    if config.has("partial_rotary_factor"):
        return int(head_dim * config.number("partial_rotary_factor", high=1.0))
    return config.integer("qk_rope_head_dim", head_dim // 8, high=head_dim)


def read_ropes(config: HfConfig, layers: int) -> tuple[Rope, ...]:
    """Layers with entries turn by another base, and alone by a context extension, whose factor of cosines is 1."""
    head_dim = config.integer("head_dim")
    field = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
    given = config.raw.get(field) or {}
    share = turned_numbers(config, head_dim) / head_dim
    main: dict[str, Any] = {"rope_type": "default", "rope_theta": config.number("rope_theta", 10000.0)}
    beside = {k: v for k, v in given.items() if k not in ("main", "compress")}
    beside |= {"rope_theta": config.number("compress_rope_theta", 160000.0)}
    if "yarn" in (beside.get("rope_type"), beside.get("type")):
        beside = {"attention_factor": 1.0} | beside
    if isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict):
        main, beside = given["main"], given["compress"]
    raw = {name: value for name, value in config.raw.items() if name != "rope_scaling"}
    found = HfConfig(raw | {"rope_parameters": {
        "main": {"partial_rotary_factor": share} | main, "compress": {"partial_rotary_factor": share} | beside,
    }}, config.where)  # fmt: skip
    longest = config.integer("max_position_embeddings")
    main_rope, beside_rope = (read_rope(found, head_dim, longest, kind) for kind in ("main", "compress"))
    return tuple(main_rope if kind == SLIDING else beside_rope for kind in config.texts("entry_layers"))


def read_experts(config: HfConfig, layers: int) -> MoE:
    """Scores by themselves, chosen with a correction bias or by tokens; activations of all experts are limited."""
    score, kinds = config.text("scoring_func", "sqrtsoftplus"), config.texts("token_layers")
    if score not in ("sqrtsoftplus", "sigmoid"):
        raise config.fail("scoring_func", f"{score!r} is not known; known: sqrtsoftplus, sigmoid")
    if len(kinds) != layers or not set(kinds) <= {"hash_moe", "moe"}:
        raise config.fail("mlp_layer_types", f"needs {layers} words, hash_moe or moe")
    found = read_moe(score, renormalize=True)(config, layers)
    limit = config.number("swiglu_limit", 10.0)
    clamp = Clamp(1.0, limit, 0.0)
    return replace(
        found, shared=found.intermediate, clamps=(clamp,) * layers, mlp_clamps=(clamp,) * layers,
        by_token=tuple(kind == "hash_moe" for kind in kinds),
    )  # fmt: skip


def read_streams(config: HfConfig, layers: int) -> Streams:
    """How many there are, and how their gates are made."""
    return Streams(
        config.integer("hc_mult", 4, low=2, high=16),
        most=2.0,
        least=config.number("hc_eps", 1e-6),
        rounds=config.integer("hc_sinkhorn_iters", 20, high=1 << 10),
    )


SIZES = {
    "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
    "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "n_routed_experts": 256,
    "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576,
}  # fmt: skip
"""Of a release, where its files do not say."""
DEEPSEEK_V4 = Family(
    NAMES,
    SIZES,
    {"entries": read_entries, "rope": read_ropes, "moe": read_experts, "streams": read_streams,
     "windows": lambda c, layers: tuple(map(read_entries(c, layers).kept, range(layers)))},
    REQUIRED,
    facts={"join": "own"}, prefix="model.",
    spelling=(("num_experts", "n_routed_experts"), ("intermediate_size", "moe_intermediate_size")),
    aliases={"embed": ("embed",)}, skipped=("mtp.",), rewrites=WRITTEN, older=fields_of_older,
)  # fmt: skip
