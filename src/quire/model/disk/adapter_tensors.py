"""adapter_model.safetensors of PEFT: which tensor is which part of which module."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.core.errors import ModelError
from quire.model.disk.adapter_config import AdapterConfig
from quire.model.disk.checkpoint import Checkpoint

PARTS = {
    "lora_A.weight": "A", "lora_B.weight": "B", "lora_B.bias": "bias", "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude", "lora_embedding_A": "rows_A", "lora_embedding_B": "rows_B",
    "base_layer.weight": "base", "token_adapter.trainable_tokens_delta": "tokens", "weight": "own",
    "bias": "own_bias", "modules_to_save.weight": "own", "modules_to_save.bias": "own_bias",
}  # fmt: skip
"""Ends of tensors' names, without that of the adapter, which old files have as "default", -> what is there."""
_NAME = re.compile(rf"(?:base_model\.model\.)?(.+?)\.({'|'.join(re.escape(end) for end in PARTS)})")
Parts = Mapping[str, str]
"""Parts of one module: what (a value of `PARTS`) -> name of its tensor."""


def adapter_parts(tensors: Checkpoint, config: AdapterConfig) -> Mapping[str, Parts]:
    """Module -> its parts; `ModelError` for a tensor that is none, and for parts that do not belong together."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors.infos:
        match = _NAME.fullmatch(re.sub(r"\.default(?=\.|$)", "", name))
        if match is None:
            raise ModelError(
                f"{tensors.folder}: tensor {name} is neither a lora_A nor a lora_B of a linear layer, nor another part "
                "of an adapter that is known"
            )
        parts = found.setdefault(match[1], {})
        if PARTS[match[2]] in parts:
            raise ModelError(f"{tensors.folder}: tensor {name} is there twice, under two names")
        parts[PARTS[match[2]]] = name
    for module, parts in found.items():
        _check(set(parts), config, f"{tensors.folder}: {module}")
    if not found:
        raise ModelError(f"{tensors.folder}: adapter_model.safetensors holds no lora_A and lora_B")
    return found


def is_module(name: str, module: str) -> bool:
    """Whether `name` of a config means `module`."""
    return module == name or module.endswith(f".{name}")


def _check(have: set[str], config: AdapterConfig, what: str) -> None:
    """Refuse parts that PEFT would not have written together under this config."""
    for first, second in (("A", "B"), ("rows_A", "rows_B")):
        if (first in have) != (second in have):
            raise ModelError(f"{what} has only one of lora_A and lora_B")
    kinds = [kind for kind in ("A", "rows_A", "own", "tokens") if kind in have]
    if len(kinds) != 1:
        raise ModelError(
            f"{what} is adapted in {len(kinds)} ways; needs low-rank matrices, a tensor of its own or rows"
        )
    adapted = bool(have & {"A", "rows_A"})
    if ("magnitude" in have) != (adapted and config.dora):
        raise ModelError(f"{what}: a lora_magnitude_vector is there or not, against use_dora of adapter_config.json")
    if ("bias" in have) != ("A" in have and config.bias):
        raise ModelError(f"{what}: a bias of lora_B is there or not, against lora_bias of adapter_config.json")
    if "own_bias" in have and "own" not in have:
        raise ModelError(f"{what} has a bias without its weight")
