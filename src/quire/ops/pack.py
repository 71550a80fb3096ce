"""Weights into the layout the native kernels stream; the layouts themselves are described in csrc/pack.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.ops.arena import huge_bytes
from quire.ops.cpu import Cpu
from quire.ops.weights import Packed, Weight

LANES = 16
GROUPS = (32, 64, 128)
BITS = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4}
TOGETHER = {"f32": 1, "bf16": 2, "int8": 4, "int4": 8}
"""Columns that share a vector register lane."""
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.int8}


def pack(cpu: Cpu, weight: Weight, keep_plain: bool = False) -> Packed:
    """`weight` packed for the native `linear`. Raises `ConfigError` when its kind, dtype or group cannot be packed.

    `keep_plain` keeps the unpacked matrix too, for a `linear` overridden with the reference.
    """
    _validate(weight)
    n, k = weight.shape
    together = TOGETHER[weight.kind]
    padded = -(-n // LANES) * LANES
    data = huge_bytes(cpu.native, padded * (-(-k // together) * together) * BITS[weight.kind] // 8)
    codes = weight.codes.contiguous()
    try:
        cpu.call(f"pack_{weight.kind}", data.data_ptr(), codes.data_ptr(), n, k)
    except ValueError as error:
        raise _refusal(weight, str(error)) from None
    buffers = [data]
    handle: tuple[str | int, ...] = (f"linear_{weight.kind}", data.data_ptr())
    if weight.scales is not None:
        scales = _pack_groups(
            cpu, weight.scales, padded, "pack_scales16" if weight.scales.itemsize == 2 else "pack_scales32"
        )
        buffers.append(scales)
        at_zeros = 0
        if weight.zeros is not None:
            zeros = _pack_groups(cpu, weight.zeros, padded, "pack_zeros")
            buffers.append(zeros)
            at_zeros = zeros.data_ptr()
        handle += (scales.data_ptr(), at_zeros, int(weight.scales.itemsize == 4))
    size = sum(b.numel() for b in buffers)
    return Packed(
        weight.kind, n, k, weight.group, size, tuple(buffers), handle=handle, plain=weight if keep_plain else None
    )


def _pack_groups(cpu: Cpu, values: Tensor, padded: int, name: str) -> Tensor:
    n, groups = values.shape
    out = huge_bytes(cpu.native, padded * groups * values.itemsize)
    values = values.contiguous()
    cpu.call(name, out.data_ptr(), values.data_ptr(), n, groups)
    return out


def _refusal(weight: Weight, reason: str) -> ConfigError:
    return ConfigError(f"cannot pack a {weight.kind} weight of shape {list(weight.codes.shape)}: {reason}")


def _validate(weight: Weight) -> None:
    def refuse(reason: str) -> None:
        raise _refusal(weight, reason)

    if weight.kind not in BITS:
        refuse(f"known kinds are {', '.join(BITS)}")
    if weight.codes.dim() != 2 or 0 in weight.codes.shape:
        refuse("it must be a matrix with rows and columns")
    if weight.codes.dtype is not DTYPES[weight.kind]:
        refuse(f"its values are {weight.codes.dtype}, not {DTYPES[weight.kind]}")
    if weight.kind in ("f32", "bf16"):
        return
    n, k = weight.shape
    if weight.group not in GROUPS:
        refuse(f"its group of {weight.group} is not one of {GROUPS}")
    if k % weight.group:
        refuse(f"its {k} columns are not a multiple of the group of {weight.group}")
    if weight.scales is None or weight.scales.shape != (n, k // weight.group):
        refuse(f"its scales must have the shape [{n}, {k // weight.group}]")
    elif weight.scales.dtype not in (torch.float16, torch.float32):
        refuse(f"its scales are {weight.scales.dtype}, not float16 or float32")
    if weight.zeros is not None and (
        weight.zeros.shape != (n, k // weight.group) or weight.zeros.dtype is not torch.int8
    ):
        refuse(f"its zeros must be int8 of shape [{n}, {k // weight.group}]")
