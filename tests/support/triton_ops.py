"""Ops of the GPU backend in tests: on the GPU when one is there and TRITON_INTERPRET=0, else under the interpreter."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.core.config import DeviceConfig
from quire.core.tree_map import rebuilt
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops, open_backend
from quire.ops.experts import Grouped
from quire.ops.latents import LatentReads
from quire.ops.layout import KVCache, KVLayout, PlainLayout
from quire.ops.op import IMPLEMENTATIONS, REGISTRY, Case, load_definitions
from quire.ops.recurrent import DeltaSpec, ScanSpec, StateBatch
from quire.ops.reference.caches import allocate, key_codes, logical, scales, value_codes
from quire.ops.triton.gpu import load_kernels, open_gpu
from quire.ops.triton.pack import keeps_activations
from quire.ops.weights import Weight

_SPEC = importlib.util.find_spec("triton")
HAS_TRITON = _SPEC is not None and _SPEC.origin is not None  # a folder of tests has the name, too
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed (pip install 'quire[gpu]')")
load_definitions()
if HAS_TRITON:
    load_kernels()
    from quire.ops.triton.backend import GpuOps
TRITON_OPS = sorted(name for name in REGISTRY if "triton" in IMPLEMENTATIONS.get(name, {}))


@functools.cache
def gpu_ops() -> Ops:
    """The GPU backend; ops it has no kernel for run their reference."""
    missing = tuple(f"{name}=reference" for name in REGISTRY if name not in TRITON_OPS)
    return GpuOps(open_gpu(), missing)


@functools.cache
def reference() -> Ops:
    return open_backend(DeviceConfig(device="reference"))


def plain(layout: KVLayout) -> KVLayout:
    """The GPU's layout of the same numbers; a layout of latents is the same on every backend."""
    if type(layout) is not KVLayout:
        return layout
    return PlainLayout(layout.block_size, layout.kv_heads, layout.head_dim, layout.dtype)


def for_gpu(weight: Weight) -> Weight:
    """The weight with the activations that the GPU multiplies it with: float8 with float8."""
    return replace(weight, activation_bits=8) if weight.kind == "fp8" else weight


def on_gpu(value: Any, ops: Ops, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of an argument of a case on the device: f32 matrices as `dtype`, caches in the GPU's layout.

    Which arguments are activations is told by their shape alone: f32 tensors of two dimensions.
    """
    if isinstance(value, Weight):
        return ops.pack(for_gpu(value))
    if isinstance(value, Grouped):
        assert value.packed.plain is not None
        bias = None if value.bias is None else value.bias.to(ops.gpu.device)
        return ops.group(ops.pack(for_gpu(value.packed.plain)), value.experts, value.n, bias)
    if isinstance(value, Tensor):
        narrow = value.dtype is torch.float32 and value.dim() == 2
        return value.to(ops.gpu.device, dtype if narrow else value.dtype, copy=True)
    if isinstance(value, KVCache):
        layout = plain(value.layout)
        found = allocate(layout, len(value.keys))
        if layout is value.layout:
            found = KVCache(layout, value.keys.clone(), value.values.clone())
        else:
            copy_cache(value, found)
        return KVCache(layout, found.keys.to(ops.gpu.device), found.values.to(ops.gpu.device))
    if isinstance(value, (tuple, list)):
        return type(value)(on_gpu(v, ops, dtype) for v in value)
    if isinstance(value, (StateBatch, DeltaSpec, ScanSpec, AttentionSpec, LatentReads)):
        return rebuilt(value, lambda part: part.to(ops.gpu.device) if isinstance(part, Tensor) else part)
    return value


def copy_cache(source: KVCache, target: KVCache) -> None:
    """Bits of `source` into the layout of `target`, codes and scales."""
    at, to = source.layout, target.layout
    shape = (len(source.keys), at.kv_heads, at.block_size, at.head_dim)
    keys = key_codes(at, source.keys).permute(0, 1, 2, 4, 3, 5).reshape(shape)
    values = value_codes(at, source.values).permute(0, 1, 2, 4, 3).reshape(shape)
    key_codes(to, target.keys).copy_(keys.view(key_codes(to, target.keys).shape))
    value_codes(to, target.values).copy_(values.view(value_codes(to, target.values).shape))
    if at.scaled:
        scales(to, target.keys).copy_(scales(at, source.keys))
        scales(to, target.values).copy_(scales(at, source.values))


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of an output or an argument; caches as the numbers they hold, in the logical order. No records."""
    if isinstance(value, Tensor):
        return [] if value.dim() == 1 and value.dtype is torch.uint8 else [value]
    if isinstance(value, KVCache):
        if type(value.layout) in (KVLayout, PlainLayout):
            return list(logical(value, torch.arange(len(value.keys), device=value.keys.device)))
        return [value.keys, value.values]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors(v)]
    return [torch.from_numpy(value)] if type(value).__module__ == "numpy" and value.dtype.names is None else []


def run_gpu(name: str, case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output and all arguments after the call on the GPU backend, as f32 on the host."""
    ops = gpu_ops()
    ops.begin_step()
    args = {k: on_gpu(v, ops, dtype) for k, v in case.items()}
    out = getattr(ops, name)(**args)
    return [t.float().cpu() for t in tensors([out, list(args.values())])]


def run_reference(name: str, case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same by the definition in f32, of activations rounded to `dtype`, and by the unit to the weights' fp16."""
    ops = reference()

    def copied(value: Any) -> Any:
        if isinstance(value, Weight):
            return ops.pack(replace(value, activation_bits=0) if keeps_activations(value) else for_gpu(value))
        if isinstance(value, Grouped):
            assert value.packed.plain is not None
            return replace(value, packed=copied(value.packed.plain))
        if isinstance(value, Tensor):
            return value.to(dtype).float() if value.dtype is torch.float32 and value.dim() == 2 else value.clone()
        if isinstance(value, KVCache):
            return KVCache(value.layout, value.keys.clone(), value.values.clone())
        return type(value)(copied(v) for v in value) if isinstance(value, (tuple, list)) else value

    args = {k: copied(v) for k, v in case.items()}
    halves = any(isinstance(value, Weight) and value.kind == "f16" for value in case.values())
    given = args | ({"x": args["x"].half().float()} if halves and name == "linear" else {})
    out = getattr(ops, name)(**given)
    return [t.float() for t in tensors([out, list(args.values())])]


def close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Whether the largest error is at most `tolerance` of the largest number, NaN in the same places."""
    assert found.shape == expected.shape, f"{name}: {list(found.shape)} instead of {list(expected.shape)}"
    if expected.numel() == 0:
        return
    assert torch.equal(found.isnan(), expected.isnan()), f"{name}: NaN in other places than the reference"
    size = expected.nan_to_num().abs().max().clamp(min=1e-30)
    error = ((found - expected).nan_to_num().abs().max() / size).item()
    assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"
