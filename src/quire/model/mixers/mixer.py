"""A mixer: the part of a layer between its norm and its MLP, in which tokens read each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.core.dtypes import BF16, F8, F16, F32, I8, Dtype
from quire.core.exclusions.features import Feature
from quire.ops.convolution import ROW_FORMATS
from quire.ops.layout import CacheLayout, KVLayout, StateLayout

WIDE = {"bfloat16": BF16, "float32": F32, "float16": F16}
KV_TYPES = WIDE | {"int8": I8, "fp8": F8}
"""What `--kv-cache-dtype` names, beside "auto"."""


def row_format(asked: str, dtype: Dtype) -> Dtype:
    """The format of rows that a convolution reads, where `--kv-cache-dtype` is `asked`: that of keys and values, and
    beside those in int8 or fp8 that of weights which are not quantized, `dtype`, or f32 for those in f16."""
    kept = KV_TYPES.get(asked, dtype)
    if kept in ROW_FORMATS:
        return kept
    return F32 if dtype == F16 else dtype


@dataclass(frozen=True)
class LayerCacheSpec:
    """What a layer keeps of each token: how each part of it lies, and how far back it is read (`core.windows`).

    The parts have one block table: a block holds all of them.
    """

    parts: CacheLayout
    window: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token."""
        return sum(layout.bytes_per_token for layout in self.parts)


class Mixer(Protocol):
    """What is known of a layer's mixer from config.json alone: what it keeps of a token, reads and allows.

    A new kind is a file here, a line in `MIXERS` of `quire.model.load.layer_mixers`, which reads its weights, and a
    file in `quire.model.net`, which runs it.
    """

    @property
    def features(self) -> frozenset[Feature]:
        """Rows of the table of exclusions that a model with such a layer has a part in."""
        ...

    @property
    def own_heads(self) -> bool:
        """Whether each head has rows of the matrices q, k and v, which can be dropped, scaled and adapted."""
        ...

    @property
    def scaled(self) -> bool:
        """Whether its cache may hold codes with a scale per token and head."""
        ...

    @property
    def state(self) -> StateLayout | None:
        """How the recurrent state of a sequence lies; None where it keeps tokens alone."""
        ...

    @property
    def out(self) -> str:
        """The role of its last matrix, whose results are added to the stream."""
        ...

    @property
    def read(self) -> tuple[int, int, int]:
        """How attention counts it: heads of queries, heads of the cache, numbers of a key."""
        ...

    @property
    def projected(self) -> int:
        """Numbers that a row is projected to before tokens read each other."""
        ...

    def kept_in(self, asked: str, dtype: Dtype, backend: str) -> Dtype:
        """The format of its cache. `asked`: `--kv-cache-dtype`; "auto" keeps what weights have that are not quantized,
        `dtype`. `ConfigError` where it cannot be kept so on `backend`.
        """
        ...

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """How a block of each part of its cache lies. `heads`: how the backend lays keys and values per head."""
        ...
