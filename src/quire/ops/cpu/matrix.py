"""Packed matrices as the native ops get them: one descriptor a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from quire.core.dtypes import I64, U8
from quire.ops.arrays import Host, address
from quire.ops.descriptors import Descriptor, words
from quire.ops.facts import BF12_CHUNK, BF12_EXCEPTION_BYTES, LANES
from quire.ops.kinds import KINDS, NUMBERS
from quire.ops.weights import SUPER, Packed

GROWING = {"codes": "code_step", "scales": "scale_step", "zeros": "zero_step", "mins": "min_step"}
"""Parts that grow with the rows, and the field of the bytes from 16 rows to the next."""
SHARED = ("table", "order")
"""Parts that do not grow with the rows."""


class Numbers(NamedTuple):
    """Numbers of a packed matrix of integers: whether scales and minimums are f32 (else f16), bits of its
    activations."""

    wide: bool = False
    activation_bits: int = 8


class CpuMatrix(Descriptor):
    """The descriptor of a packed matrix (csrc/matrix.h)."""

    _fields_ = words(
        "kind", "n", "k", "group", "wide", "digits", "planes", *GROWING, *SHARED, *GROWING.values(), "places"
    )
    kind: int
    n: int
    k: int
    group: int
    wide: int
    digits: int
    planes: int
    places: int


def part_sizes(kind: str, shape: tuple[int, int], group: int, wide: bool) -> dict[str, tuple[int, ...]]:
    """Bytes that each part of a packed matrix [n, k] may have: codes, scales, zeros, minimums, table, order."""
    (n, k), row = shape, KINDS[kind]
    padded = -(-n // LANES) * LANES
    codes = padded * (-(-k // row.together) * row.together) * row.bits // 8
    if kind == "bf12":
        codes += padded // LANES * -(-k // BF12_CHUNK) * BF12_EXCEPTION_BYTES
    if row.multiples:
        codes += padded * (k // group) * row.multiples // 8
    groups = padded * (k // (SUPER if row.multiples else group)) if group else 0
    floats = (groups * (4 if wide else 2),)
    table = (2 * LANES,) if kind == "bf12" else (LANES, 2 * LANES)
    sizes = {"scales": floats, "zeros": (groups,), "mins": floats, "table": table, "order": (4 * k,)}
    return {"codes": (codes,)} | {name: sizes[name] for name in row.parts}


def table_digits(table: Host) -> Host:
    """The numbers of a table [16] int16 as bytes, 128 more: [16] if all fit, else their digits of base 255 [2 * 16]."""
    numbers = table.astype(I64)
    if int(np.abs(numbers).max()) <= 127:
        return (numbers + 128).astype(U8)
    high = np.round(numbers / 255).astype(I64)
    return (np.concatenate((high, numbers - 255 * high)) + 128).astype(U8)


def assemble(kind: str, shape: tuple[int, int], group: int, numbers: Numbers, parts: Mapping[str, Host]) -> Packed:
    """The packed matrix [n, k] from its parts, whose sizes are those of `part_sizes`."""
    at = {name: address(t) for name, t in parts.items()}
    blocks = -(-shape[0] // LANES)
    steps = {GROWING[name]: t.nbytes // blocks for name, t in parts.items() if name in GROWING}
    handle = CpuMatrix(
        kind=NUMBERS[kind], n=shape[0], k=shape[1], group=group, wide=int(numbers.wide),
        digits=1 if numbers.activation_bits == 8 else 2,
        planes=2 if "table" in parts and kind != "bf12" and parts["table"].size > LANES else 1, **at, **steps,
    )  # fmt: skip
    own = tuple(t for name, t in parts.items() if name not in SHARED)
    shared = tuple(parts[name] for name in reversed(SHARED) if name in parts)
    return Packed(kind, *shape, group, sum(t.size for t in own), own, handle, None, shared)


def take_apart(packed: Packed) -> tuple[Numbers, dict[str, Host]]:
    """The inverse of `assemble`."""
    w: CpuMatrix = packed.handle
    held = {address(t): t for t in (*packed.buffers, *packed.shared)}
    parts = {name: held[at] for name in (*GROWING, *SHARED) if (at := getattr(w, name))}
    return Numbers(bool(w.wide), 8 * w.digits), parts
