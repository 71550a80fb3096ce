"""Weights into the layout the Triton kernels stream, made on the device.

Codes of a chunk of columns lie together for all rows, so that a tile of rows is one piece of memory whatever the group:
8 bits [k / group, rows, group]; 4 bits [k / C, rows, C / 2] with C = max(group, 32), where the first half of a chunk's
columns are the low halves of its bytes. What rows have per group is [k / group, rows].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.ops.gpu import Gpu
from quire.ops.weights import Packed, Weight

GROUPS = (16, 32, 64, 128)
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
E2M1_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of MXFP4, which kernels compute instead of looking them up."""


@dataclass(frozen=True)
class Matrix:
    """What the kernels of linear_kernels.py read.

    `form`: "f32" or "f16" (16-bit floats), "int4", "table4", "e2m1" or "int8" (integer codes times floats), "scaled"
    (int8 or float8 on both sides). `group` 0: one scale per row. `shift`: what a stored code is larger than its number.
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


def pack(gpu: Gpu, weight: Weight, keep_plain: bool = False) -> Packed:
    """`weight` on the device in the kernels' layout. Raises `ConfigError` when its kind, group or codes do not fit.

    int8 codes whose activations are rounded to 8 bits are multiplied as integers, float8 as float8. All others take
    activations as they are, in the compute dtype, whatever `activation_bits` says: the matrix unit has no use for
    integers there, and 16-bit floats are closer.
    """
    device, (n, k) = gpu.device, weight.shape
    if 0 in weight.codes.shape:
        raise _refusal(weight, "it must be a matrix with rows and columns")
    if weight.kind in FLOATS:
        matrix = _dense(weight, device)
    elif weight.kind == "fp8" or _both_int8(weight):
        matrix = _scaled(gpu, weight)
    elif weight.kind in ("int4", "int8", "table4"):
        matrix = _coded(weight, device)
    else:
        raise _refusal(weight, "known kinds are f32, bf16, f16, fp8, int8, int4, table4")
    grown = tuple(t for t in (matrix.codes, matrix.scales, matrix.zeros, matrix.mins) if t is not None)
    shared = tuple(t for t in (matrix.table, matrix.order) if t is not None)
    size = sum(t.numel() * t.element_size() for t in grown)
    return Packed(weight.kind, n, k, weight.group, size, grown, matrix, weight if keep_plain else None, shared)


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


def _dense(weight: Weight, device: torch.device) -> Matrix:
    dtype = FLOATS[weight.kind]
    if weight.codes.dtype is not dtype:
        raise _refusal(weight, f"its values are {weight.codes.dtype}")
    return Matrix("f32" if weight.kind == "f32" else "f16", weight.codes.to(device).contiguous())


def _scaled(gpu: Gpu, weight: Weight) -> Matrix:
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
    return Matrix("scaled", weight.codes.to(device).contiguous(), _rows_last(weight.scales, device), group=whole,
                  order=_moved(weight.order, device))  # fmt: skip


def _coded(weight: Weight, device: torch.device) -> Matrix:
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
    return Matrix(form, codes.transpose(0, 1).contiguous(), **parts, table=table, order=order, group=group, shift=shift)


def _rows_last(values: Tensor | None, device: torch.device, missing: int = 0) -> Tensor | None:
    """Values [n, groups] as [groups, n], zeros for groups that only pad."""
    if values is None:
        return None
    return torch.nn.functional.pad(values.to(device), (0, missing)).t().contiguous()


def _moved(order: Tensor | None, device: torch.device) -> Tensor | None:
    return None if order is None else order.to(device)


def _refusal(weight: Weight, reason: str) -> ConfigError:
    return ConfigError(f"cannot pack a {weight.kind} weight of shape {list(weight.codes.shape)}: {reason}")
