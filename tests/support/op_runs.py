"""Ops of every instruction set and the reference on the same tensors, and how close they must be."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from op_cases import reference as cases
from over_torch import select
from quire.core.config import DeviceConfig
from quire.ops.backend import Ops
from quire.ops.layout import KVCache, KVLayout
from quire.ops.native import load_native
from quire.ops.op import Case
from quire.ops.reference.caches import allocate, key_codes, scales, value_codes
from quire.ops.weights import Weight

native = load_native()
pytestmark = pytest.mark.skipif(native is None, reason="quire._native was not built (no C++ compiler)")
UNITS_HERE: list[str] = native.units() if native else []


@functools.cache
def ops_of(isa: str) -> Ops:
    return select(DeviceConfig(device="cpu", isa=isa, threads=2))


@functools.cache
def reference() -> Ops:
    return select(DeviceConfig(device="reference"))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def copied(value: Any) -> Any:
    """`value` with every tensor in it cloned: ops write into their arguments."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, KVCache):
        return KVCache(value.layout, value.keys.clone(), value.values.clone())
    if isinstance(value, (tuple, list)):
        return type(value)(copied(v) for v in value)
    return value


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, KVCache):
        return [value.keys, value.values]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors(v)]
    return []


def run(ops: Ops, name: str, case: Case) -> list[Tensor]:
    """The output and all arguments after the call, as f32."""
    ops.begin_step()
    args = {k: ops.pack(v) if isinstance(v, Weight) else copied(v) for k, v in case.items()}
    out = getattr(ops, name)(**args)
    return [t.float().clone() for t in tensors([out, list(args.values())])]


def close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    if expected.numel() == 0:
        return
    assert torch.equal(found.isnan(), expected.isnan()), f"{name}: NaN in other places than the reference"
    size = expected.nan_to_num().abs().max().clamp(min=1e-30)
    error = ((found - expected).nan_to_num().abs().max() / size).item()
    assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"


def one_sequence(case: Case, s: int, first: int, last: int) -> Case:
    """Rows first..last of sequence `s` of an attention case, as a batch of their own."""
    begin, end = int(case["cu_q"][s]), int(case["cu_q"][s + 1])
    context = int(case["context"][s]) - (end - begin) + last
    return case | {
        "qkv": case["qkv"][begin + first : begin + last].contiguous(),
        "cu_q": torch.tensor([0, last - first], dtype=torch.int32),
        "context": torch.tensor([context], dtype=torch.int32),
        "block_tables": case["block_tables"][s : s + 1].contiguous(),
    }


def as_int64(mask: int) -> int:
    return mask - (1 << 64) if mask >> 63 else mask


def random_tree(count: int, seed: int) -> list[int]:
    """Masks of `count` drafted rows; a row's parent is any earlier one, or none."""
    rng, masks = random.Random(seed), list[int]()
    for i in range(count):
        parent = rng.randrange(-1, i) if i else -1
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
    return masks


def tree_case(layout: KVLayout, heads: int, window: int, extras: str, seed: int = 0) -> tuple[Case, list[list[int]]]:
    """A decode, a prefill chunk that ends in a draft, drafts alone over contexts short and long, a draft of 64."""
    rows, drafted = ((1, 90), (20, 100), (9, 9), (12, 700), (64, 580)), (0, 6, 9, 12, 64)
    g = torch.Generator().manual_seed(seed)
    case = cases.attention_case(g, layout, heads, rows, window, extras=extras)
    masks = [[0] * (n - d) + random_tree(d, seed + i) for i, ((n, _), d) in enumerate(zip(rows, drafted, strict=True))]
    case["tree"] = torch.tensor([as_int64(m) for own in masks for m in own])
    return case, masks


def branch(case: Case, masks: list[list[int]], s: int, row: int) -> Case:
    """Row `row` of sequence `s` as a decode after its ancestors alone: a cache of its own, in plain order."""
    cache, size = case["cache"], case["cache"].layout.block_size
    begin, end, context = int(case["cu_q"][s]), int(case["cu_q"][s + 1]), int(case["context"][s])
    mask = masks[s][row]
    root = context - (end - begin) + sum(m == 0 for m in masks[s])
    seen = (
        [*range(root), *(root + j for j in range(64) if mask >> j & 1)]
        if mask
        else [*range(context - (end - begin) + row + 1)]
    )
    slots = [int(case["block_tables"][s, p // size]) * size + p % size for p in seen]
    own = allocate(cache.layout, -(-len(seen) // size))
    for kind in ("keys", "values"):
        source, to = getattr(cache, kind), getattr(own, kind)
        views = [(key_codes if kind == "keys" else value_codes)(cache.layout, t) for t in (source, to)]
        side = cache.layout.lanes if kind == "keys" else cache.layout.vpair
        for position, slot in enumerate(slots):
            at, of = slot % size, position % size
            picked = views[0][slot // size, :, at // side]
            placed = views[1][position // size, :, of // side]
            placed[:, :, of % side] = picked[:, :, at % side]
            if cache.layout.scaled:
                scales(cache.layout, to)[position // size, :, of] = scales(cache.layout, source)[slot // size, :, at]
    return {
        "qkv": case["qkv"][begin + row : begin + row + 1].contiguous(),
        "cache": own,
        "cu_q": torch.tensor([0, 1], dtype=torch.int32),
        "context": torch.tensor([len(seen)], dtype=torch.int32),
        "block_tables": torch.arange(len(own.keys), dtype=torch.int32)[None],
        "spec": case["spec"],
    }
