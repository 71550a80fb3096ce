"""Weights into the layout the native kernels stream; the layouts themselves are described in csrc/pack.cpp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quire.core.dtypes import F16, F32, I8, I32, I64, U8
from quire.core.errors import ConfigError
from quire.ops.arrays import Host
from quire.ops.cpu.matrix import Numbers, assemble, part_sizes, table_digits
from quire.ops.cpu.pack_sparse import without_zeros
from quire.ops.cpu.pack_stored import pack_stored
from quire.ops.cpu.state import Cpu
from quire.ops.facts import LANES
from quire.ops.kinds import KINDS, NUMBERS, SUPER_KINDS
from quire.ops.native import huge_bytes
from quire.ops.weights import MOST, SUPER, TABLE_MOST, Packed, StoredMatrix, Weight

PLAIN = {name: kind for name, kind in KINDS.items() if kind.packer}
"""Kinds that are packed as they are."""


def pack(cpu: Cpu, weight: Weight | StoredMatrix, keep_plain: bool = False, narrow: bool = False) -> Packed:
    """`weight` packed for the native `linear`. Raises `ConfigError` when its kind, dtype or group cannot be packed.

    `keep_plain` keeps the unpacked matrix too, for a `linear` overridden with the reference. `narrow`: a bf16 matrix is
    kept in 12 bits where that loses nothing (`narrow_bf16`). Many zeros are left out (`without_zeros`).
    """
    made = without_zeros(cpu, pack_dense(cpu, weight, narrow))
    return replace(made, plain=weight) if keep_plain and isinstance(weight, Weight) else made


def pack_dense(cpu: Cpu, weight: Weight | StoredMatrix, narrow: bool = False) -> Packed:
    """Work as `pack`, zeros and all."""
    if isinstance(weight, StoredMatrix):
        return pack_stored(cpu, weight)
    _validate(weight)
    narrowed = narrow_bf16(cpu, weight) if narrow and weight.kind == "bf16" else None
    if narrowed is not None:
        return narrowed
    in_blocks = pack_super_blocks(cpu, weight)
    if in_blocks is not None:
        return in_blocks
    n, k = weight.shape
    wide = weight.scales is not None and weight.scales.itemsize == 4
    padded = -(-n // LANES) * LANES
    data = huge_bytes(part_sizes(weight.kind, (n, k), weight.group, wide)["codes"][0])
    codes = np.ascontiguousarray(weight.codes)
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
    return assemble(weight.kind, (n, k), weight.group, Numbers(wide, weight.activation_bits), parts)


def narrow_bf16(cpu: Cpu, weight: Weight) -> Packed | None:
    """A bf16 matrix in 12 bits without loss (kind "bf12", csrc/pack_bf12.cpp), or None where exponents are too many."""
    n, k = weight.shape
    if k % KINDS["bf12"].together:
        return None
    data = huge_bytes(part_sizes("bf12", (n, k), 0, False)["codes"][0])
    table, fits = np.zeros(2 * LANES, U8), np.zeros(1, I64)
    values = np.ascontiguousarray(weight.codes)
    cpu.call("pack_bf12", data, table, fits, values, n, k)
    return assemble("bf12", (n, k), 0, Numbers(), {"codes": data, "table": table}) if fits.item() else None


def pack_super_blocks(cpu: Cpu, weight: Weight) -> Packed | None:
    """A weight whose scales are multiples of `units`, as csrc/super_blocks.h has it; None: no kind is like it."""
    form = (weight.bits, weight.group, weight.mins is not None, weight.table is not None)
    kind = SUPER_KINDS.get(form)
    fits = weight.activation_bits == 8 and weight.order is None and weight.zeros is None
    scales, units, least = weight.scales, weight.units, weight.min_units
    if kind is None or not fits or scales is None or units is None or (least is None) != (weight.mins is None):
        return None
    if weight.table is not None and int(np.abs(weight.table.astype(I64)).max()) > 127:
        return None
    n, k = weight.shape
    data = huge_bytes(part_sizes(kind, (n, k), weight.group, False)["codes"][0])
    multiples = _multiples(scales, units)
    mins = None if weight.mins is None or least is None else _multiples(weight.mins, least)
    codes, padded = np.ascontiguousarray(weight.codes), -(-n // LANES) * LANES
    try:
        cpu.call("pack_super_blocks", data, codes, multiples, mins, n, k, NUMBERS[kind])
    except ValueError as error:
        raise _refusal(weight, str(error)) from None
    parts = {"codes": data, "scales": _pack_groups(cpu, units, padded, "pack_scales16")}
    if least is not None:
        parts["mins"] = _pack_groups(cpu, least, padded, "pack_scales16")
    if weight.table is not None:
        parts["table"] = table_digits(weight.table)
    return assemble(kind, (n, k), weight.group, Numbers(), parts)


def _multiples(values: Host, units: Host) -> Host:
    """int8 [n, groups]: how many of its 256 columns' unit each value is (the quotient of an exact product is exact)."""
    wide = units.astype(F32).repeat(values.shape[1] // units.shape[1], 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Host = np.nan_to_num(values / wide, nan=0.0, posinf=0.0, neginf=0.0).astype(I8)
    return found


def _pack_codes(cpu: Cpu, weight: Weight, data: Host, codes: Host) -> None:
    offset = (8 if weight.kind == "int4" and weight.mins is None else 0,) if KINDS[weight.kind].bits == 4 else ()
    cpu.call(KINDS[weight.kind].packer, data, codes, *weight.shape, *offset)


def _pack_parts(cpu: Cpu, weight: Weight, padded: int) -> dict[str, Host | None]:
    """What kernels read per row and group beside the codes."""
    assert weight.scales is not None
    floats = "pack_scales16" if weight.scales.itemsize == 2 else "pack_scales32"
    parts = {"scales": (weight.scales, floats), "zeros": (weight.zeros, "pack_zeros"), "mins": (weight.mins, floats)}
    return {name: None if t is None else _pack_groups(cpu, t, padded, op) for name, (t, op) in parts.items()}


def _pack_groups(cpu: Cpu, values: Host, padded: int, name: str) -> Host:
    n, groups = values.shape
    out = huge_bytes(padded * groups * values.itemsize)
    values = np.ascontiguousarray(values)
    cpu.call(name, out, values, n, groups)
    return out


def _refusal(weight: Weight, reason: str) -> ConfigError:
    return ConfigError(f"cannot pack a {weight.kind} weight of shape {list(weight.codes.shape)}: {reason}")


def _validate(weight: Weight) -> None:
    def refuse(reason: str) -> None:
        raise _refusal(weight, reason)

    if weight.kind not in PLAIN:
        refuse(f"known kinds are {', '.join(PLAIN)}; f16 needs a GPU (--device cuda)")
    kind = PLAIN[weight.kind]
    if weight.codes.ndim != 2 or 0 in weight.codes.shape:
        refuse("it must be a matrix with rows and columns")
    if weight.codes.dtype != kind.dtype:
        refuse(f"its values are {weight.codes.dtype}, not {kind.dtype}")
    _validate_order(weight, refuse)
    if not kind.groups:
        return
    n, k = weight.shape
    if weight.group not in kind.groups:
        refuse(f"its group of {weight.group} is not one of {kind.groups}")
    if k % weight.group:
        refuse(f"its {k} columns are not a multiple of the group of {weight.group}")
    if weight.scales is None or weight.scales.shape != (n, k // weight.group):
        refuse(f"its scales must have the shape [{n}, {k // weight.group}]")
    elif weight.scales.dtype not in (F16, F32):
        refuse(f"its scales are {weight.scales.dtype}, not float16 or float32")
    if weight.zeros is not None and (weight.zeros.shape != (n, k // weight.group) or weight.zeros.dtype != I8):
        refuse(f"its zeros must be int8 of shape [{n}, {k // weight.group}]")
    _validate_parts(weight, refuse)


def _validate_parts(weight: Weight, refuse: Callable[[str], None]) -> None:
    scales, table, order = weight.scales, weight.table, weight.order
    if weight.activation_bits not in MOST:
        refuse(f"its activations of {weight.activation_bits} bits are not of 8 or 16")
    if weight.mins is not None and (scales is None or weight.mins.shape != scales.shape or weight.zeros is not None):
        refuse("minimums must have the scales' shape, and there are no zeros then")
    if weight.mins is not None and scales is not None and weight.mins.dtype != scales.dtype:
        refuse(f"its minimums are {weight.mins.dtype}, its scales {scales.dtype}")
    if (weight.kind == "table4") != (table is not None):
        refuse("a table4 weight needs a table, and no other has one")
    if table is not None and (table.shape != (16,) or int(np.abs(table.astype(I64)).max()) > TABLE_MOST):
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
    shape = weight.shape[0], k // SUPER
    for part in (weight.units, weight.min_units):
        if part is not None and (part.dtype != F16 or part.shape != shape or k % SUPER):
            refuse(f"its units must be float16 of shape {list(shape)}, for whole {SUPER} columns")


def _validate_order(weight: Weight, refuse: Callable[[str], None]) -> None:
    order, k = weight.order, weight.shape[1]
    if order is not None and (
        order.dtype != I32 or not order.flags.c_contiguous or not np.array_equal(np.sort(order), np.arange(k))
    ):
        refuse(f"its order of columns must be a permutation of {k} int32 numbers")
