"""`--config FILE`: flags of a command as the keys of a TOML file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError
from quire.engine.options import KNOWN, UNBUILT
from quire.server.options import ServerOptions

NAMES = frozenset({*KNOWN, *UNBUILT, *ServerOptions.__struct_fields__})
_ALIASES = ("ctk", "ctv")


def with_config(path: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, which the command line gave, over those of the file at `path`.

    Keys are the long names of the flags, with dashes or underscores; a list is a flag that is given several times.
    `ConfigError` names what is wrong with the file, or the key that is no flag.
    """
    found = {} if path is None else _read(path)
    if any(name in options for name in _ALIASES):
        found.pop("kv_cache_dtype", None)
    return found | dict(options)


def _read(path: str) -> dict[str, Any]:
    try:
        given = tomllib.loads(Path(path).read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", param="config") from None
    except (ValueError, RecursionError) as error:
        yaml = path.endswith((".yaml", ".yml"))
        hint = "; a line `key: value` of YAML is `key = value`, text in quotes" if yaml else ""
        raise ConfigError(f"--config {path}: not TOML: {error}{hint}", param="config") from None
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            hint = f"; is it {near[0].replace('_', '-')}?" if near else ""
            raise ConfigError(f"--config {path}: {key}: there is no such flag{hint}", param=key)
        if name in found:
            raise ConfigError(f"--config {path}: {key}: given twice", param=key)
        found[name] = value
    return found
