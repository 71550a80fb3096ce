"""`--config FILE`: flags of a command as the keys of a TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.core.options.values import check_names, flag_file, read_toml, with_underscores
from quire.engine.engine_options import KNOWN, UNBUILT
from quire.server.server_options import ServerOptions

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
    place = flag_file("config", path)
    given = read_toml(path, place)
    check_names(given, NAMES, place, "flag")
    return with_underscores(given, place)
