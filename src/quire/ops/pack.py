"""Weights into the layout the native kernels stream; the layouts themselves are described in csrc/pack.cpp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.ops.arena import huge_bytes
from quire.ops.cpu import Cpu
from quire.ops.kinds import KINDS, LANES, NUMBERS, SUPER_KINDS
from quire.ops.matrix import Numbers, assemble, part_sizes, table_digits
from quire.ops.pack_sparse import without_zeros
from quire.ops.pack_stored import pack_stored
from quire.ops.weights import MOST, SUPER, TABLE_MOST, Packed, Stored, Weight

PLAIN = {name: kind for name, kind in KINDS.items() if kind.packer}
"""Kinds that are packed as they are."""


def pack(cpu: Cpu, weight: Weight | Stored, keep_plain: bool = False, narrow: bool = False) -> Packed:
    """`weight` packed for the native `linear`. Raises `ConfigError` when its kind, dtype or group cannot be packed.

    `keep_plain` keeps the unpacked matrix too, for a `linear` overridden with the reference. `narrow`: a bf16 matrix is
    kept in 12 bits where that loses nothing (`narrow_bf16`). Many zeros are left out (`without_zeros`).
    """
    made = without_zeros(cpu, pack_dense(cpu, weight, narrow))
    return replace(made, plain=weight) if keep_plain and isinstance(weight, Weight) else made


def pack_dense(cpu: Cpu, weight: Weight | Stored, narrow: bool = False) -> Packed:
    """As `pack`, zeros and all."""
    if isinstance(weight, Stored):
        return pack_stored(cpu, weight)
    _validate(weight)
    narrowed = narrow_bf16(cpu, weight) if narrow and weight.kind == "bf16" else None
    if narrowed is not None:
        return narrowed
    in_blocks = pack_super(cpu, weight)
    if in_blocks is not None:
        return in_blocks
    n, k = weight.shape
    wide = weight.scales is not None and weight.scales.itemsize == 4
    padded = -(-n // LANES) * LANES
    data = huge_bytes(cpu.native, part_sizes(weight.kind, (n, k), weight.group, wide)["codes"][0])
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
    return assemble(weight.kind, (n, k), weight.group, Numbers(wide, weight.activation_bits), parts)


def narrow_bf16(cpu: Cpu, weight: Weight) -> Packed | None:
    """A bf16 matrix in 12 bits without loss (kind "bf12", csrc/pack_bf12.cpp), or None where exponents are too many."""
    n, k = weight.shape
    if k % KINDS["bf12"].together:
        return None
    data = huge_bytes(cpu.native, part_sizes("bf12", (n, k), 0, False)["codes"][0])
    table, fits = torch.zeros(2 * LANES, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    values = weight.codes.contiguous()
    cpu.call("pack_bf12", data.data_ptr(), table.data_ptr(), fits.data_ptr(), values.data_ptr(), n, k)
    return assemble("bf12", (n, k), 0, Numbers(), {"codes": data, "table": table}) if fits.item() else None


def pack_super(cpu: Cpu, weight: Weight) -> Packed | None:
    """A weight whose scales are multiples of `units`, as csrc/super_blocks.h has it; None: no kind is like it."""
    form = (weight.bits, weight.group, weight.mins is not None, weight.table is not None)
    kind = SUPER_KINDS.get(form)
    fits = weight.activation_bits == 8 and weight.order is None and weight.zeros is None
    scales, units, least = weight.scales, weight.units, weight.min_units
    if kind is None or not fits or scales is None or units is None or (least is None) != (weight.mins is None):
        return None
    if weight.table is not None and int(weight.table.abs().max()) > 127:
        return None
    n, k = weight.shape
    data = huge_bytes(cpu.native, part_sizes(kind, (n, k), weight.group, False)["codes"][0])
    multiples = _multiples(scales, units)
    mins = None if weight.mins is None or least is None else _multiples(weight.mins, least)
    codes, padded = weight.codes.contiguous(), -(-n // LANES) * LANES
    at_mins = 0 if mins is None else mins.data_ptr()
    try:
        cpu.call("pack_super", data.data_ptr(), codes.data_ptr(), multiples.data_ptr(), at_mins, n, k, NUMBERS[kind])
    except ValueError as error:
        raise _refusal(weight, str(error)) from None
    parts = {"codes": data, "scales": _pack_groups(cpu, units, padded, "pack_scales16")}
    if least is not None:
        parts["mins"] = _pack_groups(cpu, least, padded, "pack_scales16")
    if weight.table is not None:
        parts["table"] = table_digits(weight.table)
    return assemble(kind, (n, k), weight.group, Numbers(), parts)


def _multiples(values: Tensor, units: Tensor) -> Tensor:
    """int8 [n, groups]: how many of its 256 columns' unit each value is (the quotient of an exact product is exact)."""
    wide = units.float().repeat_interleave(values.shape[1] // units.shape[1], 1)
    return (values / wide).nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)


def _pack_codes(cpu: Cpu, weight: Weight, data: Tensor, codes: Tensor) -> None:
    offset = (8 if weight.kind == "int4" and weight.mins is None else 0,) if KINDS[weight.kind].bits == 4 else ()
    cpu.call(KINDS[weight.kind].packer, data.data_ptr(), codes.data_ptr(), *weight.shape, *offset)


def _pack_parts(cpu: Cpu, weight: Weight, padded: int) -> dict[str, Tensor | None]:
    """What kernels read per row and group beside the codes."""
    assert weight.scales is not None
    floats = "pack_scales16" if weight.scales.itemsize == 2 else "pack_scales32"
    parts = {"scales": (weight.scales, floats), "zeros": (weight.zeros, "pack_zeros"), "mins": (weight.mins, floats)}
    return {name: None if t is None else _pack_groups(cpu, t, padded, op) for name, (t, op) in parts.items()}


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

    if weight.kind not in PLAIN:
        refuse(f"known kinds are {', '.join(PLAIN)}; f16 needs a GPU (--device cuda)")
    kind = PLAIN[weight.kind]
    if weight.codes.dim() != 2 or 0 in weight.codes.shape:
        refuse("it must be a matrix with rows and columns")
    if weight.codes.dtype is not kind.dtype:
        refuse(f"its values are {weight.codes.dtype}, not {kind.dtype}")
    if not kind.groups:
        return
    n, k = weight.shape
    if weight.group not in kind.groups:
        refuse(f"its group of {weight.group} is not one of {kind.groups}")
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
    shape = weight.shape[0], k // SUPER
    for part in (weight.units, weight.min_units):
        if part is not None and (part.dtype is not torch.float16 or part.shape != shape or k % SUPER):
            refuse(f"its units must be float16 of shape {list(shape)}, for whole {SUPER} columns")
    if order is not None and (
        order.dtype is not torch.int32 or not order.is_contiguous() or not torch.equal(order.sort()[0], _counted(k))
    ):
        refuse(f"its order of columns must be a permutation of {k} int32 numbers")


def _counted(k: int) -> Tensor:
    return torch.arange(k, dtype=torch.int32)
