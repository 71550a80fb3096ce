"""What ops of layers with a recurrent state are told: which states are read and stored, and what is fixed of a layer.

A layer's states are one array f32 [slots, heads, key numbers, value numbers]. A slot is whose it is given to: a
sequence's, a snapshot's. Slots may lie apart, within memory that several layers share.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.ops.arrays import Array


@dataclass(frozen=True, eq=False)
class StateBatch:
    """Which states the sequences of a step begin with, and where theirs are stored.

    Rows cu_q[s] .. cu_q[s + 1] (`cu_q` int32 [S + 1]) are those of sequence s. It begins with the state of slot
    source[s] (int32 [S]), or with zeros where that is -1. After counts[s, i] of its rows (int32 [S, 2], from 0 to all
    of them) its state is stored in slot target[s, i] (int32 [S, 2]), -1: it is not. Rows behind that, such as drafts,
    go on without being stored. A slot may be read and stored by one sequence; no other one reads or stores it.
    """

    cu_q: Array
    source: Array
    counts: Array
    target: Array


@dataclass(frozen=True, eq=False)
class DeltaSpec:
    """A layer's gated delta rule: heads, and how gates are made of what is computed of a row.

    `a` f32 [value_heads] is -exp(A_log). The logarithm of a decay is a * softplus(x + dt_bias), `dt_bias` f32
    [value_heads], or [value_heads * key_dim] where each channel of a key has a decay of its own (Kimi Linear). With
    `lower_bound` b < 0 it is b * sigmoid(-a * (x + dt_bias)) instead (GLM-5-Next). beta = beta_scale * sigmoid(b): 2
    allows negative eigenvalues (OLMo Hybrid). value_heads is a multiple of key_heads; a key head serves as many
    consecutive value heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    a: Array
    dt_bias: Array
    lower_bound: float = 0.0
    beta_scale: float = 1.0

    @property
    def width(self) -> int:
        """Columns of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, eq=False)
class ScanSpec:
    """A layer's selective scan.

    Mamba-2: `heads` of `head_dim` channels, `groups` of B and C of `state` numbers, each for as many consecutive heads;
    `a` f32 [heads] is -exp(A_log), `d` and `dt_bias` f32 [heads]. Mamba-1: one head of all channels, one group, `a`
    f32 [state, head_dim] (transposed, so that channels lie side by side), `d` and `dt_bias` f32 [head_dim]. `d` and
    `dt_bias` may be missing. Time steps are limited to low .. high.
    """

    heads: int
    head_dim: int
    state: int
    a: Array
    d: Array | None
    dt_bias: Array | None
    groups: int = 1
    low: float = 0.0
    high: float = float("inf")

    @property
    def selective(self) -> bool:
        """Whether each channel has a time step, and a decay for each number of its state (Mamba-1)."""
        return len(self.a.shape) == 2

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def steps(self) -> int:
        """Time steps of a row."""
        return self.inner if self.selective else self.heads
