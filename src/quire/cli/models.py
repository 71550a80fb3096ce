"""The models of a server of several: `--models FILE.toml`, or `--model name=path[,option=value...]` several times."""

from __future__ import annotations

import difflib
import tomllib
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
from quire.engine.options import KNOWN, UNBUILT
from quire.server.options import OF_MODELS, ServerOptions

if TYPE_CHECKING:
    from quire.plan.needs import Needs
    from quire.server.several.pool import Listed

Entry = dict[str, Any]
OWN = (*KNOWN, *UNBUILT, *OF_MODELS, "pinned")
"""What an entry may say beside its name."""
STRUCTS: tuple[type[msgspec.Struct], ...] = (*SECTIONS.values(), ServerOptions)


@cache
def _fields() -> dict[str, msgspec.structs.FieldInfo]:
    """Those of an entry by name; looked for when there is one, as that takes 9 ms of a start."""
    found = [field for struct in STRUCTS for field in msgspec.structs.fields(struct)]
    return {field.name: field for field in found if field.name in OWN}


def listed_models(options: Mapping[str, Any]) -> list[Listed]:
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


class _Named(msgspec.Struct, frozen=True, kw_only=True):
    """An entry, read and checked, as `Listed` has it."""

    name: str
    config: EngineConfig
    speech: dict[str, Any]
    pinned: bool


def _planned(models: list[_Named], budget_gb: float) -> list[Listed]:
    """With the memory that each is to have. Pinned ones come first: others have what these leave."""
    found: dict[str, Listed] = {}
    room = round(budget_gb * 1e9)
    for model in sorted(models, key=lambda each: not each.pinned):
        try:
            listed = _listed(model, room if budget_gb else None)
        except QuireError as error:
            raise ConfigError(f"model {model.name!r}: {error.message}", param=error.param) from None
        room -= listed.needed if model.pinned else 0
        found.setdefault(model.name, listed)
    return [found[model.name] for model in models]


def _listed(model: _Named, room: int | None) -> Listed:
    """`room`: bytes that its weights and KV cache may take; None where there is no bound."""
    from quire.plan.needs import needs
    from quire.run.kv_budget import plan_kv
    from quire.server.several.pool import Listed
    from quire.text.files import read_json

    config = model.config
    check_known(config.features, Known(frozenset({SEVERAL_MODELS})))
    found = needs(config)
    sized = config.cache.kv_cache_memory_bytes or config.cache.num_blocks
    left = None if room is None or sized else _half_of_rest(found, room, config.wholes)
    kv = plan_kv(config, found.shape, left)
    each = kv.blocks // kv.sizes.holders * kv.block_bytes
    if left is not None:  # what was planned is what it gets, whatever is free when it is loaded
        config = replace(config, cache=replace(config.cache, kv_cache_memory_bytes=each))
    return Listed(
        name=model.name,
        config=config,
        speech=model.speech,
        needed=found.weights + each * config.wholes,
        max_model_len=kv.max_model_len,
        folder=str(found.facts.folder),
        root=found.facts.name,
        scheme=config.model.quantization or found.facts.scheme,
        passport=read_json(found.facts.folder / "quire.json"),
        pinned=model.pinned,
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
    try:
        given = tomllib.loads(Path(path).read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"--models {path}: {error.strerror}", param="models") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--models {path}: not TOML: {error}", param="models") from None
    models = given.pop("models", None)
    if given or not models or not isinstance(models, dict) or not all(isinstance(m, dict) for m in models.values()):
        hint = '[models.NAME] with model = "PATH"'
        raise ConfigError(f"--models {path}: it must hold tables {hint}, and nothing else", param="models")
    return [(name, {key.replace("-", "_"): value for key, value in entry.items()}) for name, entry in models.items()]


def _parsed(text: str) -> tuple[str, Entry]:
    """name=path[,option=value...]; an option that may be given several times has one value here."""
    name, _, rest = text.partition("=")
    path, *more = rest.split(",")
    entry: Entry = {"model": path}
    for part in more:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--model {text}: {part!r} is no option=value", param="model")
        entry[key.replace("-", "_")] = _value(key.replace("-", "_"), value)
    return name, entry


def _value(option: str, text: str) -> Any:
    """The value that `text` is for an option; what does not fit stays text, which its check refuses."""
    kind: Any = bool if option == "pinned" else getattr(_fields().get(option), "type", str)
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        return (text,) if getattr(_fields().get(option), "default", None) == () else text


def _entry(name: str, own: Entry, shared: Mapping[str, Any]) -> _Named:
    """An entry of the list, its options over those of the command line."""
    pinned = own.pop("pinned", False)
    try:
        for key in own:
            if key not in OWN or key == "served_model_name":
                near = difflib.get_close_matches(key, OWN, 1)
                hint = f"; is it {near[0]}?" if near else ""
                raise ConfigError(f"{key}: a model has no such option{hint}", param=key)
        if not isinstance(pinned, bool):
            raise ConfigError(f"pinned: must be true or false, not {pinned!r}", param="pinned")
        if not name or not isinstance(own.get("model"), str) or not own["model"]:
            raise ConfigError("it needs a name and model = PATH", param="model")
        options = {**shared, **own}
        config, server = to_engine(options | {"served_model_name": [name]}), to_server(options)
        return _Named(name=name, config=config, speech={f: getattr(server, f) for f in OF_MODELS}, pinned=pinned)
    except QuireError as error:
        raise ConfigError(f"model {name!r}: {error.message}", param=error.param) from None
