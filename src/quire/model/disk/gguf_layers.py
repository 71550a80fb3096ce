"""Which mixer each layer of a GGUF file has: told by the heads of its keys and values, and by the width of its MLP.

See docs/design/weight-formats.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.errors import ModelError


@dataclass(frozen=True)
class Layers:
    """What a file says of its layers: heads of keys and values, width of the MLP, and whether there are experts.

    `where`: what errors name.
    """

    where: str
    heads: Sequence[int]
    widths: Sequence[int]
    routed: Sequence[bool]


Kinds = Callable[[Layers], dict[str, Any]]
"""What becomes fields of config.json that say what each layer is."""


def without_heads(kind: str) -> Kinds:
    """`layer_types` where layers without heads of keys and values are of `kind`, and the others attend."""

    def read(layers: Layers) -> dict[str, Any]:
        return {"layer_types": ["full_attention" if heads else kind for heads in layers.heads]}

    return read


def one_part(layers: Layers) -> dict[str, Any]:
    """`layers_block_type` of layers that have either a mixer or an MLP."""

    def kind(heads: int, width: int, routed: bool) -> str:
        if heads:
            return "full_attention"
        return ("moe" if routed else "mlp") if width else "linear_attention"

    return {"layers_block_type": list(map(kind, layers.heads, layers.widths, layers.routed))}


def by_periods(layers: Layers) -> dict[str, Any]:
    """Period and offset of the layers that attend, and of those with experts; `ModelError` where they have none."""
    found: dict[str, Any] = {}
    for what, flags in (("attn", [heads > 0 for heads in layers.heads]), ("expert", layers.routed)):
        at = [i for i, on in enumerate(flags) if on]
        every = at[1] - at[0] if len(at) > 1 else len(flags) + 1
        first = at[0] if at else len(flags)
        if [i % every == first for i in range(len(flags))] != list(flags):
            raise ModelError(
                f"{layers.where}: layers {at[:6]} do not come every {every} layers, as those of such models are"
            )
        found |= {f"{what}_layer_period": every, f"{what}_layer_offset": first}
    return found
