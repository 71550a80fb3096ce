"""Attention over keys and values per head (Vaswani et al. 2017), which heads of queries may share (Shazeer 2019)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.core.dtypes import Dtype
from quire.core.exclusions.features import Feature
from quire.model.mixers.mixer import KV_TYPES
from quire.model.role import COLUMNS, ROWS, SHARED, Role
from quire.model.spec import ModelSpec
from quire.ops.layout import CacheLayout, KVLayout, StateLayout


@dataclass(frozen=True)
class Attention:
    """A `Mixer`. `heads` of queries read `kv_heads` of keys and values, of `head_dim` numbers each."""

    heads: int
    kv_heads: int
    head_dim: int
    features: frozenset[Feature] = frozenset()
    own_heads: bool = True
    scaled: bool = True
    state: StateLayout | None = None
    out: str = "o"

    @property
    def read(self) -> tuple[int, int, int]:
        """Heads and numbers that attention reads."""
        return self.heads, self.kv_heads, self.head_dim

    @property
    def projected(self) -> int:
        """Numbers of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def kept_in(self, asked: str, dtype: Dtype, backend: str) -> Dtype:
        """Keep keys and values in any format, on every backend."""
        return KV_TYPES.get(asked, dtype)

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """One part, as the backend lays it."""
        return (heads(block_size, self.kv_heads, self.head_dim, dtype),)


_ALL = {
    "q": Role("linear", lambda s: (s.heads * s.head_dim, s.hidden), ROWS, lambda s: s.heads),
    "k": Role("linear", lambda s: (s.kv_heads * s.head_dim, s.hidden), ROWS, lambda s: s.kv_heads, spread=SHARED),
    "v": Role("linear", lambda s: (s.kv_heads * s.value_dim, s.hidden), ROWS, lambda s: s.kv_heads, spread=SHARED),
    "q_norm": Role("vector", lambda s: (s.head_dim,), optional=True, partner="k_norm"),
    "k_norm": Role("vector", lambda s: (s.head_dim,), optional=True, partner="q_norm"),
    "q_row_norm": Role(
        "vector", lambda s: (s.heads * s.head_dim,), ROWS, lambda s: s.heads, optional=True, partner="k_row_norm"
    ),
    "k_row_norm": Role(
        "vector",
        lambda s: (s.kv_heads * s.head_dim,),
        ROWS,
        lambda s: s.kv_heads,
        optional=True,
        partner="q_row_norm",
        spread=SHARED,
    ),
    "q_head_norms": Role("vector", lambda s: (s.heads, s.head_dim), ROWS, lambda s: s.heads, optional=True),
    "k_head_norms": Role(
        "vector", lambda s: (s.kv_heads, s.head_dim), ROWS, lambda s: s.kv_heads, optional=True, spread=SHARED
    ),
    "sinks": Role("vector", lambda s: (s.heads,), ROWS, lambda s: s.heads, optional=True),
    "attn_gate": Role("linear", lambda s: (s.heads * s.head_dim, s.hidden), ROWS, lambda s: s.heads, optional=True),
    "head_gate": Role("linear", lambda s: (s.heads, s.hidden), ROWS, lambda s: s.heads, optional=True),
    "o_norm": Role("vector", lambda s: (s.heads * s.head_dim,), ROWS, lambda s: s.heads, optional=True),
    "o": Role("linear", lambda s: (s.hidden, s.heads * s.value_dim), COLUMNS, lambda s: s.heads),
}


KEY_VALUE = ("k", "v", "k_norm", "k_row_norm", "k_head_norms")
"""Roles that a layer which reads another's keys and values does not have."""


def _has(spec: ModelSpec, layer: int) -> bool:
    return spec.attends(layer) and not spec.of_block(layer)


def _own(spec: ModelSpec, layer: int) -> bool:
    return _has(spec, layer) and spec.kv_layer(layer) == layer


ROLES = {name: replace(role, where=_own if name in KEY_VALUE else _has) for name, role in _ALL.items()}
ROLES["v"] = replace(ROLES["v"], where=lambda s, layer: _own(s, layer) and s.has_values(layer))
ROLES["sinks"] = replace(
    ROLES["sinks"], where=lambda s, layer: _has(s, layer) and bool(s.windows[layer] or not s.window_sinks)
)
"""Its matrices and vectors on disk, split over ranks by heads; latent attention has the last one too."""

GROUPED: dict[str, tuple[Callable[[ModelSpec], int], dict[str, Callable[[ModelSpec], int]]]] = {
    "q_gate": (lambda s: s.heads, {"q": lambda s: s.head_dim, "attn_gate": lambda s: s.head_dim}),
    "qvk": (lambda s: 4, {role: lambda s: s.heads // 4 * s.head_dim for role in "qvk"}),
}
"""Fused matrices on disk that hold, for each of so many heads or pieces, the rows of several roles behind each
other."""


def with_heads(spec: ModelSpec, held: Callable[[str], tuple[int, int]]) -> ModelSpec:
    """`spec` with the heads of a rank. `held`: (first, stop) of the units that it has of a role; latent attention and
    attention behind an encoder are split by the same roles."""
    (first, stop), (first_kv, stop_kv) = held("q"), held("k")
    return replace(spec, heads=stop - first, kv_heads=stop_kv - first_kv, alibi=spec.alibi[first:stop])
