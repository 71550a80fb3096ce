"""What queries are multiplied by as a sequence grows, so that scores of long contexts stay apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32


@dataclass(frozen=True)
class QueryScale:
    """What multiplies queries at position p in `layers`: 1 + weight * ln(1 + floor((p + ahead) / step)).

    Scalable softmax (Nakanishi 2025), in steps, as Llama 4 has it. `step` in tokens, 0 = nowhere.
    """

    step: int = 0
    weight: float = 0.0
    ahead: int = 0
    layers: tuple[bool, ...] = ()

    def factors(self, length: int) -> NDArray[np.float32]:
        """The factors of positions 0 .. length - 1, one for each `step` positions: f32."""
        steps = np.arange((length - 1 + self.ahead) // self.step + 1, dtype=F32)
        found: NDArray[np.float32] = np.log1p(steps) * np.float32(self.weight) + np.float32(1)
        return found

    def of(self, layers: Iterable[int]) -> QueryScale:
        """Return what these layers have, renumbered."""
        return replace(self, layers=tuple(self.layers[i] for i in layers)) if self.layers else self


NO_SCALE = QueryScale()
"""Queries are what they are."""
