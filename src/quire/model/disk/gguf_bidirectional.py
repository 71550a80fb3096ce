"""GGUF's architectures of encoders alone, whose tokens see those behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.model.disk.gguf_architecture import Architecture
from quire.model.disk.gguf_names import CAUSAL, WINDOW

NORMS = {"attn_post_norm": "attn_output_norm", "mlp_post_norm": "layer_output_norm"}
"""Behind the additions."""
SEES_LATER = {CAUSAL: False}
EVERY = "moe_every_n_layers"
MLP = ("gate", "up", "down")
CLASSES = ("cls", "cls.output")
BEHIND_PADDING = ("roberta", "camembert", "xlm-roberta")
"""Folders that have rows of positions which no token has; files have not."""


def kind_of_bert(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """DistilBERT has no types of tokens."""
    return {} if has("token_types.") else {"model_type": "distilbert"}


def positions_of_bert(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Positions that tokens have."""
    longest = raw["max_position_embeddings"]
    behind = raw["model_type"] in BEHIND_PADDING
    return {"max_position_embeddings": longest - raw["pad_token_id"] - 1} if behind else {}


def windows_of_modern(raw: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Which layers have windows, and the bases of both ropes."""
    every = raw.get("sliding_window_pattern") or 3
    return {
        "local_attention": raw.get("sliding_window"),
        "global_attn_every_n_layers": every if raw.get("sliding_window") else 1,
        "global_rope_theta": raw.get("rope_theta"),
        "local_rope_theta": raw.get("rope_local_base_freq"),
    }


BIDIRECTIONAL: dict[str, Architecture] = {
    "bert": Architecture(
        "bert",
        names=NORMS,
        fixed=SEES_LATER,
        further=kind_of_bert,
        tell=positions_of_bert,
        stored=lambda spec: replace(spec, position_offset=0),
        shapes={"positions": lambda spec: (spec.max_position, spec.hidden)},
        head=CLASSES,
        also=("distilbert", *BEHIND_PADDING),
        only=lambda spec: not spec.alibi,
    ),
    "jina-bert-v2": Architecture(
        "bert",
        names=NORMS,
        facts={"position_embedding_type": "alibi"},
        fixed=SEES_LATER,
        only=lambda spec: bool(spec.alibi),
    ),
    "nomic-bert": Architecture("nomic_bert", names=NORMS, fixed=SEES_LATER, sparse=False, unbiased=MLP),
    "nomic-bert-moe": Architecture("nomic_bert", names=NORMS, fixed=SEES_LATER, fields={EVERY: EVERY}, sparse=True),
    "jina-bert-v3": Architecture("jina_embeddings_v3", names=NORMS, fixed=SEES_LATER),
    "modern-bert": Architecture(
        "modernbert",
        extra=WINDOW,
        fixed=SEES_LATER,
        fields={"hidden_activation": "hidden_activation"},
        defaults={"classifier_pooling": "mean"},
        spelling=(("layer_norm_eps", "norm_eps"),),
        further=windows_of_modern,
        head=CLASSES,
        bend="gelu",
        unbiased=("qkv", "o", "gate_up", "down", "embed_norm", "attn_norm", "mlp_norm", "final_norm"),
    ),
    "eurobert": Architecture("eurobert", fixed=SEES_LATER, unbiased=("o", *MLP)),
    "gemma-embedding": Architecture(
        "gemma3_text",
        extra=(*WINDOW, *(f"dense_{i}_feat_{end}" for i in (2, 3) for end in ("in", "out"))),
        facts={"use_bidirectional_attention": True},
        further=lambda raw, has: {"query_pre_attn_scalar": raw["head_dim"]},
        dense=("dense_2", "dense_3"),
        only=lambda spec: spec.bidirectional,
    ),
    "llama-embed": Architecture("llama", interleaved=True, facts={"is_causal": False}, read_only=True),
}
