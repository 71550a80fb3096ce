"""Rebuilds a decoder with some of its parts replaced, above all to move it to the device it runs on."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.core.rebuilt import rebuilt
from quire.ops.arrays import is_tensor, memory_of


def held_bytes(value: Any) -> int:
    """Bytes of all arrays in `value`, each counted once."""
    arrays: list[Any] = []

    def look(part: Any) -> Any:
        if isinstance(part, np.ndarray) or is_tensor(part):
            arrays.append(part)
        return part

    rebuilt(value, look)
    return sum({memory_of(array): array.nbytes for array in arrays}.values())
