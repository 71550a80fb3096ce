"""Rebuilds a decoder with some of its parts replaced, above all to move it to the device it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.ops.arrays import AnyArray, Host, address, is_tensor, to_numpy, to_torch

if TYPE_CHECKING:
    import torch

Unplaced = Any
"""An array of a part of the decoder before `placed` makes it one of ops': numpy's, or torch's of the workbench."""


def moved(part: AnyArray, device: torch.device) -> Any:
    """`part` as ops on `device` take it."""
    return to_torch(part).to(device)


def fetched(part: Any) -> Host:
    """`part`, made by ops, as an array on the host."""
    return to_numpy(part.cpu() if is_tensor(part) else part)


def is_array(part: object) -> bool:
    """Whether `part` is an array of numbers, here or on a device."""
    return isinstance(part, np.ndarray) or is_tensor(part)


def placed(value: Any, device: torch.device) -> Any:
    """`value` with every array in it on `device`; what was one array stays one (rope tables, the rows' adapters)."""
    return rebuilt(value, lambda part: moved(part, device) if is_array(part) else part)


def rebuilt(value: Any, change: Callable[[Any], Any], seen: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """`value` with `change(part)` for its parts: dataclasses, tuples and lists are rebuilt where one differs.

    What was one part stays one. One that was changed is not looked into, nor are functions: parts of a decoder that
    hold arrays are dataclasses.
    """
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)][1]
    found = change(value)
    if found is value and is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        made = {name: rebuilt(part, change, seen) for name, part in parts.items()}
        if any(made[name] is not part for name, part in parts.items()):
            found = replace(value, **made)
    elif found is value and isinstance(value, (tuple, list)):
        items = [rebuilt(part, change, seen) for part in value]
        if any(a is not b for a, b in zip(items, value, strict=True)):
            found = type(value)(items)
    seen[id(value)] = (value, found)
    return found


def parts_of(value: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """All parts of `value` that are a `kind`, each once."""
    found: list[Any] = []

    def look(part: Any) -> Any:
        if isinstance(part, kind):
            found.append(part)
        return part

    rebuilt(value, look)
    return found


def held_bytes(value: Any) -> int:
    """Bytes of all arrays in `value`, each counted once."""
    found: dict[int, int] = {}

    def look(part: Any) -> Any:
        if is_array(part):
            found[address(part)] = part.nbytes
        return part

    rebuilt(value, look)
    return sum(found.values())
