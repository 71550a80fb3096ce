"""What varies in the score function of attention from model to model."""

from __future__ import annotations

from dataclasses import dataclass

from quire.ops.arrays import Array

ALL = 1 << 30
"""Tokens behind its own that a row of an encoder sees: more than any sequence has."""


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """Score of query i and key j: cap(q.k * scale) - slope * |i - j| + bias[i - j], for j up to i that `window` has.

    `scale` is positive. `window`: see `core.windows`; 0 = all earlier keys. `softcap` c > 0: cap(s) = c * tanh(s /
    c). `sinks` [heads] f32: a logit per head that takes part in the softmax and has no value (attention sinks, Xiao
    et al. 2023). `alibi` [heads] f32: slopes (Press et al. 2022). `bias` [heads, distances] f32: by the distance,
    the last entry for all that are farther (relative positions, Raffel et al. 2020). `after`: how many tokens behind
    its own a row sees, `ALL` = whatever there are (encoders, Devlin et al. 2019). `behind`: how many entries of `bias`
    are for such keys; they come first, and the first is for all that are farther.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Array | None = None
    alibi: Array | None = None
    bias: Array | None = None
    after: int = 0
    behind: int = 0
