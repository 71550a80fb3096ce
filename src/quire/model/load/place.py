"""Rebuilds a decoder with some of its parts replaced, above all to move it to the device it runs on."""

from __future__ import annotations

from typing import Any

from quire.core.rebuilt import rebuilt
from quire.ops.arrays import address, is_array

Unplaced = Any
"""An array of a part of the decoder before `Ops.place` makes it one of ops': numpy's, or torch's of the workbench."""


def held_bytes(value: Any) -> int:
    """Bytes of all arrays in `value`, each counted once."""
    found: dict[int, int] = {}

    def look(part: Any) -> Any:
        if is_array(part):
            found[address(part)] = part.nbytes
        return part

    rebuilt(value, look)
    return sum(found.values())
