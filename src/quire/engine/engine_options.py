"""The option names users know from vLLM: those quire has, and those it refuses with the reason."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.core.config import OWNER, EngineConfig, flat_config
from quire.core.errors import ConfigError
from quire.core.options.aliases import alias_of, value_here
from quire.core.options.fields import flag
from quire.core.options.values import did_you_mean

log = logging.getLogger("quire.options")
KNOWN = tuple(OWNER)

_ONE_DEVICE = "running on several devices is not built yet"
_CONTEXT = "all phases of a sequence are split alike: use context_parallel_size"

UNBUILT: dict[str, tuple[tuple[Any, ...], str]] = {
    "decode_context_parallel_size": ((1,), _CONTEXT),
    "prefill_context_parallel_size": ((1,), _CONTEXT),
    "trust_remote_code": ((True, False), "code from a model folder is never run"),
    "quantization_param_path": ((None,), "scales of the KV cache are not read from files"),
}
"""Each row: option, the values that ask for nothing, and why any other is refused."""


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The `EngineConfig` that `options` describe; None means "the default".

    Raises `ConfigError` naming the option that is unknown, not built, of the wrong type or out of range.
    """
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name in UNBUILT:
            refuse_unbuilt(name, value)
            if name == "trust_remote_code" and value:
                log.warning("trust_remote_code has no effect: code from a model folder is never run")
        elif name not in KNOWN:
            given |= _foreign(name, value)
        elif value is not None:
            given[name] = _plain(name, value)
    if given.get("max_model_len") == "auto":
        del given["max_model_len"]
    return flat_config(**given)


def _foreign(name: str, value: Any) -> dict[str, Any]:
    """What an option that vLLM has under this name is here; `ConfigError` where it is none, or is refused."""
    alias = alias_of(flag(name))
    if alias is None:
        names = sorted({*KNOWN, *UNBUILT})
        raise ConfigError(f"{name}: there is no such option{did_you_mean(name, names, len(names))}", param=name)
    if value is None or (value is False and alias.flag):
        return {}
    try:
        found = value_here(alias, name, None if value is True else str(value))
    except ConfigError as error:
        raise ConfigError(error.message, param=name) from None
    if found is None:
        return {}
    if alias.ours.removeprefix("no_") in KNOWN and alias.flag:
        return {alias.ours.removeprefix("no_"): not alias.ours.startswith("no_")}
    return {alias.ours: value if found == str(value) else found} if alias.ours in KNOWN else {}


def _plain(name: str, value: Any) -> Any:
    """Paths and torch's dtypes by their names, objects as JSON."""
    if name in ("speculative_config", "limit_mm_per_prompt") and not isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if name in ("dtype", "kv_cache_dtype") and type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def refuse_unbuilt(name: str, value: Any) -> None:
    """Raise `ConfigError` with the reason unless `value` asks for nothing."""
    neutral, reason = UNBUILT[name]
    if value not in neutral:
        given = "" if value is True else f" {value}"
        raise ConfigError(f"{flag(name)}{given} is refused: {reason}", param=name)
