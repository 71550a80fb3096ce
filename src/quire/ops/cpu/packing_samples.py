"""Small matrices of every kind that is packed, by which a layout, or a rounding, that changed is told."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from quire.core.dtypes import BF16, F8, F16, F32, I8, I16, I32, Dtype
from quire.ops.cpu.matrix import take_apart
from quire.ops.cpu.pack import PLAIN, narrow_bf16, pack_dense
from quire.ops.cpu.pack_sparse import sieved, two_of_four
from quire.ops.cpu.state import Cpu
from quire.ops.kinds import SUPER_KINDS
from quire.ops.weights import Weight

ROWS, COLUMNS = 24, 256
CODES = {"int4": (-8, 8), "int8": (-128, 128), "table4": (0, 16)}
"""Of each kind the least code, and one more than the largest."""
TABLE = (0, 1, 2, 3, 4, 6, 8, 12, -127, -1, -2, -3, -4, -6, -8, 127)
FLOATS: dict[str, Dtype] = {"f32": F32, "bf16": BF16, "bf16_f32": BF16, "f16": F16}


def layout_digest(cpu: Cpu, more: Iterable[Weight]) -> str:
    """Digest of all samples, and of `more`, as they are packed now."""
    found = hashlib.blake2b(digest_size=16)
    codes = np.round(numbers() * 7).astype(I8)
    two = np.arange(COLUMNS) % 4 < 2
    made = [_in_super_blocks(codes, *form) for form in SUPER_KINDS]
    sparse = (replace(w, codes=np.where(two, w.codes, np.zeros(1, w.codes.dtype))) for w in samples())
    for weight in (*samples(), *sparse, *made, *more):
        packed = pack_dense(cpu, weight)
        for each in (packed, sieved(cpu, packed), two_of_four(cpu, packed)):
            for part in take_apart(each)[1].values() if each is not None else ():
                found.update(part.data)
    narrowed = narrow_bf16(cpu, Weight("bf16", numbers().astype(BF16)))
    for part in take_apart(narrowed)[1].values() if narrowed is not None else ():
        found.update(part.data)
    return found.hexdigest()


def numbers() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """f32 [24, 256] between -1 and 1, the same on every machine."""
    return np.sin(np.arange(ROWS * COLUMNS, dtype=np.float64)).astype(F32).reshape(ROWS, COLUMNS)


def samples() -> Iterator[Weight]:
    """A small matrix of each kind that is packed as it is, in each of its groups, with each of its optional parts."""
    rng = np.random.default_rng(0)
    order = np.arange(COLUMNS - 1, -1, -1).astype(I32)
    for name, kind in PLAIN.items():
        for group in kind.groups or (0,):
            weight = _sample(rng, name, group)
            yield weight
            if weight.scales is None:
                continue
            if weight.scales.dtype == F16:
                yield replace(weight, scales=weight.scales.astype(F32))
            if "zeros" in kind.parts:
                low, high = CODES[name]
                yield replace(weight, zeros=rng.integers(low, high, weight.scales.shape, I8))
            if "mins" in kind.parts:
                yield replace(weight, codes=weight.codes & 15, mins=-weight.scales)
            if "order" in kind.parts:
                yield replace(weight, order=order)


def _sample(rng: np.random.Generator, kind: str, group: int) -> Weight:
    if kind in FLOATS:
        return Weight(kind, rng.standard_normal((ROWS, COLUMNS), F32).astype(FLOATS[kind]))
    scales = 0.5 + rng.random((ROWS, COLUMNS // group), F32)
    if kind == "fp8":  # every code but the two of nan
        codes = (rng.integers(127, size=(ROWS, COLUMNS)) + 128 * rng.integers(2, size=(ROWS, COLUMNS))).astype(np.uint8)
        return Weight(kind, codes.view(F8), scales / 448, None, group, activation_bits=16)
    low, high = CODES[kind]
    table = np.array(TABLE, I16) if kind == "table4" else None
    codes8 = rng.integers(low, high, (ROWS, COLUMNS), I8)
    return Weight(kind, codes8, (scales / high).astype(F16), None, group, table=table)


def _in_super_blocks(codes: np.ndarray, bits: int, group: int, mins: bool, table: bool) -> Weight:
    """A weight of that form in super-blocks from codes -7..7 int8 [n, 256]."""
    least = 0 if mins or table else -(1 << bits - 1)
    kind = "table4" if table else "int8" if bits > 4 else "int4"
    units = codes[:, :1].astype(F16) / np.float16(8)
    multiples = np.abs(codes[:, : codes.shape[1] // group].astype(F32)).astype(F16)
    return Weight(
        kind, ((codes.astype(I16) & (1 << bits) - 1) + least).astype(I8), multiples * units, group=group, units=units,
        bits=bits, mins=multiples * units if mins else None, min_units=units if mins else None,
        table=np.arange(-8, 8, dtype=I16) if table else None,
    )  # fmt: skip
