"""Sizes of the gated delta rule (Yang et al. 2024), a part of what a spec says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of the gated delta rule: `value_heads` a multiple of `key_heads`, numbers of a key and of a value, and rows
    that the convolution before it reads; all 0 where no layer has it.

    `by_channel`: each channel of a key has a decay (Kimi Linear), else each head. `low_rank`: of pairs of matrices that
    make decays and gates of results, 0: these are of one matrix each. `apart`: queries, keys and values have taps each
    on disk. `gate`: function of the gates. `eps`: of the norm of results, 0 = the model's. `lower_bound` and
    `beta_scale` are those of `quire.ops.recurrent.DeltaSpec`.
    """

    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    taps: int = 0
    low_rank: int = 0
    by_channel: bool = False
    apart: bool = False
    gate: str = "silu"
    eps: float = 0.0
    lower_bound: float = 0.0
    beta_scale: float = 1.0

    @property
    def decays(self) -> int:
        """Decays of a row."""
        return self.value_heads * (self.key_dim if self.by_channel else 1)

    @property
    def keys(self) -> int:
        """Numbers of all keys of a row."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all values of a row."""
        return self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


NO_DELTA = DeltaSizes()
"""No layer has it."""
