"""The kinds of packed matrix, as the native extension has them: csrc/kinds.inc is their only table.

Without the extension there are none: the torch reference and a GPU pack in their own way.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.dtypes import Dtype, named
from quire.ops.native import load_native


@dataclass(frozen=True)
class Kind:
    """What matrices of one kind are made of.

    A number has `bits`; `together` columns share a word of the layout, or a block of it. `codes`: the name of the
    dtype of unpacked codes; `packer`: the native op that packs them ("": there is another way). `groups` of columns may
    share a scale.
    `parts` are what a matrix may have beside its codes, `always` those that it must have. `fuses`: the native
    `gated_mlp` takes it. `multiples`: in super-blocks, where groups have small multiples of floats that 256 columns
    share, the bits of a group's; 0: a group has floats of its own.
    """

    name: str
    bits: int
    together: int
    codes: str
    packer: str
    groups: tuple[int, ...]
    parts: tuple[str, ...]
    always: tuple[str, ...]
    fuses: bool
    multiples: int

    @property
    def dtype(self) -> Dtype:
        """Dtype of unpacked codes."""
        return named(self.codes)


_native = load_native()
_ROWS = () if _native is None else tuple(Kind(*row) for row in _native.kinds())
KINDS = {kind.name: kind for kind in _ROWS}
"""Every kind of packed matrix by its name, in the order of their numbers."""
NUMBERS = {kind.name: number for number, kind in enumerate(_ROWS)}
"""Name -> what descriptors and ops call it."""
SUPER_KINDS = {
    (kind.bits, kind.groups[0], "mins" in kind.parts, "table" in kind.parts): kind.name
    for kind in _ROWS
    if kind.multiples
}
"""Bits of a code, columns of a group, minimums, table -> the kind in super-blocks."""
