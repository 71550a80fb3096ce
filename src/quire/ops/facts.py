"""Numbers that native kernels and Python must agree on: csrc/facts.h is where they are said.

Without the extension nothing is packed for its kernels; what other backends need all the same is said here beside.
"""

from __future__ import annotations

from quire.core.dtypes import Dtype, named
from quire.ops.native import load_native

_native = load_native()
_FACTS: dict[str, int] = {} if _native is None else _native.facts()

LANES = _FACTS.get("LANES", 16)
"""Rows of a block of a packed matrix; every backend pads the rows of experts to a multiple of it."""
BF12_CHUNK = _FACTS.get("BF12_CHUNK", 0)
"""Columns of 16 rows in 12 bits that share a list of exceptions."""
BF12_EXCEPTION_BYTES = _FACTS.get("BF12_EXCEPTION_BYTES", 0)
"""Size of such a list."""
MAX_HEAD_DIM = _FACTS.get("MAX_HEAD_DIM", 0)
"""Largest head_dim of attention and its cache on the CPU."""
SPARSE_COLUMNS = _FACTS.get("SPARSE_COLUMNS", 0)
"""Columns of a chunk of a matrix without its zeros."""
SPARSE_SLACK = _FACTS.get("SPARSE_SLACK", 0)
"""Bytes that readers of such a matrix may read past a block."""


def numbers_of(what: str) -> dict[str, int]:
    """Name -> number in ops, for `what` of "activation" and "score"; empty without the extension."""
    prefix = f"{what}/"
    return {name.removeprefix(prefix): number for name, number in _FACTS.items() if name.startswith(prefix)}


def dtype_numbers_of(what: str) -> dict[Dtype, int]:
    """Dtype -> number in ops, for `what` of "cache" (keys and values) and "table"; empty without the extension."""
    return {named(name): number for name, number in numbers_of(what).items()}
