"""The GPU backend's side of the ops of rows that hold several streams, and of gates that few numbers pass."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from quire.ops.op import impl
from quire.ops.reference import streams as definitions
from quire.ops.triton import stream_kernels as kernels
from quire.ops.triton.checks import activations, tensor
from quire.ops.triton.gpu import Gpu
from quire.ops.triton.rowwise import warps

F32 = torch.float32


@impl("mix_streams", "triton")
def mix_streams(gpu: Gpu, x: Tensor, m: Tensor, weight: Tensor, bias: Tensor, out: int) -> Tensor:
    rows, width = activations(x, "mix_streams x")
    p = activations(m, "mix_streams m", rows)[1]
    count = len(tensor(weight, "mix_streams weight", F32, -1, p))
    tensor(bias, "mix_streams bias", F32, count)
    streams = count // out
    if streams * out != count or width % streams:
        raise ValueError(f"mix_streams: {count} numbers do not make {out} streams of rows of {width}")
    h = width // streams
    mixed = gpu.empty(rows, out * h, dtype=x.dtype)
    if rows:
        size = int(min(next_power_of_2(h), gpu.config("rowwise")["block"]))
        kernels.mix_kernel[(rows, cdiv(h, size))](
            mixed, x, m, weight, bias, h, p, BP=next_power_of_2(p), BH=size, STREAMS=streams, OUT=out
        )
    return mixed


@impl("sinkhorn_gates", "triton")
def sinkhorn_gates(gpu: Gpu, x: Tensor, streams: int, turns: int, most: float, least: float) -> Tensor:
    return x.copy_(definitions.sinkhorn_gates(x.float(), streams, turns, most, least))


@impl("match_lengths", "triton")
def match_lengths(gpu: Gpu, x: Tensor, streams: int, least: float) -> Tensor:
    rows, width = activations(x, "match_lengths x")
    if width % streams:
        raise ValueError(f"match_lengths: rows of {width} numbers are not {streams} streams")
    if rows and streams > 1:
        size = next_power_of_2(width // streams)
        kernels.lengths_kernel[(rows, streams - 1)](x, width // streams, streams, least, BH=size, num_warps=warps(size))
    return x


@impl("sparse_gate", "triton")
def sparse_gate(gpu: Gpu, x: Tensor, factor: float) -> Tensor:
    rows, width = activations(x, "sparse_gate x")
    if width % 2:
        raise ValueError(f"sparse_gate: rows of {width} numbers are not gates and as many others")
    if rows:
        size = next_power_of_2(width // 2)
        kernels.sparse_gate_kernel[(rows,)](x, width // 2, factor, BF=size, num_warps=warps(size))
    return x


@impl("scale_columns", "triton")
def scale_columns(gpu: Gpu, x: Tensor, factors: Tensor) -> Tensor:
    return x.mul_(factors)
