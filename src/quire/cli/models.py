"""The models of a server of several: `--models FILE.toml`, or `--model name=path[,option=value...]` several times."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from quire.cli.flags import to_engine, to_server
from quire.core.config import SECTIONS, EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.exclusions.exclusion import Known
from quire.core.exclusions.features import SEVERAL_MODELS
from quire.core.exclusions.table import check_known
from quire.core.options.fields import OptionField, fields_of
from quire.core.options.values import Place, did_you_mean, flag_file, from_text, read_toml, read_value, with_underscores
from quire.engine.engine_options import KNOWN, UNBUILT
from quire.server.server_options import PER_MODEL, ServerOptions

if TYPE_CHECKING:
    from quire.plan.needs import Needs
    from quire.server.models.entry import ModelEntry

Entry = dict[str, Any]
OWN = (*KNOWN, *UNBUILT, *PER_MODEL, "pinned")
"""What an entry may say beside its name."""


class _Pinned(msgspec.Struct, frozen=True):
    """What an entry may say that is no option of a server or an engine."""

    pinned: bool = False


STRUCTS: tuple[type[msgspec.Struct], ...] = (*SECTIONS.values(), ServerOptions, _Pinned)


@cache
def _fields() -> dict[str, OptionField]:
    """Fields of an entry by name."""
    return {field.name: field for struct in STRUCTS for field in fields_of(struct) if field.name in OWN}


def model_entries(options: Mapping[str, Any]) -> list[ModelEntry]:
    """What --models and --model list, none where there is one model alone.

    Options of the command line hold for all that do not say otherwise. `ConfigError` names what is wrong, and the
    model.
    """
    file, given = options.get("models"), options.get("model")
    words = [given] if isinstance(given, str) else list(given or ())
    listings = [word for word in words if is_listing(word)]
    if file is None and not listings:
        if len(words) > 1:
            raise ConfigError(f"several models: {' and '.join(words)}; name each: --model NAME=PATH", param="model")
        return []
    if len(listings) < len(words):
        [alone, *_] = [word for word in words if word not in listings]
        raise ConfigError(f"a model {alone!r} beside others: name it, --model NAME={alone}", param="model")
    if options.get("served_model_name"):
        raise ConfigError("--served-model-name: each of several models has the name it is listed by", param="model")
    entries = [*(_read(file) if file is not None else ()), *map(_parsed, listings)]
    shared = {name: value for name, value in options.items() if name not in ("model", "models")}
    return _planned([_entry(name, own, shared) for name, own in entries], to_server(options).models_memory_gb)


def is_listing(model: str) -> bool:
    """Whether a value of --model is name=path, and no path of its own."""
    return "=" in model and not Path(model.partition(",")[0]).exists()


class _ReadEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the list, read and checked; the files of the model are not read yet."""

    name: str
    config: EngineConfig
    server_options: dict[str, Any]
    pinned: bool


def _planned(models: list[_ReadEntry], budget_gb: float) -> list[ModelEntry]:
    """Give each model the memory that it is to have. Pinned ones come first: others have what these leave."""
    found: dict[str, ModelEntry] = {}
    room = round(budget_gb * 1e9)
    for model in sorted(models, key=lambda each: not each.pinned):
        try:
            entry = _entry_of(model, room if budget_gb else None)
        except QuireError as error:
            raise ConfigError(f"model {model.name!r}: {error.message}", param=error.param) from None
        room -= entry.needed_bytes if model.pinned else 0
        found.setdefault(model.name, entry)
    return [found[model.name] for model in models]


def _entry_of(model: _ReadEntry, room: int | None) -> ModelEntry:
    """`room`: bytes that its weights and KV cache may take; None where there is no bound."""
    from quire.core.files import read_json
    from quire.plan.needs import needs
    from quire.run.kv_budget import plan_kv
    from quire.server.models.entry import ModelEntry

    config = model.config
    check_known(config.features, Known(frozenset({SEVERAL_MODELS})))
    found = needs(config)
    sized = config.cache.kv_cache_memory_bytes or config.cache.num_blocks
    left = None if room is None or sized else _half_of_rest(found, room, config.wholes)
    kv = plan_kv(config, found.shape, left)
    each = kv.blocks // kv.sizes.holders * kv.block_bytes
    if left is not None:  # what was planned is what it gets, whatever is free when it is loaded
        config = replace(config, cache=replace(config.cache, kv_cache_memory_bytes=each))
    return ModelEntry(
        name=model.name,
        config=config,
        server_options=model.server_options,
        needed_bytes=found.weights + each * config.wholes,
        max_model_len=kv.max_model_len,
        folder=str(found.facts.folder),
        root=found.facts.name,
        scheme=config.model.quantization or found.facts.scheme,
        passport=read_json(found.facts.folder / "quire.json"),
        pinned=model.pinned,
        family=found.facts.spec.family,
    )


def _half_of_rest(found: Needs, room: int, wholes: int) -> int:
    """Bytes of the KV cache of an engine that was not told how many: half of what its weights leave of `room`."""
    if found.weights >= room:
        raise ConfigError(
            f"its weights take {found.weights / 1e9:.3g} GB, of --models-memory-gb {max(0, room) / 1e9:.3g} are left "
            "for it; raise that, or quantize the model",
            param="models_memory_gb",
        )
    return (room - found.weights) // 2 // wholes


def _read(path: str) -> list[tuple[str, Entry]]:
    """[models.NAME] with `model` (the path), `pinned`, and any of the engine's options."""
    place = flag_file("models", path)
    given = read_toml(path, place)
    models = given.pop("models", None)
    if given or not models or not isinstance(models, dict) or not all(isinstance(m, dict) for m in models.values()):
        raise place.error(': it must hold tables [models.NAME] with model = "PATH", and nothing else')
    return [(name, with_underscores(entry, place.key(name))) for name, entry in models.items()]


def _parsed(text: str) -> tuple[str, Entry]:
    """name=path[,option=value...]; an option that may be given several times has one value here."""
    name, _, rest = text.partition("=")
    path, *more = rest.split(",")
    entry: Entry = {"model": path}
    for part in more:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--model {text}: {part!r} is no option=value", param="model")
        option = key.replace("-", "_")
        entry[option] = from_text(_fields()[option], value) if option in _fields() else value
    return name, entry


def _entry(name: str, own: Entry, shared: Mapping[str, Any]) -> _ReadEntry:
    """An entry of the list, its options over those of the command line."""
    pinned = own.pop("pinned", False)
    try:
        for key in own:
            if key not in OWN or key == "served_model_name":
                raise ConfigError(f"{key}: a model has no such option{did_you_mean(key, OWN)}", param=key)
        read_value(bool, pinned, Place("pinned", "pinned"))
        if not name or not isinstance(own.get("model"), str) or not own["model"]:
            raise ConfigError("it needs a name and model = PATH", param="model")
        options = {**shared, **own}
        config, server = to_engine(options | {"served_model_name": [name]}), to_server(options)
        return _ReadEntry(
            name=name, config=config, server_options={f: getattr(server, f) for f in PER_MODEL}, pinned=pinned
        )
    except QuireError as error:
        raise ConfigError(f"model {name!r}: {error.message}", param=error.param) from None
