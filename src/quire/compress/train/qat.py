"""Training that knows of rounding: the forward pass is the one that will be served, gradients pass straight through it.

The estimator is that of Bengio et al. 2013, as Jacob et al. 2018 use it for weights and activations. What is learned
stays plain numbers: rounding them at load (`--quantization`) gives the very codes that training saw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.compress.quantize.fake import fake_cache, fake_fp8, fake_int8, straight_through
from quire.compress.train.seen import SeenNet, matrices
from quire.core.dtypes import I8, Dtype
from quire.core.errors import ConfigError, ModelError
from quire.model.load.roles import DISK_ROLES
from quire.model.mixers.table import scaled
from quire.ops.arrays import to_numpy, to_torch
from quire.ops.autograd_cache import AutogradCache, held
from quire.ops.differentiable import Differentiable, MatrixSite
from quire.ops.experts import Grouped
from quire.ops.layout import KVCache
from quire.ops.reference.layers import rope_and_cache
from quire.ops.weights import Packed
from quire.quant.base import Quantizer
from quire.quant.float8 import Float8


class FakeQuantized:
    """Matrices as `scheme` in groups of `group` columns has them once they are written as `dtype`, others as `dtype`.

    Add `value` to the values of a `SeenNet`. A head that is the table of tokens stays in `dtype`: one tensor is read
    both ways, and only one of them is rounded when it is served.
    """

    def __init__(self, net: SeenNet, scheme: Quantizer, group: int, dtype: torch.dtype) -> None:
        """`ConfigError` names a matrix whose columns are no whole groups."""
        self._scheme, self._group, self._dtype = scheme, group, dtype
        self._matrices = {m.name: m for m in matrices(net.opened)}
        for m in self._matrices.values():
            scheme.check(m.name, net.opened.source.infos[m.name].shape[0 if m.transposed else 1], group)

    def value(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor as it will be served, f32."""
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


class RoundedOps(Differentiable):
    """Products whose activations are rounded per group as kernels round them; keys and values as a cache keeps them.

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
        """Rows that `w` multiplies, if it is one of those that formats are for."""
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
        rounding = RoundedHeld(own.layout, own.keys, own.values, own.written, kept)
        return rope_and_cache(qkv, positions, table, slots, rounding, *more)


@dataclass(frozen=True, eq=False)
class RoundedHeld(AutogradCache):
    """What is put into it is rounded to `kept`, with a scale for each token and head."""

    kept: Dtype = I8

    def put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """As of `AutogradCache`."""
        super().put(slots, fake_cache(keys, self.kept), fake_cache(values, self.kept))


def fake_quantize(net: SeenNet, scheme: Quantizer, group: int, dtype: torch.dtype, kept: Dtype | None = None) -> None:
    """Let the forward pass of `net` round everything as it will be served: see `FakeQuantized` and `RoundedOps`.

    `ConfigError` where that cannot be.
    """
    if kept is not None and not scaled(net.spec):
        raise ConfigError(f"{net.name}: keeps latents instead of keys and values; leave --kv-cache-dtype out")
    net.ops = RoundedOps(scheme, group, kept)
    net.seen.values.append(FakeQuantized(net, scheme, group, dtype).value)
