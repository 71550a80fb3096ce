"""What is checked of tensors before their addresses go to a kernel. Imports no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.layout import KVCache
from quire.ops.lazy import torch_dtype

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def activations(x: Tensor, what: str, rows: int = -1, width: int = -1) -> tuple[int, int]:
    """(rows, width) of activations [rows, width] f32, bf16 or fp16; `ValueError` names what is something else."""
    found = tensor(x, what, x.dtype if x.dtype in FLOATS else torch.float32, rows, width)
    return found.shape[0], found.shape[1]


def tensor(x: Tensor, what: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """`x` itself when it is contiguous and of that dtype and shape (-1: any size); a `ValueError` names what is not."""
    fits = x.dim() == len(shape) and all(want in (-1, have) for have, want in zip(x.shape, shape, strict=True))
    if fits and x.dtype is dtype and x.is_contiguous():
        return x
    raise ValueError(
        f"{what}: need a contiguous {dtype} tensor of shape {list(shape)}, got {x.dtype} {list(x.shape)}"
        f"{'' if x.is_contiguous() else ', not contiguous'}"
    )


def check_cache(cache: KVCache) -> None:
    """`ValueError` when the tensors are not what the layout says."""
    for name, have, want in zip(
        ("keys", "values"), (cache.keys, cache.values), cache.layout.shapes(len(cache.keys)), strict=True
    ):
        tensor(have[0], f"block of a cache of {name}", torch_dtype(cache.layout.element), *want[1:])
    if not cache.paired:
        raise ValueError("keys and values are not of the same blocks")


def scales_of(cache: KVCache) -> tuple[Tensor, Tensor]:
    """The caches as f32, for their scales; the caches themselves where there are none."""
    if not cache.layout.scaled:
        return cache.keys, cache.values
    return cache.keys.view(torch.float32), cache.values.view(torch.float32)
