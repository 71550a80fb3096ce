"""No mixer: layers that are an MLP or experts alone, as some of Nemotron-H are (NVIDIA 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.dtypes import Dtype
from quire.core.exclusions.features import Feature
from quire.model.mixers.mixer import KV_TYPES
from quire.ops.layout import CacheLayout, KVLayout, StateLayout


@dataclass(frozen=True)
class NoMixer:
    """A `Mixer` in name: tokens do not read each other, and nothing is kept of them."""

    features: frozenset[Feature] = frozenset()
    own_heads: bool = False
    scaled: bool = True
    state: StateLayout | None = None
    out: str = ""
    read: tuple[int, int, int] = (0, 0, 0)
    projected: int = 0

    def kept_in(self, asked: str, dtype: Dtype, backend: str) -> Dtype:
        """Any format: there is nothing to keep."""
        return KV_TYPES.get(asked, dtype)

    def parts(self, block_size: int, dtype: Dtype, heads: type[KVLayout] = KVLayout) -> CacheLayout:
        """No parts."""
        return ()
