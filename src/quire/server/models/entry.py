"""A model that a server may load, with what is known of it before; and the check of a list of such models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A model that a server may load.

    `aliases`: further names that requests may give. `pinned`: it is loaded at the start, and makes no room for
    others. `server_options`: options of the server that this model has otherwise (`PER_MODEL`). `needed_bytes`: bytes
    of its weights and KV cache, planned from the headers of its files, as `max_model_len`, `folder` and `scheme` (of
    its weights) are, and `family`, its architecture. `root`: the name of its files, as a folder or the Hub has it.
    `passport`: quire.json of its folder, {} where there is none.
    """

    name: str
    aliases: tuple[str, ...] = ()
    config: EngineConfig
    server_options: Mapping[str, Any]
    needed_bytes: int
    max_model_len: int
    folder: str
    root: str
    scheme: str
    passport: Mapping[str, Any]
    pinned: bool = False
    family: str = ""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that it is loaded with."""
        return tuple(module.partition("=")[0] for module in self.config.lora.lora_modules)


def check_entries(entries: Sequence[ModelEntry], budget: int) -> None:
    """Check that names differ, and that `budget` bytes (0 = no bound) have room for each model beside the pinned ones.

    Raises `ConfigError`.
    """
    names = [name for entry in entries for name in (entry.name, *entry.adapters)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--models: {twice[0]!r} is there twice; names of models and adapters differ", param="models")
    if not budget:
        return
    pinned = sum(entry.needed_bytes for entry in entries if entry.pinned)
    if pinned > budget:
        raise _too_large("pinned models need", pinned, budget, "")
    for entry in entries:
        if not entry.pinned and entry.needed_bytes + pinned > budget:
            beside = f" beside {pinned / 1e9:.3g} GB of pinned ones" if pinned else ""
            raise _too_large(f"model {entry.name!r} needs", entry.needed_bytes, budget, beside)


def _too_large(who: str, needed: int, budget: int, beside: str) -> ConfigError:
    return ConfigError(
        f"--models-memory-gb {budget / 1e9:g}: {who} {needed / 1e9:.3g} GB{beside}; raise it, or lower "
        "kv_cache_memory_bytes of the model",
        param="models_memory_gb",
    )
