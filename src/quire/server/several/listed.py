"""The models that a server of several may load, as they are listed at its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A model that may be loaded. `pinned`: at the start, and it makes no room for others.

    `speech`: options of the server that are otherwise for this model (`OF_MODELS`). `needed`: bytes of its weights and
    KV cache as planned from the headers of its files; of these, too, are what follows it. `root`: what they call it;
    `scheme`: of its weights; `passport`: what was measured of it, {} where nothing was.
    """

    name: str
    config: EngineConfig
    speech: Mapping[str, Any]
    needed: int
    max_model_len: int
    folder: str
    root: str
    scheme: str
    passport: Mapping[str, Any]
    pinned: bool = False

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that it is loaded with."""
        return tuple(module.partition("=")[0] for module in self.config.lora.lora_modules)


def check_list(models: Sequence[Listed], budget: int) -> None:
    """`ConfigError` for names that are there twice, and for a model that `budget` bytes never have room for."""
    names = [name for model in models for name in (model.name, *model.adapters)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--models: {twice[0]!r} is there twice; names of models and adapters differ", param="models")
    if not budget:
        return
    pinned = sum(model.needed for model in models if model.pinned)
    if pinned > budget:
        raise _too_large("pinned models need", pinned, budget, "")
    for model in models:
        if not model.pinned and model.needed + pinned > budget:
            beside = f" beside {pinned / 1e9:.3g} GB of pinned ones" if pinned else ""
            raise _too_large(f"model {model.name!r} needs", model.needed, budget, beside)


def _too_large(who: str, needed: int, budget: int, beside: str) -> ConfigError:
    return ConfigError(
        f"--models-memory-gb {budget / 1e9:g}: {who} {needed / 1e9:.3g} GB{beside}; raise it, or lower "
        "kv_cache_memory_bytes of the model",
        param="models_memory_gb",
    )
