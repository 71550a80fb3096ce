"""Rows of encoders whose config asks for parts that their family lacks elsewhere: experts, and slopes for positions."""

from __future__ import annotations

from dataclasses import replace

from quire.model.disk.hf_config import HfConfig
from quire.model.disk.renamed_tensors import Rewrite
from quire.model.families.encoders import BERT, ENCODERS, NORMED, types_of
from quire.model.families.names import without
from quire.model.families.readers import alibi_slopes, no_rope
from quire.model.families.row import Family
from quire.model.spec import MoE
from quire.ops.experts import Routing

JINA_2 = without(BERT, "positions", "up") | {
    "gate_up": "mlp.gated_layers",
    "down": "mlp.wo",
    "mlp_post_norm": "mlp.layernorm",
}
"""Jina 2 (G\u00fcnther et al. 2023), which calls itself BERT."""
SPARSE = {
    "up": "mlp.fc1",
    "router": "mlp.router.layer",
    "expert_up": "mlp.experts.{}.w1",
    "expert_down": "mlp.experts.{}.w2",
    "experts_bias": "mlp.experts.all",
}


def bert(config: HfConfig) -> Family:
    """BERT, or Jina 2: slopes in the place of learned positions (Press et al. 2022), both ways, and a gated MLP."""
    row = ENCODERS["bert"]
    if config.text("position_embedding_type", "absolute") != "alibi":
        return row
    if (kind := config.text("feed_forward_type", "geglu")) != "geglu":
        raise config.fail("feed_forward_type", f"{kind!r} is not built; built is geglu")
    return replace(
        row,
        names=JINA_2,
        read={"rope": no_rope, "alibi": alibi_slopes, "token_types": types_of},
        required=("token_types", "q.bias", "k.bias", "v.bias", "o.bias", "down.bias", *NORMED),
    )


def experts_of_nomic(config: HfConfig, layers: int) -> MoE:
    """Experts in every so many layers, whose scores are softmax over all of them."""
    every, experts = config.integer("moe_every_n_layers", high=1024), config.integer("num_experts", high=1024)
    if config.flag("moe_normalize_expert_weights", False):
        raise config.fail("moe_normalize_expert_weights", "true is not built")
    routing = Routing(experts, config.integer("num_experts_per_tok", 1, high=experts), "softmax", False)
    width = config.integer("intermediate_size", high=1 << 24)
    return MoE(routing, width, tuple(i % every == 1 for i in range(layers)))


def pieces_of_nomic(config: HfConfig) -> tuple[Rewrite, ...]:
    """Experts lie below each other in two matrices, the second turned; their bias is one."""
    if (act := config.text("activation_function", "gelu")) != "gelu":
        raise config.fail("activation_function", f"{act!r} is not built beside experts; built is gelu")
    experts, before, found = config.integer("num_experts", high=1024), r"(.*\.mlp\.experts)", list[Rewrite]()
    for name in ("w1", "w2"):
        release, parts = rf"\1.mlp.{name}", rf"\1.{{}}.{name}.weight"
        turned = name == "w2"
        found.append(Rewrite(rf"{before}\.mlp\.{name}", parts, transposed=turned, release=release, below=experts))
    return (*found, Rewrite(rf"{before}\.bias", r"\1.all.weight", release=r"\1.bias"))


def nomic(config: HfConfig) -> Family:
    """Nomic BERT; the second version has experts, no gates, and biases (Nussbaum & Duderstadt 2025)."""
    row = ENCODERS["nomic_bert"]
    if not config.integer("moe_every_n_layers", 0, low=0):
        return row
    return replace(
        row,
        names=without(row.names, "gate") | SPARSE,
        defaults={**row.defaults, "hidden_act": "gelu", "type_vocab_size": 1},
        read={**row.read, "moe": experts_of_nomic},
        spelling=(*row.spelling, ("num_experts_per_tok", "moe_top_k"), ("hidden_act", "activation_function")),
        rewrites=pieces_of_nomic(config),
    )


WITH_PARTS = {"bert": bert, "nomic_bert": nomic}
"""In the place of the rows of these names."""
