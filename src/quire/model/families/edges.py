"""What stands before the first layer, and between the last one and the head, where that is more than most families
have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32, F64


@dataclass(frozen=True)
class Edges:
    """Facts of the edges of a decoder; all false, 0 or empty in most.

    `sinusoids`: positions are sines and cosines that are added to embedded tokens; the slowest takes 10,000 times as
    long as the first, `sinusoids` steps later. `normed`: embedded tokens are normed, without weights. `bare`: the first
    layer reads the stream without a norm. `activation`: of the rows behind the final norm, between a matrix and a
    further norm that stand before the head; empty where these do not. `plain`: weights of the final norm are stored as
    they are, although those of other norms are stored less 1.
    """

    sinusoids: int = 0
    normed: bool = False
    bare: bool = False
    activation: str = ""
    plain: bool = False

    def positions(self, count: int, width: int) -> NDArray[np.float32]:
        """Sines, then cosines, of the first `count` positions [count, width] f32 (Vaswani et al. 2017)."""
        steps = np.arange(width // 2, dtype=F64) * (-math.log(1e4) / self.sinusoids)
        angles = (np.arange(count, dtype=F32)[:, None] * np.exp(steps).astype(F32)).astype(F64)
        return np.concatenate((np.sin(angles), np.cos(angles)), 1).astype(F32)


NO_EDGES = Edges()
