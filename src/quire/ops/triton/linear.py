"""The Triton backend's products: `linear` in every weight form, one per head, one per expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.ops.experts import Grouped
from quire.ops.op import impl
from quire.ops.reference.layers import activation, gated_activation
from quire.ops.triton import linear_kernels as kernels
from quire.ops.triton.gpu import Gpu
from quire.ops.triton.pack import FOURS, TWO_OF_FOUR, GpuMatrix
from quire.ops.triton.sparse_kernels import two_of_four_kernel
from quire.ops.weights import E4M3_MOST, MOST, Packed

PLAIN, HEADS, EXPERTS = (mode.value for mode in (kernels.PLAIN, kernels.HEADS, kernels.EXPERTS))
CODED = {"int4": kernels.INT4, "table4": kernels.TABLE4, "e2m1": kernels.E2M1, "int8": kernels.INT8}
SHARED_TILES = {"table4": "int4", "e2m1": "int4", TWO_OF_FOUR: "two_of_four"}
"""Form -> that whose tiles it has, or another name of its own."""
STEP = 4 * FOURS
"""Runs of columns are a multiple of this many, so that every kernel's steps fit into them."""
LEAST_ROWS = 65
"""Rows from which `cusparselt` takes a product: with fewer a product waits for memory."""


@dataclass(frozen=True)
class MatrixProduct:
    """x times each of `count` matrices [n, k] that lie `rows` rows apart; `mode` says which rows and columns one reads.

    m: rows of the output. `x_step`: columns of a head. `tokens`: the row of x that a row of the output reads.
    """

    m: int
    n: int
    k: int
    bias: Tensor | None = None
    mode: int = PLAIN
    count: int = 1
    rows: int = 0
    x_step: int = 0
    tokens: Tensor | None = None
    offsets: Tensor | None = None


class ProductTiling:
    """How programs share a product: the tile, the runs of columns, and whether a program takes one run or all.

    `nbytes`: of a number of x. The number of runs depends on n and k alone: it decides the order of a sum. The rest may
    depend on the batch.
    """

    def __init__(self, gpu: Gpu, w: GpuMatrix, p: MatrixProduct, nbytes: int) -> None:
        per_matrix = -(-p.m // p.count) if p.mode == EXPERTS else p.m
        name = f"linear_{SHARED_TILES.get(w.form, w.form)}"
        self.sizes = gpu.config(name, m=per_matrix, n=p.n, k=p.k, group=w.group, bytes=nbytes)
        self.segments, self.run, most = 1, p.k + -p.k % STEP, 0
        if p.mode == PLAIN:
            facts = gpu.config("linear_runs", n=p.n, k=p.k)
            self.segments, self.run, most = *runs(p.n, p.k, facts), facts["programs"]
        tiles = -(-p.m // self.sizes["bm"])
        if p.mode == EXPERTS:  # each expert may end in a tile that is not full
            tiles = min(p.count, p.m) + p.m // self.sizes["bm"]
        tiles *= -(-p.n // self.sizes["bn"])
        self.split = self.segments > 1 and tiles * self.segments <= most
        self.grid = tiles, self.segments if self.split else p.count if p.mode == HEADS else 1
        self.slots = 1 << (p.count - 1).bit_length() if p.mode == EXPERTS else 1

    def constants(self, gpu: Gpu, p: MatrixProduct) -> dict[str, Any]:
        """What all kernels of products are compiled for."""
        return {"SEGMENTS": self.segments, "SPLIT": self.split, "MODE": p.mode, "SLOTS": self.slots,
                "BN": self.sizes["bn"], "BM": self.sizes["bm"], "UPCAST": gpu.interpreted,
                "num_warps": self.sizes["num_warps"], "num_stages": self.sizes["num_stages"]}  # fmt: skip


def runs(n: int, k: int, facts: dict[str, int]) -> tuple[int, int]:
    """(number of runs of columns, columns of each but the last) of a matrix [n, k].

    One row of a batch has n / 64 programs. Columns are halved while that gives at most `programs`, `most` runs, and
    runs of at least `least` columns.
    """
    tiles, count = -(-n // 64), 1
    while (
        2 * count * max(tiles, 1) <= facts["programs"]
        and 2 * count <= facts["most"]
        and k >= 2 * count * facts["least"]
    ):
        count *= 2
    run = -(-k // (count * STEP)) * STEP
    return -(-k // run), run


def multiply(gpu: Gpu, x: Tensor, w: GpuMatrix, p: MatrixProduct, out: Tensor) -> None:
    """out [m, n * heads] = x times w, with biases."""
    if not p.m:
        return
    if w.order is not None:
        x = x.index_select(1, w.order)
    cut = ProductTiling(gpu, w, p, x.element_size())
    if cut.split:
        bias, target = None, gpu.empty(cut.segments, p.m, p.n)
    else:
        bias, target = p.bias, out
    x_scales = None
    if w.form in ("f32", "f16"):
        _dense(gpu, x, w, p, cut, (target, bias))
    elif w.form == TWO_OF_FOUR:
        _two_of_four(gpu, x, w, p, cut, (target, bias))
    elif w.form == "scaled":
        x_scales = _scaled(gpu, x, w, p, cut, (target, bias))
    else:
        _coded(gpu, x, w, p, cut, (target, bias))
    if cut.split:
        scales = w.scales if x_scales is not None else None
        grid = p.m, -(-p.n // 1024)
        kernels.sum_segments[grid](out, target, x_scales, scales, p.bias, p.m, p.n, cut.segments, 1024)


Target = tuple[Tensor, Tensor | None]
"""Where a kernel writes, and the bias that it adds."""


def _dense(gpu: Gpu, x: Tensor, w: GpuMatrix, p: MatrixProduct, cut: ProductTiling, to: Target) -> None:
    block = cut.sizes["bk"]
    kernels.dense_kernel[cut.grid](
        to[0], x, w.codes, to[1], p.tokens, p.offsets, p.m, p.n, p.k, p.rows, x.stride(0), to[0].stride(-2), p.x_step,
        cut.run, p.count, BK=block, EVEN=p.k % block == 0, **cut.constants(gpu, p),
    )  # fmt: skip


def _two_of_four(gpu: Gpu, x: Tensor, w: GpuMatrix, p: MatrixProduct, cut: ProductTiling, to: Target) -> None:
    """x's columns of a remainder by four are brought together first: programs read them side by side."""
    assert w.places is not None
    wanted = x.view(len(x), -1, p.x_step)[..., : p.k] if p.x_step else x
    apart, x_step = wanted.reshape(len(x), -1, 4).permute(2, 0, 1).contiguous(), p.k // 4 if p.x_step else 0
    two_of_four_kernel[cut.grid](
        to[0], apart, w.codes, w.places, to[1], p.tokens, p.offsets, p.m, len(x), p.n, p.k // 4, apart.shape[-1],
        w.codes.shape[1], p.rows, to[0].stride(-2), x_step, w.places.shape[1], cut.run // STEP, p.count,
        EVEN=p.k % STEP == 0, **cut.constants(gpu, p),
    )  # fmt: skip


def _coded(gpu: Gpu, x: Tensor, w: GpuMatrix, p: MatrixProduct, cut: ProductTiling, to: Target) -> None:
    sums = None
    chunk = w.group if w.form == "int8" else max(w.group, 32)
    if w.mins is not None:
        groups = p.k // w.group
        sums = gpu.empty(groups, len(x))
        kernels.sum_groups[len(x), -(-groups // 32)](sums, x, len(x), x.stride(0), groups, w.group, 32)
    kernels.grouped_kernel[cut.grid](
        to[0], x, w.codes, w.scales, w.zeros, w.mins, sums, w.table, to[1], p.tokens, p.offsets, p.m, len(x), p.n, p.k,
        -(-p.k // chunk), w.codes.shape[1], p.rows, x.stride(0), to[0].stride(-2), cut.run // chunk, p.count,
        GROUP=w.group, FORM=CODED[w.form], SHIFT=w.shift, EVEN=p.k % chunk == 0,
        PTX=gpu.ptx, **cut.constants(gpu, p),
    )  # fmt: skip


def _scaled(gpu: Gpu, x: Tensor, w: GpuMatrix, p: MatrixProduct, cut: ProductTiling, to: Target) -> Tensor | None:
    """Quantize x, multiply; returns x's scales when they are still to be multiplied (one per row, runs apart)."""
    group = w.group or p.k
    codes = gpu.empty(len(x), p.k, dtype=w.codes.dtype)
    scales = gpu.empty(p.k // group, len(x))
    most = MOST[8] if codes.dtype is torch.int8 else E4M3_MOST
    block, groups = 1 << (group - 1).bit_length(), p.k // group
    together = min(max(2048 // block, 1), 1 << (groups - 1).bit_length())
    kernels.quantize_kernel[len(x), -(-groups // together)](
        codes, scales, x, len(x), p.k, x.stride(0), group, block, together, most,
        num_warps=min(max(block * together // 512, 1), 8),
    )  # fmt: skip
    step = 128 if group % 128 == 0 or not w.group else 64 if group % 64 == 0 else 32
    kernels.scaled_kernel[cut.grid](
        to[0], codes, scales, w.codes, w.scales, to[1], p.tokens, p.offsets, p.m, len(x), p.n, p.k, len(w.codes),
        p.rows, to[0].stride(-2), cut.run, p.count, GROUP=w.group, BK=step, EVEN=p.k % step == 0,
        **cut.constants(gpu, p),
    )  # fmt: skip
    return scales if cut.split and not w.group else None


def check_rows(x: Tensor, what: str, columns: int) -> int:
    """The number of rows of x, which must be contiguous floats [T, columns]; `ValueError` names what is not."""
    if x.dim() != 2 or x.shape[1] != columns or not x.is_contiguous() or not x.dtype.is_floating_point:
        raise ValueError(f"{what}: need contiguous floats [rows, {columns}], got {x.dtype} {list(x.shape)}")
    return len(x)


@impl("linear", "triton")
def linear(gpu: Gpu, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
    m = check_rows(x, "linear x", w.k)
    out = gpu.empty(m, w.n, dtype=torch.float32 if w.kind == "f32" else x.dtype)
    multiply(gpu, x, w.handle, MatrixProduct(m, w.n, w.k, bias), out)
    return out


@impl("linear", "triton:cublas")
def linear_cublas(gpu: Gpu, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
    """Unquantized matrices through torch, whose library chooses kernels by the number of rows: a row's last bits may
    then depend on the batch it is in. Others as by `linear`."""
    if w.handle.form not in ("f32", "f16"):
        return linear(gpu, x, w, bias)
    check_rows(x, "linear x", w.k)
    y = torch.nn.functional.linear(x.to(w.handle.codes.dtype), w.handle.codes)
    y = y.to(torch.float32 if w.kind == "f32" else x.dtype)
    return y if bias is None else y.add_(bias)


@impl("linear", "triton:cusparselt")
def linear_cusparselt(gpu: Gpu, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
    """2:4 matrices through torch's semi-structured products from `LEAST_ROWS` rows on, whose units skip the zeros
    (Mishra et al. 2021): a row's last bits may then depend on the batch it is in. All else as by `linear`."""
    if w.handle.units is None or len(x) < LEAST_ROWS:
        return linear(gpu, x, w, bias)
    check_rows(x, "linear x", w.k)
    y = torch.nn.functional.linear(x.to(w.handle.codes.dtype), w.handle.units).to(x.dtype)
    return y if bias is None else y.add_(bias)


@impl("head_linear", "triton")
def head_linear(gpu: Gpu, x: Tensor, w: Packed, heads: int, n: int) -> Tensor:
    m = check_rows(x, "head_linear x", x.shape[1])
    width, rows = x.shape[1] // heads, w.n // heads
    out = gpu.empty(m, heads * n, dtype=x.dtype)
    multiply(gpu, x, w.handle, MatrixProduct(m, n, w.k, mode=HEADS, count=heads, rows=rows, x_step=width), out)
    return out


@impl("gated_mlp", "triton")
def gated_mlp(
    gpu: Gpu,
    x: Tensor,
    gate_up: Packed,
    gate_up_bias: Tensor | None,
    down: Packed,
    down_bias: Tensor | None,
    kind: str,
) -> Tensor:
    wide = linear(gpu, x, gate_up, gate_up_bias)
    inner = gated_activation(wide.float(), kind).to(wide.dtype)  # models call the three ops themselves (`fuses_mlp`)
    return linear(gpu, inner, down, down_bias)


@impl("plain_mlp", "triton")
def plain_mlp(
    gpu: Gpu,
    x: Tensor,
    up: Packed,
    up_bias: Tensor | None,
    down: Packed,
    down_bias: Tensor | None,
    kind: str,
) -> Tensor:
    wide = linear(gpu, x, up, up_bias)
    return linear(gpu, activation(wide.float(), kind).to(wide.dtype), down, down_bias)


@impl("grouped_linear", "triton")
def grouped_linear(gpu: Gpu, x: Tensor, w: Grouped, tokens: Tensor | None, offsets: Tensor) -> Tensor:
    check_rows(x, "grouped_linear x", w.k)
    m = len(x) if tokens is None else tokens.numel()
    rows = w.packed.n // w.experts
    out = gpu.empty(m, w.n, dtype=x.dtype)
    p = MatrixProduct(m, w.n, w.k, w.bias, EXPERTS, w.experts, rows, tokens=tokens, offsets=offsets)
    multiply(gpu, x, w.packed.handle, p, out)
    return out
