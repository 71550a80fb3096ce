"""The one place where the loader turns its arrays into the torch tensors that quant/ and ops/ take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.core.dtypes import Dtype
from quire.ops.arrays import AnyArray, to_torch
from quire.ops.lazy import torch, torch_dtype
from quire.ops.weights import Weight

if TYPE_CHECKING:
    from torch import Tensor


def handed(x: AnyArray) -> Tensor:
    """`x` as they take it."""
    return to_torch(x)


def handed_parts(raw: Mapping[str, AnyArray]) -> dict[str, Tensor]:
    """The parts of a matrix as they take them."""
    return {name: to_torch(part) for name, part in raw.items()}


def handed_weight(kind: str, **parts: Any) -> Weight:
    """A weight of arrays as they take it; `parts`: fields of `Weight`."""
    fields: Any = {name: to_torch(part) if hasattr(part, "dtype") else part for name, part in parts.items()}
    return Weight(kind, **fields)


def handed_dtype(dtype: Dtype) -> torch.dtype:
    """`dtype` as they take it."""
    return torch_dtype(dtype)


def handed_random() -> torch.Generator:
    """Where `random_weight` takes its numbers from; each the same."""
    return torch.Generator().manual_seed(0)
