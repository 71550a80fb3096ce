"""The Triton backend's side of the ops of streams.py: few numbers a row, in torch's own kernels."""

from __future__ import annotations

from torch import Tensor

from quire.ops.op import impl
from quire.ops.reference import streams as definitions
from quire.ops.triton.gpu import Gpu


@impl("mix_streams", "triton")
def mix_streams(gpu: Gpu, x: Tensor, m: Tensor, weight: Tensor, bias: Tensor, out: int) -> Tensor:
    return definitions.mix_streams(x.float(), m.float(), weight, bias, out).to(x.dtype)


@impl("match_lengths", "triton")
def match_lengths(gpu: Gpu, x: Tensor, streams: int, least: float) -> Tensor:
    return x.copy_(definitions.match_lengths(x.float(), streams, least))


@impl("sparse_gate", "triton")
def sparse_gate(gpu: Gpu, x: Tensor, factor: float) -> Tensor:
    return x.copy_(definitions.sparse_gate(x.float(), factor))


@impl("scale_columns", "triton")
def scale_columns(gpu: Gpu, x: Tensor, factors: Tensor) -> Tensor:
    return x.mul_(factors)
