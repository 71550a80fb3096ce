"""Quantization-aware training: the forward pass is the one that will be served, gradients pass straight through it.

The estimator is that of Bengio et al. 2013, as Jacob et al. 2018 use it for weights and activations. What is learned
stays plain numbers: rounding them at load (`--quantization`) gives the very codes that training saw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.compress.train.parametrized import ParametrizedNet, linear_modules
from quire.core.dtypes import I8, Dtype
from quire.core.errors import ConfigError, ModelError
from quire.model.load.roles import DISK_ROLES
from quire.model.mixers.layer_mixers import scaled
from quire.ops.arrays import to_numpy, to_torch
from quire.ops.autograd_cache import AutogradCache, held
from quire.ops.differentiable import Differentiable, MatrixSite
from quire.ops.experts import Grouped
from quire.ops.layout import KVCache
from quire.ops.reference.caches import quantize_rows
from quire.ops.reference.layers import quantize_activations, quantize_to_float8, rope_and_cache
from quire.ops.weights import Packed
from quire.quant.base import Quantizer
from quire.quant.float8 import Float8


class FakeQuantize:
    """A parametrization: matrices as `scheme` rounds them in groups of `group` columns once they are written as
    `dtype`.

    Other tensors are as `dtype` has them. Add `value` to the parametrizations of a `ParametrizedNet`. A head that
    shares the embedding table stays in `dtype`: one tensor is read both ways, and only one of them is rounded when it
    is served.
    """

    def __init__(self, net: ParametrizedNet, scheme: Quantizer, group: int, dtype: torch.dtype) -> None:
        """Check the matrices: `ConfigError` names one whose columns are no whole groups."""
        self._scheme, self._group, self._dtype = scheme, group, dtype
        self._matrices = {m.name: m for m in linear_modules(net.opened)}
        for m in self._matrices.values():
            scheme.check(m.name, net.opened.source.infos[m.name].shape[0 if m.transposed else 1], group)

    def value(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor as it will be served, f32."""
        if not tensor.is_floating_point():
            return tensor
        rounded, matrix = tensor.detach().to(self._dtype), self._matrices.get(name)
        if matrix is None:
            return straight_through(tensor, rounded)
        scheme = self._scheme.head if matrix.role == "head" else self._scheme
        w = rounded.t().contiguous() if matrix.transposed else rounded
        try:
            made = to_torch(scheme.quantize(to_numpy(w), self._group).dequantize())
        except ModelError as error:
            raise ModelError(f"{name}: {error.message}") from None
        return straight_through(tensor, made.t() if matrix.transposed else made)


class FakeQuantizedOps(Differentiable):
    """Operations with activations rounded per group as kernels round them, keys and values as a quantized cache holds
    them.

    `scheme`: of the weights, float8 ones take activations in float8, others in 8-bit integers. `kept`: int8 or
    float8_e4m3fn, a scale for each token and head; None: as they are.
    """

    def __init__(self, scheme: Quantizer | None, group: int, kept: Dtype | None) -> None:
        super().__init__()
        self._rounds: Callable[[Tensor, int], Tensor] | None = None
        if scheme is not None:
            self._rounds = fake_fp8 if isinstance(scheme, Float8) else fake_int8
        self._group, self._kept = group, kept
        if kept is not None:
            self.rope_and_cache = self._rounded_rope_and_cache

    def _rounded(self, x: Tensor, w: Packed) -> Tensor:
        """Round the rows that `w` multiplies, if it is one of those that formats are for."""
        roles = w.handle.roles if isinstance(w.handle, MatrixSite) else ()
        about = [DISK_ROLES[role] for role in roles]
        if self._rounds is None or not about or any(r.kind != "linear" or r.wide for r in about):
            return x
        return self._rounds(x, self._group)

    def _linear(self, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
        return super()._linear(self._rounded(x, w), w, bias)

    def _grouped_linear(self, x: Tensor, w: Grouped, tokens: Tensor | None, offsets: Tensor) -> Tensor:
        return super()._grouped_linear(self._rounded(x, w.packed), w, tokens, offsets)

    def _rounded_rope_and_cache(
        self, qkv: Tensor, positions: Tensor, table: Tensor, slots: Tensor, cache: KVCache, *more: Any
    ) -> Tensor:
        own, kept = held(cache), self._kept
        assert kept is not None
        rounding = FakeQuantizedCache(own.layout, own.keys, own.values, own.written, kept)
        return rope_and_cache(qkv, positions, table, slots, rounding, *more)


@dataclass(frozen=True, eq=False)
class FakeQuantizedCache(AutogradCache):
    """A cache that rounds what is put into it to `kept`, with a scale for each token and head."""

    kept: Dtype = I8

    def put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values rounded; see `AutogradCache`."""
        super().put(slots, fake_cache(keys, self.kept), fake_cache(values, self.kept))


def fake_quantize(
    net: ParametrizedNet, scheme: Quantizer, group: int, dtype: torch.dtype, kept: Dtype | None = None
) -> None:
    """Make the forward pass of `net` round everything as it will be served: see `FakeQuantize` and `FakeQuantizedOps`.

    `ConfigError` where that cannot be.
    """
    if kept is not None and not scaled(net.spec):
        raise ConfigError(f"{net.name}: keeps latents instead of keys and values; leave --kv-cache-dtype out")
    net.ops = FakeQuantizedOps(scheme, group, kept)
    net.parametrized.parametrizations.append(FakeQuantize(net, scheme, group, dtype).value)


class _Through(torch.autograd.Function):
    """A function that returns `rounded` with the gradient of x; x + (rounded - x) would be off in the last bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, in x's shape and dtype, with x's gradient."""
    through: Tensor = _Through.apply(x, rounded.to(x.dtype))  # type: ignore[no-untyped-call]
    return through


def fake_int8(x: Tensor, group: int) -> Tensor:
    """Round activations x [..., k] to int8 with a scale per token and group of columns, as kernels round them."""
    return _activations(x, group, quantize_activations)


def fake_fp8(x: Tensor, group: int) -> Tensor:
    """Round activations as `fake_int8` does, to float8_e4m3fn."""
    return _activations(x, group, quantize_to_float8)


def _activations(x: Tensor, group: int, quantize: Any) -> Tensor:
    rows = x.detach().float().reshape(-1, x.shape[-1])
    codes, scales = quantize(rows, group)
    rounded = (codes.view(*scales.shape, group) * scales[..., None]).view_as(x)
    return straight_through(x, rounded)


def fake_cache(x: Tensor, dtype: Dtype) -> Tensor:
    """Round keys or values x [..., head_dim] as a cache of `dtype` (int8 or float8_e4m3fn) gives them back.

    One scale per token and head, as the caches here have it.
    """
    codes, scales = quantize_rows(x.detach().float(), dtype)
    return straight_through(x, codes.float() * scales[..., None])
