"""Moves a decoder to the device it runs on."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def placed(value: Any, device: torch.device, seen: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """`value` with every tensor in it on `device`: dataclasses, tuples and lists are rebuilt where one has moved.

    What was one tensor stays one (rope tables, the rows' adapters). Functions are not looked into: parts of a decoder
    that hold tensors are dataclasses.
    """
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)][1]
    found = value
    if isinstance(value, Tensor):
        found = value.to(device)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        moved = {name: placed(part, device, seen) for name, part in parts.items()}
        if any(moved[name] is not part for name, part in parts.items()):
            found = replace(value, **moved)
    elif isinstance(value, (tuple, list)):
        moved_items = [placed(part, device, seen) for part in value]
        if any(a is not b for a, b in zip(moved_items, value, strict=True)):
            found = type(value)(moved_items)
    seen[id(value)] = (value, found)
    return found
