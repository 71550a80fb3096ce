"""Weights into the layout the native kernels stream; the layouts themselves are described in csrc/pack.cpp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.ops.arena import huge_bytes
from quire.ops.cpu import Cpu
from quire.ops.weights import MOST, TABLE_MOST, Packed, Weight

LANES = 16
GROUPS = {"fp8": (32, 64, 128, 256)} | dict.fromkeys(("int8", "int4", "table4"), (16, 32, 64, 128))
"""Columns that may share a scale."""
BITS = {"f32": 32, "bf16": 16, "bf12": 12, "fp8": 8, "int8": 8, "int4": 4, "table4": 4}
TOGETHER = {"f32": 1, "bf16": 2, "bf12": 8, "fp8": 4, "int8": 4, "int4": 8, "table4": 8}
"""Columns that share a vector register lane."""
DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.int8,
    "table4": torch.int8,
}


def pack(cpu: Cpu, weight: Weight, keep_plain: bool = False, narrow: bool = False) -> Packed:
    """`weight` packed for the native `linear`. Raises `ConfigError` when its kind, dtype or group cannot be packed.

    `keep_plain` keeps the unpacked matrix too, for a `linear` overridden with the reference. `narrow`: a bf16 matrix is
    kept in 12 bits where that loses nothing (`narrow_bf16`).
    """
    _validate(weight)
    narrowed = narrow_bf16(cpu, weight) if narrow and weight.kind == "bf16" else None
    if narrowed is not None:
        return replace(narrowed, plain=weight) if keep_plain else narrowed
    n, k = weight.shape
    together = TOGETHER[weight.kind]
    padded = -(-n // LANES) * LANES
    data = huge_bytes(cpu.native, padded * (-(-k // together) * together) * BITS[weight.kind] // 8)
    codes = weight.codes.contiguous()
    try:
        _pack_codes(cpu, weight, data, codes)
    except ValueError as error:
        raise _refusal(weight, str(error)) from None
    parts = {"codes": data}
    if weight.scales is not None:
        parts |= {name: t for name, t in _pack_parts(cpu, weight, padded).items() if t is not None}
    if weight.table is not None:
        parts["table"] = table_digits(weight.table)
    if weight.order is not None:
        parts["order"] = weight.order
    wide = weight.scales is not None and weight.scales.itemsize == 4
    made = assemble(weight.kind, (n, k), weight.group, Numbers(wide, weight.activation_bits), parts)
    return replace(made, plain=weight) if keep_plain else made


def narrow_bf16(cpu: Cpu, weight: Weight) -> Packed | None:
    """A bf16 matrix in 12 bits without loss (kind "bf12", csrc/pack_bf12.cpp), or None where exponents are too many."""
    n, k = weight.shape
    if k % TOGETHER["bf12"]:
        return None
    data = huge_bytes(cpu.native, part_sizes("bf12", (n, k), 0, False)["codes"][0])
    table, fits = torch.zeros(2 * LANES, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    values = weight.codes.contiguous()
    cpu.call("pack_bf12", data.data_ptr(), table.data_ptr(), fits.data_ptr(), values.data_ptr(), n, k)
    return assemble("bf12", (n, k), 0, Numbers(), {"codes": data, "table": table}) if fits.item() else None


class Numbers(NamedTuple):
    """Of a packed matrix of integers: whether scales and minimums are f32 (else f16), bits of its activations."""

    wide: bool = False
    activation_bits: int = 8


BF12_CHUNK, BF12_EXCEPTION_BYTES = 256, 64
"""Columns of 16 rows in 12 bits that share a list of exceptions, and its size; also in csrc/units/linear_bf12.h."""
SHARED = ("table", "order")
"""Parts that do not grow with the rows."""
SLOTS = {"table4": ("scales", "table", "books", "order"), "fp8": ("scales",)}
USUAL_SLOTS = ("scales", "zeros", "mins", "order")
"""Addresses in the handle of a matrix with groups, behind that of its codes; `books` counts the digits of a table."""


def part_sizes(kind: str, shape: tuple[int, int], group: int, wide: bool) -> dict[str, tuple[int, ...]]:
    """Bytes that each part of a packed matrix [n, k] may have: codes, scales, zeros, minimums, table, order."""
    n, k = shape
    together, padded = TOGETHER[kind], -(-n // LANES) * LANES
    found: dict[str, tuple[int, ...]] = {"codes": (padded * (-(-k // together) * together) * BITS[kind] // 8,)}
    if kind == "bf12":
        exceptions = padded // LANES * -(-k // BF12_CHUNK) * BF12_EXCEPTION_BYTES
        found = {"codes": (found["codes"][0] + exceptions,), "table": (2 * LANES,)}
    if group:
        floats = (padded * (k // group) * (4 if wide else 2),)
        sizes = {"zeros": (padded * (k // group),), "mins": floats, "order": (4 * k,), "table": (16, 32)}
        found |= {"scales": floats} | {name: sizes[name] for name in SLOTS.get(kind, USUAL_SLOTS) if name in sizes}
    return found


def assemble(kind: str, shape: tuple[int, int], group: int, numbers: Numbers, parts: Mapping[str, Tensor]) -> Packed:
    """The packed matrix [n, k] from its parts, whose sizes are those of `part_sizes`."""
    at = {name: t.data_ptr() for name, t in parts.items()}
    handle: tuple[str | int, ...] = (f"linear_{kind}", at["codes"])
    if kind == "bf12":
        handle += (at["table"],)
    if group:
        at["books"] = parts["table"].numel() // 16 if "table" in parts else 0
        slots = (at.get(name, 0) for name in SLOTS.get(kind, USUAL_SLOTS))
        handle += (*slots, int(numbers.wide), 1 if numbers.activation_bits == 8 else 2)
    own = tuple(t for name, t in parts.items() if name not in SHARED)
    shared = tuple(parts[name] for name in reversed(SHARED) if name in parts)
    return Packed(kind, *shape, group, sum(t.numel() for t in own), own, handle, None, shared)


def take_apart(packed: Packed) -> tuple[Numbers, dict[str, Tensor]]:
    """The inverse of `assemble`."""
    held = {t.data_ptr(): t for t in (*packed.buffers, *packed.shared)}
    _, codes, *rest = packed.handle
    parts = {"codes": held[codes]}
    if packed.kind == "bf12":
        parts["table"] = held[rest[0]]
    if not packed.group:
        return Numbers(), parts
    *slots, wide, digits = rest
    named = zip(SLOTS.get(packed.kind, USUAL_SLOTS), slots, strict=True)
    parts |= {name: held[at] for name, at in named if name != "books" and at}
    return Numbers(bool(wide), 8 * digits), parts


def _pack_codes(cpu: Cpu, weight: Weight, data: Tensor, codes: Tensor) -> None:
    n, k = weight.shape
    if BITS[weight.kind] == 4:
        offset = 8 if weight.kind == "int4" and weight.mins is None else 0
        cpu.call("pack_int4", data.data_ptr(), codes.data_ptr(), n, k, offset)
    else:
        cpu.call(f"pack_{weight.kind}", data.data_ptr(), codes.data_ptr(), n, k)


def _pack_parts(cpu: Cpu, weight: Weight, padded: int) -> dict[str, Tensor | None]:
    """What kernels read per row and group beside the codes."""
    assert weight.scales is not None
    floats = "pack_scales16" if weight.scales.itemsize == 2 else "pack_scales32"
    parts = {"scales": (weight.scales, floats), "zeros": (weight.zeros, "pack_zeros"), "mins": (weight.mins, floats)}
    return {name: None if t is None else _pack_groups(cpu, t, padded, op) for name, (t, op) in parts.items()}


def table_digits(table: Tensor) -> Tensor:
    """The numbers of a table [16] int16 as bytes, 128 more: [16] if all fit, else their digits of base 255 [2 * 16]."""
    numbers = table.long()
    if int(numbers.abs().max()) <= 127:
        return (numbers + 128).to(torch.uint8)
    high = torch.round(numbers / 255).long()
    return (torch.cat((high, numbers - 255 * high)) + 128).to(torch.uint8)


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

    if weight.kind not in DTYPES:
        refuse(f"known kinds are {', '.join(DTYPES)}; f16 needs a GPU (--device cuda)")
    if weight.codes.dim() != 2 or 0 in weight.codes.shape:
        refuse("it must be a matrix with rows and columns")
    if weight.codes.dtype is not DTYPES[weight.kind]:
        refuse(f"its values are {weight.codes.dtype}, not {DTYPES[weight.kind]}")
    if weight.kind in ("f32", "bf16"):
        return
    n, k = weight.shape
    if weight.group not in GROUPS[weight.kind]:
        refuse(f"its group of {weight.group} is not one of {GROUPS[weight.kind]}")
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
    _validate_parts(weight, refuse)


def _validate_parts(weight: Weight, refuse: Callable[[str], None]) -> None:
    scales, table, order = weight.scales, weight.table, weight.order
    if weight.activation_bits not in MOST:
        refuse(f"its activations of {weight.activation_bits} bits are not of 8 or 16")
    if weight.mins is not None and (scales is None or weight.mins.shape != scales.shape or weight.zeros is not None):
        refuse("minimums must have the scales' shape, and there are no zeros then")
    if weight.mins is not None and scales is not None and weight.mins.dtype is not scales.dtype:
        refuse(f"its minimums are {weight.mins.dtype}, its scales {scales.dtype}")
    if (weight.kind == "table4") != (table is not None):
        refuse("a table4 weight needs a table, and no other has one")
    if table is not None and (table.shape != (16,) or int(table.long().abs().max()) > TABLE_MOST):
        refuse(f"its table must hold 16 numbers of at most {TABLE_MOST}")
    if table is not None and (weight.zeros is not None or weight.mins is not None):
        refuse("a table has neither zeros nor minimums")
    if weight.kind == "fp8" and (
        weight.activation_bits != 16 or weight.zeros is not None or weight.mins is not None or order is not None
    ):
        refuse("float8 weights have scales alone, and activations of 16 bits; those of 8 need a GPU (--device cuda)")
    if weight.kind == "fp8" and scales is not None and scales.itemsize != 4:
        refuse("the scales of float8 weights must be float32")
    k = weight.shape[1]
    if order is not None and (
        order.dtype is not torch.int32 or not order.is_contiguous() or not torch.equal(order.sort()[0], _counted(k))
    ):
        refuse(f"its order of columns must be a permutation of {k} int32 numbers")


def _counted(k: int) -> Tensor:
    return torch.arange(k, dtype=torch.int32)
