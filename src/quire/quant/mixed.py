"""Checkpoints that keep matrices in several formats: which one a matrix is in goes by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quire.core.dtypes import Dtype
from quire.core.errors import ModelError
from quire.ops.arrays import Host
from quire.quant.base import QuantScheme, QWeight


@dataclass(frozen=True)
class Mixed:
    """`of`: a matrix's name (that of its tensors without their suffix) -> its format."""

    of: Mapping[str, QuantScheme]

    @property
    def name(self) -> str:
        """ "gptq int4 g128 + gptq int8 g32", the format of most matrices first."""
        counts = Counter(scheme.name for scheme in self.of.values())
        return " + ".join(name for name, _ in counts.most_common())

    @property
    def parts(self) -> Mapping[str, bool]:
        """What any of the formats has."""
        return {suffix: kind for scheme in self.of.values() for suffix, kind in scheme.parts.items()}

    @property
    def optional(self) -> Mapping[str, bool]:
        """What any of the formats may have."""
        return {suffix: kind for scheme in self.of.values() for suffix, kind in scheme.optional.items()}

    @property
    def bits_per_number(self) -> float:
        """The mean over matrices."""
        return sum(scheme.bits_per_number for scheme in self.of.values()) / len(self.of)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of all formats."""
        return tuple(dict.fromkeys(note for scheme in self.of.values() for note in scheme.notes))

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Never known without the matrix's name."""
        raise ModelError("is in none of the checkpoint's formats")

    def load(self, raw: Mapping[str, Host], dtype: Dtype) -> QWeight:
        """Never done without the matrix's name."""
        raise ModelError("is in none of the checkpoint's formats")


def mixed(of: Mapping[str, QuantScheme], otherwise: QuantScheme) -> QuantScheme:
    """The one format that all are in (`otherwise` when there are none), or all of them."""
    first = next(iter(of.values()), otherwise)
    return first if all(scheme == first for scheme in of.values()) else Mixed(of)
