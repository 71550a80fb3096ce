"""Attention and an MLP that several layers share (Zamba2, Glorioso et al. 2024): each adds matrices of a low rank.

A block reads the stream beside the embedded token. What it makes goes through a matrix of the layer, and is added to
what the next mixer reads. Matrices lie on disk once, under the name of the first layer that uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.exclusions import features as known
from quire.core.exclusions.features import Feature
from quire.model.mixers.attention import Attention
from quire.model.role import Role
from quire.model.spec import ModelSpec


@dataclass(frozen=True)
class SharedBlock(Attention):
    """A `Mixer`. `wide`: numbers of the stream and the embedded token, `inner`: those of the MLP."""

    wide: int = 0
    inner: int = 0
    features: frozenset[Feature] = frozenset({known.SHARED_BLOCKS})
    own_heads: bool = False
    out: str = "use_out"

    @property
    def projected(self) -> int:
        """Numbers of both inputs and their norm, of queries, keys and values, and of the MLP."""
        return 2 * self.wide + (self.heads + 2 * self.kv_heads) * self.head_dim + 3 * self.inner


def _home(spec: ModelSpec, layer: int) -> bool:
    return spec.of_block(layer) and spec.block_home(layer) == layer


def _use(spec: ModelSpec, layer: int) -> bool:
    return spec.of_block(layer)


def _attention_use(spec: ModelSpec, layer: int) -> bool:
    return spec.of_block(layer) and spec.shared.attention


Size = Callable[[ModelSpec], int]


def _matrix(rows: Size, columns: Size, where: Callable[[ModelSpec, int], bool] = _home) -> Role:
    return Role("linear", lambda s: (rows(s), columns(s)), where=where)


def _wide(spec: ModelSpec) -> int:
    return 2 * spec.hidden


def _hidden(spec: ModelSpec) -> int:
    return spec.hidden


def _heads(spec: ModelSpec) -> int:
    return spec.heads * spec.head_dim


def _kv_heads(spec: ModelSpec) -> int:
    return spec.kv_heads * spec.head_dim


def _inner(spec: ModelSpec) -> int:
    return spec.intermediate


def _rank(spec: ModelSpec) -> int:
    return spec.shared.rank


ROLES = {
    "block_norm": Role("vector", lambda s: (2 * s.hidden,), where=_home),
    "block_q": _matrix(_heads, _wide),
    "block_k": _matrix(_kv_heads, _wide),
    "block_v": _matrix(_kv_heads, _wide),
    "block_o": _matrix(_hidden, _heads),
    "block_mlp_norm": Role("vector", lambda s: (s.hidden,), where=_home),
    "block_gate": _matrix(_inner, _hidden),
    "block_up": _matrix(_inner, _hidden),
    "block_down": _matrix(_hidden, _inner),
    "use_q_down": _matrix(_rank, _wide, _attention_use),
    "use_q_up": _matrix(_heads, _rank, _attention_use),
    "use_k_down": _matrix(_rank, _wide, _attention_use),
    "use_k_up": _matrix(_kv_heads, _rank, _attention_use),
    "use_v_down": _matrix(_rank, _wide, _attention_use),
    "use_v_up": _matrix(_kv_heads, _rank, _attention_use),
    "use_mlp_down": _matrix(_rank, _hidden, _use),
    "use_mlp_up": _matrix(lambda s: 2 * s.intermediate, _rank, _use),
    "use_out": _matrix(_hidden, _hidden, _use),
}
"""Its matrices and vectors on disk, those of a block and those of each use, which ranks do not split."""
