"""Multi-head latent attention (DeepSeek-AI 2024): one latent and one rotated key per token, for all heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.core.dtypes import BF16, F16, F32, Dtype
from quire.core.exclusions import features as known
from quire.core.exclusions.features import Feature
from quire.core.exclusions.table import row_of
from quire.model.mixers.mixer import KV_TYPES
from quire.model.role import ROWS, Role
from quire.model.spec import ModelSpec
from quire.ops.latents import LatentLayout
from quire.ops.layout import CacheLayout, KVLayout, StateLayout

FORMATS = (BF16, F32)
"""Of latents on every backend."""


@dataclass(frozen=True)
class Latents:
    """A `Mixer`. Sizes are those of `quire.model.spec.MLA`; `heads` of queries have `head_dim` numbers each."""

    heads: int
    head_dim: int
    q_rank: int
    rank: int
    rope: int
    features: frozenset[Feature] = frozenset({known.LATENTS})
    own_heads: bool = False
    scaled: bool = False
    state: StateLayout | None = None
    out: str = "o"

    @property
    def read(self) -> tuple[int, int, int]:
        """Latents are read as one head's keys and values, by all heads."""
        return self.heads, 1, self.rank + self.rope

    @property
    def projected(self) -> int:
        """Numbers of the space of queries, of the latent, of the rotated key and of the queries."""
        return self.q_rank + self.rank + self.rope + self.heads * self.head_dim

    def kept_in(self, asked: str, dtype: Dtype, backend: str) -> Dtype:
        """Keep latents in bf16 or f32. In f16 only on backends that multiply it, GPUs; others keep those of f16
        weights in f32."""
        halves = dtype == F16 and backend == "triton"
        kept = KV_TYPES.get(asked, F32 if dtype == F16 and not halves else dtype)
        if kept not in FORMATS and not (kept == F16 and halves):
            raise row_of(known.KV_FORMAT, known.LATENTS).refusal({})
        return kept

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """One part, of latents, on every backend alike."""
        return (LatentLayout(block_size, 1, self.rope, dtype, rank=self.rank),)


_Q = Role("linear", lambda s: (s.heads * s.head_dim, s.mla.q_rank), ROWS, lambda s: s.heads)


def _of_both(size: Callable[[ModelSpec], int]) -> Role:
    """Numbers of each head that are made of the space of queries, normed and beside it as it was before."""
    return Role("linear", lambda s: (s.heads * size(s), 2 * s.mla.q_rank), ROWS, lambda s: s.heads)


_KV = Role(
    "linear",
    lambda s: (s.heads * (s.mla.nope + s.mla.value), s.mla.rank),
    ROWS,
    lambda s: s.heads,
    wide=True,
)
ROLES = {
    name: replace(role, optional=True, where=lambda s, layer: s.attends(layer))
    for name, role in {
        "q_a": Role("linear", lambda s: (s.mla.q_rank, s.hidden)),
        "q_a_norm": Role("vector", lambda s: (s.mla.q_rank,)),
        "q_b": _Q,
        "latent_q": _of_both(lambda s: s.head_dim),
        "latent_gate": _of_both(lambda s: s.mla.value),
        "value_gate": Role("linear", lambda s: (s.heads * s.mla.value, s.hidden), ROWS, lambda s: s.heads),
        "kv_a": Role("linear", lambda s: (s.mla.rank + s.mla.rope, s.hidden)),
        "kv_a_norm": Role("vector", lambda s: (s.mla.rank,)),
        "turned_key_norm": Role("vector", lambda s: (s.mla.rope,)),
        "kv_b": _KV,
        "k_b": replace(_KV, shape=lambda s: (s.heads * s.mla.rank, s.mla.nope)),
        "v_b": replace(_KV, shape=lambda s: (s.heads * s.mla.value, s.mla.rank)),
    }.items()
}
"""Its matrices and vectors on disk, beside those of queries and of the result; ranks share heads, each has all of the
latent. In the place of `kv_b` may be its two parts, that of keys turned in each head. In the place of `q_b` may be
`latent_q`, with a matrix that gates results."""
GROUPED: dict[str, tuple[Callable[[ModelSpec], int], dict[str, Callable[[ModelSpec], int]]]] = {
    "latent_q_gate": (
        lambda s: s.heads,
        {"latent_q": lambda s: s.head_dim, "latent_gate": lambda s: s.mla.value},
    ),
}
"""As of `mixers.attention`."""


def keys_from_latents(spec: ModelSpec) -> tuple[int, int, int]:
    """The shape of the matrix of each head that leads from its query to latents, where it lies by itself."""
    return spec.heads, spec.mla.rank, spec.mla.nope


def values_from_latents(spec: ModelSpec) -> tuple[int, int, int]:
    """The shape of the matrix of each head that makes its values of latents, where it lies by itself."""
    return spec.heads, spec.mla.value, spec.mla.rank


def from_latents(spec: ModelSpec) -> tuple[int, int, int]:
    """The shape of the matrix of each head that makes keys, and below them values, of latents."""
    return spec.heads, spec.mla.nope + spec.mla.value, spec.mla.rank
