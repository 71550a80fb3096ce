"""Packed matrices without their zeros, in two layouts (csrc/sparse.h).

Where two of each four columns are zero (2:4), the others say in two bits which two they are, and units of AVX-512
multiply them with the activations that these choose. Else a bit for each number says which are there, and the zeros
come back in registers. Products have the bits of the dense kind's.
"""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import I64
from quire.ops.cpu.matrix import assemble, part_sizes, take_apart
from quire.ops.cpu.state import Cpu
from quire.ops.facts import LANES, SPARSE_COLUMNS, SPARSE_SLACK
from quire.ops.kinds import NUMBERS
from quire.ops.native import huge_bytes
from quire.ops.weights import Packed

SPARSE = {"bf16": "sparse_bf16", "int8": "sparse_int8", "int4": "sparse_int4"}
"""Kind -> the same without its zeros, wherever they are."""
TWO_OF_FOUR = {"bf16": "sparse24_bf16", "int8": "sparse24_int8", "int4": "sparse24_int4"}
"""Kind -> the same of two of each four columns."""
CHOOSING = ("amx", "avx512", "avx512vnni")
"""Units in which weights choose their activations."""
LEAST_ZEROS = {"bf16": 0.35, "int8": 0.45}
"""Share of zeros from which "auto" keeps a matrix without them, for one row at a time. Measured by
`benchmarks/kernels/compared.py`.

One thread of a Zen 4, 8192 x 2048, groups of 32, a row: int8 1.02 times as fast with 40 % of zeros, 1.20 with 50; bf16
1.19 with 40 %. Not int4, which was 0.96 times as fast without half of its numbers. 16 rows are slower in all. "auto"
takes what is 2:4 wherever a unit has it choose (two threads, 1, 16 and 512 rows: bf16 1.58, 1.32, 1.45 times as fast;
int8 1.57, 0.98, 0.95; int4 1.27, 0.95, 0.93).
"""
LINE = 64
"""What the bytes of blocks are multiples of."""


def without_zeros(cpu: Cpu, packed: Packed) -> Packed:
    """`packed`, dense, without its zeros where `--sparse` and their share have it so, else as it is."""
    if cpu.sparse == "off":
        return packed
    chosen = two_of_four(cpu, packed) if cpu.native.isa in CHOOSING else None
    if chosen is not None:
        return chosen
    if cpu.sparse == "auto" and not cpu.native.module.expands():
        return packed
    least = LEAST_ZEROS.get(packed.kind) if cpu.sparse == "auto" else 0.0
    found = None if least is None else sieved(cpu, packed, least)
    return packed if found is None else found


def sieved(cpu: Cpu, packed: Packed, least: float = 0.0) -> Packed | None:
    """A dense matrix without its zeros; None where their share is below `least`, or no kind holds it.

    There is one for whole chunks of 32 columns, and of integers for 8-bit activations in groups of 32 and more whose
    zeros are codes of 0: zeros of groups and minimums would be numbers again.
    """
    numbers, parts = take_apart(packed)
    (n, k), blocks = (packed.n, packed.k), -(-packed.n // LANES)
    if not _can_be(packed):
        return None
    kind, kept, longest = SPARSE[packed.kind], np.zeros(1, I64), np.zeros(1, I64)
    dense, size = parts["codes"], (blocks, k, NUMBERS[kind])
    cpu.call("count_sparse", kept, longest, dense, *size)
    if 1 - kept.item() / (n * k) < least:
        return None
    step = -(-int(longest.item() + SPARSE_SLACK) // LINE) * LINE
    data = huge_bytes(blocks * step)
    cpu.call("pack_sparse", data, dense, *size, step)
    return assemble(kind, (n, k), packed.group, numbers, {**parts, "codes": data})


def two_of_four(cpu: Cpu, packed: Packed) -> Packed | None:
    """A dense matrix as its two of each four columns; None where some row has more, or no kind holds it (`sieved`)."""
    if not _can_be(packed):
        return None
    numbers, parts = take_apart(packed)
    kind, (n, k), fits = TWO_OF_FOUR[packed.kind], (packed.n, packed.k), np.zeros(1, I64)
    of_dense = (fits, parts["codes"], -(-n // LANES), k, NUMBERS[kind])
    cpu.call("pack_sparse24", None, *of_dense)
    if not fits.item():
        return None
    data = huge_bytes(part_sizes(kind, (n, k), packed.group, numbers.wide)["codes"][0])
    cpu.call("pack_sparse24", data, *of_dense)
    return assemble(kind, (n, k), packed.group, numbers, {**parts, "codes": data})


def _can_be(packed: Packed) -> bool:
    """Whether there is a kind without zeros of what else the dense matrix is."""
    numbers, parts = take_apart(packed)
    plain = numbers.activation_bits == 8 and not {"zeros", "mins"} & parts.keys()
    return packed.kind in SPARSE and packed.k % SPARSE_COLUMNS == 0 and plain and not 0 < packed.group < SPARSE_COLUMNS


def holds_blocks(cpu: Cpu, packed: Packed) -> bool:
    """Whether every block of a matrix without zeros ends where the next one begins, as its bits say."""
    fits, w = np.zeros(1, I64), packed.handle
    step: int = w.code_step
    if step < SPARSE_SLACK or packed.k % SPARSE_COLUMNS:
        return False
    codes = take_apart(packed)[1]["codes"]
    cpu.call("check_sparse", fits, codes, -(-packed.n // LANES), packed.k, w.kind, step)
    return bool(fits.item())
