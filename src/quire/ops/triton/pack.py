"""Weights into the layout the Triton kernels stream, made on the device.

Codes of a chunk of columns lie together for all rows, so that a tile of rows is one piece of memory whatever the group:
8 bits [k / group, rows, group]; 4 bits [k / C, rows, C / 2] with C = max(group, 32), where the first half of a chunk's
columns are the low halves of its bytes. What rows have per group is [k / group, rows].

With `--sparse on` a matrix of 16-bit floats that is 2:4 is kept without two of each four columns: a decode reads 1.125
bytes a weight instead of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.ops.triton.gpu import Gpu
from quire.ops.weights import Packed, Weight

GROUPS = (16, 32, 64, 128)
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TWO_OF_FOUR = "2:4"
"""The form of floats without two of each four columns."""
FOURS = 64
"""Of them in a chunk."""
E2M1_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of MXFP4, which kernels compute instead of looking them up."""


@dataclass(frozen=True)
class GpuMatrix:
    """What the kernels of linear_kernels.py and sparse_kernels.py read.

    `form`: "f32" or "f16" (16-bit floats), "2:4" (those without two of each four, `places` says which), "int4",
    "table4", "e2m1" or "int8" (integer codes times floats), "scaled" (int8 or float8 on both sides). `group` 0: one
    scale per row. `shift`: what a stored code is larger than its number. `units`: it as torch's 2:4 products read it.
    """

    form: str
    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    mins: Tensor | None = None
    table: Tensor | None = None
    order: Tensor | None = None
    group: int = 0
    shift: int = 0
    places: Tensor | None = None
    units: Tensor | None = None


def pack(gpu: Gpu, weight: Weight, keep_plain: bool = False) -> Packed:
    """`weight` on the device in the kernels' layout. Raises `ConfigError` when its kind, group or codes do not fit.

    int8 codes whose activations are rounded to 8 bits are multiplied as integers, float8 as float8. All others take
    activations as they are, in the compute dtype, whatever `activation_bits` says: the matrix unit has no use for
    integers there, and 16-bit floats are closer.
    """
    device, (n, k) = gpu.device, weight.shape
    if 0 in weight.codes.shape:
        raise _refusal(weight, "it must be a matrix with rows and columns")
    kind = weight.kind
    if weight.kind in FLOATS:
        matrix = _dense(weight, device)
        fewer = _two_of_four(gpu, matrix) if gpu.sparse and matrix.form == "f16" else None
        if fewer is not None:
            matrix, kind = fewer, f"sparse24_{weight.kind}"
    elif weight.kind == "fp8" or _both_int8(weight):
        matrix = _scaled(gpu, weight)
    elif weight.kind in ("int4", "int8", "table4"):
        matrix = _coded(weight, device)
    else:
        raise _refusal(weight, "known kinds are f32, bf16, f16, fp8, int8, int4, table4")
    parts = (matrix.codes, matrix.scales, matrix.zeros, matrix.mins, matrix.places)
    grown = tuple(t for t in parts if t is not None)
    shared = tuple(t for t in (matrix.table, matrix.order, matrix.units) if t is not None)
    size = sum(t.numel() * t.element_size() for t in (*grown, *units_parts(matrix)))
    return Packed(kind, n, k, weight.group, size, grown, matrix, weight if keep_plain else None, shared)


def keeps_activations(weight: Weight) -> bool:
    """Whether activations stay floats although the definition of `linear` rounds them to integers."""
    return weight.kind in ("int4", "int8", "table4") and not _both_int8(weight)


def _both_int8(weight: Weight) -> bool:
    return (
        weight.kind == "int8"
        and weight.activation_bits == 8
        and weight.zeros is None
        and weight.mins is None
        and weight.group >= 32
    )


def _dense(weight: Weight, device: torch.device) -> GpuMatrix:
    dtype = FLOATS[weight.kind]
    if weight.codes.dtype is not dtype:
        raise _refusal(weight, f"its values are {weight.codes.dtype}")
    return GpuMatrix("f32" if weight.kind == "f32" else "f16", weight.codes.to(device).contiguous())


def _two_of_four(gpu: Gpu, dense: GpuMatrix) -> GpuMatrix | None:
    """A matrix of 16-bit floats [n, k] without two of each four columns; None where some row has more than two, or
    where columns are so few that their chunks take more.

    `codes` [2, n, C * 64]: the first and the second of each four that are there. `places` uint8 [n, C, 32]: their
    columns in two bits each, of fours 0..31 of a chunk in the low halves, of 32..63 in the high. C chunks of 64 fours.
    """
    n, k = dense.codes.shape
    missing = -(k // 4) % FOURS
    if k % 4 or 9 * (k + 4 * missing) >= 16 * k:
        return None
    fours = dense.codes.view(n, -1, 4)
    if int((fours != 0).sum(-1, dtype=torch.int8).max()) > 2:
        return None
    there = (fours == 0).to(torch.int8).sort(dim=-1, stable=True).indices[..., :2]
    codes = torch.nn.functional.pad(fours.gather(-1, there), (0, 0, 0, missing)).permute(2, 0, 1).contiguous()
    both = torch.nn.functional.pad((there[..., 0] | there[..., 1] << 2).to(torch.uint8), (0, missing))
    halves = both.view(n, -1, 2, FOURS // 2)
    places = (halves[:, :, 0] | halves[:, :, 1] << 4).contiguous()
    units = torch.sparse.to_sparse_semi_structured(dense.codes) if gpu.sparse_units else None
    return replace(dense, form=TWO_OF_FOUR, codes=codes, places=places, units=units)


def units_parts(matrix: GpuMatrix) -> list[Tensor]:
    """The memory of `units`, a tensor that says the size of the dense one."""
    parts = (getattr(matrix.units, name, None) for name in ("packed", "meta"))
    return [part for part in parts if isinstance(part, Tensor)]


def _scaled(gpu: Gpu, weight: Weight) -> GpuMatrix:
    k, group, device = weight.shape[1], weight.group, gpu.device
    if weight.kind == "fp8" and not gpu.chip.float8:
        raise _refusal(weight, "this GPU does not multiply float8 (e4m3); use --quantization int8")
    if weight.activation_bits != 8:
        raise _refusal(
            weight, f"its activations have {weight.activation_bits} bits, the matrix unit takes 8 on both sides"
        )
    if group != k and (k % group or group % 32):
        raise _refusal(weight, f"a scale for {group} of its {k} columns is none for a row or a multiple of 32")
    whole = 0 if group == k else group
    return GpuMatrix("scaled", weight.codes.to(device).contiguous(), _rows_last(weight.scales, device), group=whole,
                  order=_moved(weight.order, device))  # fmt: skip


def _coded(weight: Weight, device: torch.device) -> GpuMatrix:
    (n, k), group = weight.shape, weight.group
    if group not in GROUPS or k % group:
        raise _refusal(weight, f"its {k} columns are not in groups of one of {GROUPS}")
    four = weight.kind != "int8"
    shift = 128 if weight.kind == "int8" else 8 if weight.kind == "int4" and weight.mins is None else 0
    codes, chunk = weight.codes.to(device), max(group, 32) if four else group
    if four and (int(codes.min()) < -shift or int(codes.max()) > 15 - shift):
        raise _refusal(weight, f"its codes are outside {-shift}..{15 - shift}")
    codes = codes.view(torch.uint8) + shift
    codes = torch.nn.functional.pad(codes, (0, -k % chunk)).view(n, -1, chunk)
    if four:
        codes = codes[..., : chunk // 2] | codes[..., chunk // 2 :] << 4
    parts = {name: _rows_last(t, device, -k % chunk // group)
             for name, t in (("scales", weight.scales), ("zeros", weight.zeros), ("mins", weight.mins))}  # fmt: skip
    form = "e2m1" if weight.table is not None and weight.table.tolist() == list(E2M1_TABLE) else weight.kind
    table = None if weight.table is None else weight.table.to(device, torch.float32)
    order = _moved(weight.order, device)
    return GpuMatrix(
        form, codes.transpose(0, 1).contiguous(), **parts, table=table, order=order, group=group, shift=shift
    )


def _rows_last(values: Tensor | None, device: torch.device, missing: int = 0) -> Tensor | None:
    """Values [n, groups] as [groups, n], zeros for groups that only pad."""
    if values is None:
        return None
    return torch.nn.functional.pad(values.to(device), (0, missing)).t().contiguous()


def _moved(order: Tensor | None, device: torch.device) -> Tensor | None:
    return None if order is None else order.to(device)


def _refusal(weight: Weight, reason: str) -> ConfigError:
    return ConfigError(f"cannot pack a {weight.kind} weight of shape {list(weight.codes.shape)}: {reason}")
