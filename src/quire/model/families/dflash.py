"""What config.json says of layers that draft blocks (DFlash, Chen, Liang and Liu 2026): their spec and their blocks.

`speculate.dflash` has the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.core.errors import ModelError
from quire.model.disk.hf_config import HfConfig
from quire.model.families.find import read_spec
from quire.model.families.row import layer_kinds
from quire.model.spec import ModelSpec

BLOCK_SIZE = 16
"""Rows of a block where the file does not say."""

SIGHT = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
"""Fields about what rows see, which mean something else for blocks: `_sight` reads them."""

OTHERS: Mapping[str, Mapping[str, Any]] = {
    "muse_glimmer_assistant": {
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_position_embeddings": 131072,
        "sliding_window": 2048,
        "use_swa": True,
        "mask_token_id": 201818,
        "target_layer_ids": [1, 13, 25, 37, 49],
        "is_causal": False,
    }
}
"""By model type, fields that folders of others leave out; their layers are those of the method's authors."""


@dataclass(frozen=True)
class BlockFacts:
    """What config.json says of blocks: their `size`, the token that stands for one to come, the layers of the target
    whose input is read, and of each layer the window (0: none) and whether its rows see only those before them."""

    size: int
    mask_token: int
    target_layers: tuple[int, ...]
    windows: tuple[int, ...]
    causal: tuple[bool, ...]


def read_blocks(config: HfConfig, target: ModelSpec, name: str, tokens: int) -> tuple[ModelSpec, BlockFacts]:
    """The layers' spec and what is said of blocks, for drafts of at most `tokens` (0: the block's size less one).

    `ModelError` where they do not fit `target`, which is called `name`.
    """
    if (kind := config.text("model_type", "")) in OTHERS:
        given = {name: value for name, value in config.raw.items() if value is not None}
        config = HfConfig({**OTHERS[kind], **given, "model_type": "qwen3"}, config.where)
    raw = {"vocab_size": target.vocab_size} | {k: v for k, v in config.raw.items() if k not in SIGHT}
    spec, _, _ = read_spec(raw, config.where)
    for field, said, needed in (
        ("hidden_size", spec.hidden, target.hidden), ("vocab_size", spec.vocab_size, target.vocab_size),
    ):  # fmt: skip
        if said != needed:
            raise config.fail(field, f"is {said}, that of {name} is {needed}")
    own = config.child("dflash_config").over(config)
    size = own.integer("block_size", BLOCK_SIZE, low=2)
    if tokens >= size:
        raise ModelError(
            f"{config.where}: blocks of {size} draft {size - 1} tokens; num_speculative_tokens is {tokens}"
        )
    mask = own.integer("mask_token_id", low=0, high=target.vocab_size - 1)
    read, last = own.integers("target_layer_ids"), target.file_layer(target.layers - 1) - 1
    if not read or not all(0 <= i <= last for i in read):
        raise own.fail("target_layer_ids", f"is {list(read)}, needs layers of {name} from 0 to {last}")
    windows, causal = _sight(config, own, spec.layers, size)
    return replace(spec, windows=windows), BlockFacts(size, mask, tuple(map(target.behind, read)), windows, causal)


def _sight(config: HfConfig, own: HfConfig, layers: int, size: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Windows of the layers (0: none), and whether their rows in a block of `size` see only those before them."""
    kinds = layer_kinds(config, layers) if config.has("layer_types") else ("full_attention",) * layers
    slides = [kind == "sliding_attention" for kind in kinds]
    if own.flag("use_swa", False) and not any(slides):
        slides = [True] * layers
    said = next((own.flag(name) for name in ("is_causal", "causal") if own.has(name)), None)
    causal = tuple(sliding if said is None else said for sliding in slides)
    if not any(slides):
        return (0,) * layers, causal
    window = own.integer("swa_window_size" if own.has("swa_window_size") else "sliding_window")
    # Rows of a block see to its end, so the first of them looks back over as many keys more.
    wide = [window if only else window + size - 1 for only in causal]
    return tuple(wide[i] if sliding else 0 for i, sliding in enumerate(slides)), causal
