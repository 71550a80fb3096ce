"""TOML files of options: recipes, suites, models, spaces of values, configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.files import read_bounded
from quire.core.options.values import Place

MAX_BYTES = 1 << 20
"""Of a file that people write."""


def read_toml(path: str | Path, place: Place) -> dict[str, Any]:
    """The tables of a TOML file; `place` begins an error. `ConfigError` where it cannot be read, or is no TOML."""
    import tomllib  # of commands that are given a file alone

    try:
        return tomllib.loads(read_bounded(Path(path), MAX_BYTES).decode())
    except OSError as error:
        raise place.error(f": {error.strerror or error}") from None
    except ModelError:
        raise place.error(f": is larger than {MAX_BYTES:,} bytes, the limit for such a file") from None
    except (ValueError, RecursionError) as error:
        yaml = str(path).endswith((".yaml", ".yml"))
        hint = "; a line `key: value` of YAML is `key = value`, text in quotes" if yaml else ""
        raise place.error(f": is not TOML: {error}{hint}") from None


def toml_value(text: str) -> Any:
    """The value that `text` writes in TOML; the text itself where it writes none, as words without quotes do."""
    import tomllib

    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def flag_file(option: str, path: str | Path) -> Place:
    """The place of a file that a flag names."""
    return Place(f"--{option} {path}", option)
