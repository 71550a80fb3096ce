"""The row of MiniMax-Text-01 and M1 (MiniMax 2025): lightning attention in most layers; norms replace the stream."""

from __future__ import annotations

from dataclasses import replace

from quire.model.disk.hf_config import HfConfig
from quire.model.families.hybrids import one_rope
from quire.model.families.mixtures import LOCAL, MIXTRAL
from quire.model.families.names import MIXTRAL_WRITTEN
from quire.model.families.readers import only, read_moe, turned_share
from quire.model.families.row import Family, layer_kinds
from quire.model.spec import ATTENTION, LIGHTNING, Factors, MoE

NAMES = MIXTRAL | {
    "lightning_qkv": "self_attn.qkv_proj",
    "lightning_gate": "self_attn.output_gate",
    "lightning_norm": "self_attn.norm",
    "lightning_out": "self_attn.out_proj",
}
DECAYS = tuple(f".self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
"""Endings of the names of what follows from the number of heads and the layer."""
PARTS = ("full_attn", "linear_attn", "mlp")
EARLIER = tuple(
    (f"{part}_{factor}_factor", f"layernorm_{own}_{factor}")
    for part, own in zip(PARTS, ("full_attention", "linear_attention", "mlp"), strict=True)
    for factor in ("alpha", "beta")
)
"""What the first release calls the factors of the stream and of what is added to it."""


def kinds(config: HfConfig) -> list[str]:
    """`layer_types` where config.json has none: by `attn_type_list`, 1 = attends, or every other layer attends."""
    layers, given = config.integer("num_hidden_layers", high=1024), config.integers("attn_type_list")
    attends = given or tuple(1 - i % 2 for i in range(layers))
    return ["full_attention" if own else "linear_attention" for own in attends]


def windows(config: HfConfig, layers: int) -> tuple[int, ...]:
    """All layers that attend have the window, if there is one."""
    size = config.integer("sliding_window", 0)
    return tuple(size if kind == ATTENTION else 0 for kind in mixers(config, layers))


def mixers(config: HfConfig, layers: int) -> tuple[str, ...]:
    """The kind of each layer's mixer."""
    found = tuple(LIGHTNING if kind == "linear_attention" else ATTENTION for kind in layer_kinds(config, layers))
    if ATTENTION not in found:
        raise config.fail("layer_types", "needs a full_attention layer: the others keep nothing of single tokens")
    return found


def decay_rates(config: HfConfig, layers: int) -> tuple[float, ...]:
    """The further back a layer is, the longer it remembers."""
    return tuple(1 - i / (layers - 1 + 1e-5) + 1e-5 for i in range(layers))


def added(config: HfConfig, part: str) -> float:
    """What multiplies what `part` adds to the stream, which is kept divided by its factor as Granite's is
    (`variants.granite_facts`)."""
    alphas = [config.number(f"{name}_alpha_factor", 1.0) for name in PARTS]
    if len(set(alphas)) > 1:
        raise config.fail("mlp_alpha_factor", f"and those of attention are {alphas}: only equal ones are supported")
    return config.number(f"{part}_beta_factor", 1.0) / alphas[0]


def factors(config: HfConfig, layers: int) -> Factors:
    """What multiplies what attention adds; the norm behind it takes the place of the stream."""
    only(config, postnorm=True)
    return Factors(attention=added(config, "full_attn"), scan=added(config, "linear_attn"))


def embed_scale(config: HfConfig, layers: int) -> float:
    """The stream is divided from the start."""
    return 1 / config.number("mlp_alpha_factor", 1.0)


def norm_eps(config: HfConfig, layers: int) -> float:
    """Norms undo that the stream is divided, but for their epsilon, which is divided twice."""
    return config.number("rms_norm_eps", high=1.0) / config.number("mlp_alpha_factor", 1.0) ** 2


def experts(config: HfConfig, layers: int) -> MoE:
    """Mixtral's, which all layers have."""
    if config.integer("shared_intermediate_size", 0, low=0):
        raise config.fail("shared_intermediate_size", "above 0 is not supported")
    found = read_moe(renormalize=True)(config, layers)
    return replace(found, routing=replace(found.routing, scale=added(config, "mlp")))


def key_dim(config: HfConfig) -> int:
    """Numbers of a head of lightning attention, as many as of others."""
    heads = config.integer("num_attention_heads")
    return config.integer("head_dim", config.integer("hidden_size") // heads, high=1 << 12)


MINIMAX = Family(
    NAMES,
    {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072,
     "num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": kinds, "linear_key_head_dim": key_dim,
     "partial_rotary_factor": turned_share("linear_key_head_dim")},
    {"mixers": mixers, "decay_rates": decay_rates, "windows": windows, "rope": one_rope, "moe": experts,
     "embed_scale": embed_scale, "norm_eps": norm_eps, "factors": factors},
    facts={"join": "normed_stream"},
    spelling=(*LOCAL, *EARLIER),
    rewrites=MIXTRAL_WRITTEN,
    buffers=DECAYS,
)  # fmt: skip
"""Mixtral's attention and experts. Files of the first release, and of MiniMax-M1, have types of their own."""
