"""Where evicted blocks of the KV cache go."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.exclusions.features import KV_OFFLOADING, KV_STORE, NO_KV_STORE, Feature, found
from quire.core.options.fields import about

MOST_GIB = 1 << 20
FLUSH_SECONDS = 10.0
"""That an engine's end may take to keep what is in no store yet."""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers behind the KV cache. A folder may be shared by engines of one host, of the same model or of several."""

    kv_store: Annotated[
        str | None,
        about(
            "Folder for keys, values and tokens of prompts that are evicted from the KV cache. It survives restarts."
        ),
    ] = None
    kv_store_gb: Annotated[
        float,
        about(
            "Largest size of that folder in GB. The least recently used blocks are deleted first.", gt=0, le=MOST_GIB
        ),
    ] = 16.0
    kv_offloading_size: Annotated[
        float | None, about("GiB of host memory for keys and values that a GPU's KV cache has no room for.")
    ] = None

    @property
    def any(self) -> bool:
        """Whether there is a tier at all."""
        return bool(self.kv_store) or bool(self.kv_offloading_size)

    @property
    def features(self) -> frozenset[Feature]:
        """What is asked for, as far as it excludes something."""
        return found(
            (KV_STORE, bool(self.kv_store)), (NO_KV_STORE, not self.kv_store),
            (KV_OFFLOADING, bool(self.kv_offloading_size)),
        )  # fmt: skip

    def validate(self) -> None:
        """Refuse values that cannot work, naming the option."""
        if not 0 <= (self.kv_offloading_size or 0.0) <= MOST_GIB:
            raise ConfigError(f"--kv-offloading-size must lie in [0, {MOST_GIB}]", param="kv_offloading_size")
