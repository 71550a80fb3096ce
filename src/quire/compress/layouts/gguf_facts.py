"""Facts of models as keys of GGUF files: context extensions, and whether what is read back is the same."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from typing import Any

import numpy as np

from quire.model.disk.gguf_architectures import ROPE_FIELDS
from quire.model.families.rope import LinearScaling, LongRope, Rope, Yarn

SAID = ("attention_factor", "stretch")
"""What a context extension says beside its frequencies."""


def scaling_keys(rope: Rope) -> dict[str, Any]:
    """Return keys of a context extension; none for one that has no name in GGUF, which the comparison then finds.

    YaRN's factor of cosines is left out: llama.cpp multiplies its own by what the key says, others take it for all.
    """
    scaling = rope.scaling
    if not isinstance(scaling, (LinearScaling, Yarn, LongRope)):
        return {}
    values = asdict(scaling)
    values["original_max_position_embeddings"] = values.pop("original", None)
    if not isinstance(scaling, LongRope):
        values.pop("attention_factor")
    found = {key: values[name] for name, key in ROPE_FIELDS.items() if values.get(name) is not None}
    return {"rope.scaling.type": type(scaling).__name__.lower()} | found


def same(a: Any, b: Any) -> bool:
    """Tell whether facts are the same but for the rounding of numbers to 32 bits."""
    if is_dataclass(a) and is_dataclass(b):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, (int, float)):
        return bool(np.isclose(a, b, rtol=1e-6, atol=0))
    return bool(a == b)


def same_turns(a: Rope, b: Rope, longest: int) -> bool:
    """Tell whether two ropes turn by the same angles in the model's own context and in that which it extends."""
    if a.dim != b.dim or not all(same(getattr(a.scaling, n), getattr(b.scaling, n)) for n in SAID):
        return False
    lengths = (longest, getattr(a.scaling, "original", longest))
    pairs = [[r.scaling.inverse_frequencies(r.theta, r.dim, length) for r in (a, b)] for length in lengths]
    return all(np.allclose(one, other, rtol=1e-5, atol=0) for one, other in pairs)
