"""Where evicted blocks of the KV cache go."""

from __future__ import annotations

from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.option import about
from quire.core.parallel import ParallelConfig

MOST_GIB = 1 << 20
FLUSH_SECONDS = 10.0
"""That an engine's end may take to keep what is in no store yet."""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers behind the KV cache. A folder may be shared by engines of one host, of the same model or of several."""

    kv_store: Annotated[
        str | None,
        about(
            "Folder that keeps keys and values of prompts beyond the KV cache and beyond a restart (their tokens, too)."
        ),
    ] = None
    kv_store_gb: Annotated[
        float, about("GB of keys and values in that folder at most; those least recently used make room.")
    ] = 16.0
    kv_offloading_size: Annotated[
        float | None, about("GiB of host memory for keys and values that a GPU's KV cache has no room for.")
    ] = None

    @property
    def any(self) -> bool:
        """Whether there is a tier at all."""
        return bool(self.kv_store) or bool(self.kv_offloading_size)

    def validate(self, shares: bool, parallel: ParallelConfig) -> None:
        """Refuse what cannot work, naming the option; `shares`: whether prefixes are found again."""
        if not 0 < self.kv_store_gb <= MOST_GIB:
            raise ConfigError(f"--kv-store-gb {self.kv_store_gb:g} must lie in (0, {MOST_GIB}]", param="kv_store_gb")
        if not 0 <= (self.kv_offloading_size or 0.0) <= MOST_GIB:
            raise ConfigError(f"--kv-offloading-size must lie in [0, {MOST_GIB}]", param="kv_offloading_size")
        if parallel.prefill_replicas and (not self.kv_store or self.kv_offloading_size):
            raise ConfigError(
                "--prefill-replicas: prompts go from one engine to another through the folder of --kv-store, and "
                "nowhere else; give one, and leave out --kv-offloading-size",
                param="prefill_replicas",
            )
        if not self.any:
            return
        name = "kv_store" if self.kv_store else "kv_offloading_size"
        option = f"--{name.replace('_', '-')}"
        if not shares:
            raise ConfigError(
                f"{option} keeps what --enable-prefix-caching finds, which is turned off; leave one of them out",
                param=name,
            )
        if parallel.ranks > parallel.tensor_parallel_size:
            other = parallel.ranks_option.replace("_", "-")
            raise ConfigError(
                f"{option}: of blocks that ranks of --{other} have nothing is gathered; leave one of them out, or use "
                "--tensor-parallel-size",
                param=name,
            )
