"""The models of a server of several: `--models FILE.toml`, or `--model name=path[,option=value...]` several times."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.cli.flags import to_engine
from quire.cli.inspect import needed_bytes
from quire.core.errors import ConfigError, QuireError
from quire.engine.options import KNOWN

if TYPE_CHECKING:
    from quire.server.several.pool import Listed

OWN = ("model", "served_model_name")


def listed_models(file: str | None, given: Sequence[str], options: Mapping[str, Any]) -> list[Listed]:
    """What the file and the flags list; `options` of the command line hold for all that do not say otherwise.

    `ConfigError` names what is wrong, with the model; `ModelError` for a folder that cannot be read.
    """
    from quire.server.several.pool import Listed

    entries = [*(_read(file) if file is not None else ()), *map(_parsed, given)]
    if not entries:
        raise ConfigError(f'--models {file}: it lists no model; write [models.NAME] and model = "PATH"', param="models")
    shared = {k: v for k, v in options.items() if k not in OWN}
    found = []
    for name, own in entries:
        stays = own.pop("pinned", False)
        if not isinstance(stays, bool):
            raise ConfigError(f"model {name!r}: pinned must be true or false", param="pinned")
        try:
            config = to_engine({**shared, **own, "served_model_name": [name]})
            found.append(Listed(name=name, config=config, needed=needed_bytes(config), pinned=stays))
        except QuireError as error:
            raise ConfigError(f"model {name!r}: {error.message}", param=error.param) from None
    return found


def _read(path: str) -> list[tuple[str, dict[str, Any]]]:
    """[models.NAME] with `model` (the path), `pinned`, and any of the engine's options."""
    try:
        given = tomllib.loads(Path(path).read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"--models {path}: {error.strerror}", param="models") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--models {path}: not TOML: {error}", param="models") from None
    models = given.pop("models", None)
    if given or not isinstance(models, dict) or not all(isinstance(m, dict) for m in models.values()):
        raise ConfigError(f"--models {path}: it must hold tables [models.NAME] and nothing else", param="models")
    return [(name, _checked(name, entry)) for name, entry in models.items()]


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """name=path[,option=value...]; values are JSON where they can be read as such."""
    name, _, rest = text.partition("=")
    path, *more = rest.split(",")
    entry: dict[str, Any] = {"model": path}
    for part in more:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--model {text}: {part!r} is no option=value", param="model")
        try:
            entry[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            entry[key] = value
    return name, _checked(name, entry)


def _checked(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    found = {key.replace("-", "_"): value for key, value in entry.items()}
    for key in found:
        if (key not in KNOWN and key != "pinned") or key == "served_model_name":
            raise ConfigError(f"model {name!r}: {key}: there is no such option", param=key)
    if not name or not isinstance(found.get("model"), str) or not found["model"]:
        raise ConfigError(f"model {name!r}: it needs a name and model = PATH", param="model")
    return found


def is_listing(model: str) -> bool:
    """Whether a value of --model is name=path, and no path of its own."""
    return "=" in model and not Path(model.partition(",")[0]).exists()
