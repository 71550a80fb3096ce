"""Command line flags made from the fields of the option structs: one source for names, types and defaults."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import click
import msgspec

from quire.cli.params import Argument, Option
from quire.core.config import KV_ALIASES, SECTIONS, EngineConfig
from quire.core.errors import BadRequest, ConfigError
from quire.engine.options import KNOWN, UNBUILT, engine_config
from quire.server.options import ServerOptions

T = TypeVar("T", bound=msgspec.Struct)
Struct = type[msgspec.Struct]
PANELS = {"model": "Model", "cache": "KV cache", "scheduler": "Scheduler", "device": "Device", "lora": "LoRA",
          "speculation": "Speculation", "parallel": "Ranks", "offload": "Weights elsewhere",
          "tiers": "Tiers of the KV cache", "cluster": "Hosts", "media": "Pictures"}  # fmt: skip
ENGINE: dict[str, Struct] = {PANELS[name]: section for name, section in SECTIONS.items()}
SERVER: dict[str, Struct] = {"Server": ServerOptions}

SHORT = {"model": "-m", "max_model_len": "-c", "threads": "-t"}

ARGUMENT = "model_argument"


def with_flags(
    groups: Mapping[str, Struct], model_argument: bool = True, several: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command a flag for every field of `groups` (heading -> struct), and the argument [MODEL].

    The command gets those that were given as one mapping, its first argument. This decorator stands next to the
    function: help lists parameters of the decorators above it first. `several`: --model may be given several times,
    and is a list then.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        flags = _flags(groups, several)
        names = [str(flag.name) for flag in flags]
        if model_argument:
            kind = next(f.type for f in msgspec.structs.fields(SECTIONS["model"]) if f.name == "model")
            argument = Argument([ARGUMENT], metavar="MODEL", required=False, help=_unfolded(kind)[1].description or "")
            flags.insert(0, argument)

        @functools.wraps(function)
        def command(**given: Any) -> Any:
            options = {
                n: list(v) if isinstance(v, tuple) else v for n in names if (v := given.pop(n)) not in (None, ())
            }
            if several and len(options.get("model", ())) == 1:
                [options["model"]] = options["model"]
            if (model := given.pop(ARGUMENT, None)) is not None:
                set_model(options, model)
            return function(options, **given)

        vars(command)["__click_params__"] = flags[::-1]  # in the order of decorators, from below
        return command

    return decorate


def _flags(groups: Mapping[str, Struct], several: bool) -> list[click.Parameter]:
    flags: dict[str, click.Parameter] = {}
    for struct in groups.values():
        for field in msgspec.structs.fields(struct):
            if field.name not in flags:
                flags[field.name] = _flag(field, several and field.name == "model")
    if "block_size" in flags:
        for alias in ("ctk", "ctv"):
            flags[alias] = Option([alias, f"-{alias}"], hidden=True)
        for name, (neutral, _) in UNBUILT.items():
            kind = next((type(v) for v in neutral if v is not None), str)
            spelling = f"{_long(name)}/{_long(f'no_{name}')}" if kind is bool else _long(name)
            flags[name] = Option([name, spelling], type=kind, default=None, hidden=True)
    return list(flags.values())


def _flag(field: msgspec.structs.FieldInfo, several: bool) -> Option:
    """The flag of a field; None, or () where it may be given `several` times, is what it is if it is not given."""
    name, (kind, meta) = field.name, _unfolded(field.type)
    default = None if field.default is msgspec.NODEFAULT else field.default
    if default == ():
        kind, several = str, True
    elif name == "max_model_len":
        kind, default = str, "auto"
    else:
        kind = next((each for each in get_args(kind) if each is not type(None)), kind)
    spelling = f"{_long(name)}/{_long(f'no_{name}')}" if kind is bool else _long(name)
    return Option(
        [name, spelling, *([SHORT[name]] if name in SHORT else [])],
        type=kind,
        multiple=several,
        default=None,
        help=(meta.description or "") + _shown(default),
        metavar="|".join((meta.extra or {}).get("choices", ())) or None,
    )


def _unfolded(kind: Any) -> tuple[Any, msgspec.Meta]:
    """The type of an option, and what is said about it."""
    plain, meta = get_args(kind)
    return plain, meta


def _shown(default: object) -> str:
    """The default as a part of the help text."""
    if default in (None, "", ()):
        return ""
    return f" [{'on' if default is True else 'off' if default is False else default}]"


def _long(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def text_of(argument: str) -> str:
    """An argument that is text, whose bytes are UTF-8 whatever the locale says; `BadRequest` where they are not."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{os.fsencode(argument)[:40]!r} is not UTF-8 text: {error.reason}") from None


def set_model(options: dict[str, Any], model: str) -> None:
    """Take the model that was given as an argument; `ConfigError` when --model names another one."""
    if options.setdefault("model", model) != model:
        raise ConfigError(f"two models: {model!r} and --model {options['model']!r}; give one", param="model")


def to_engine(options: Mapping[str, Any]) -> EngineConfig:
    """The engine's part of `options`."""
    chosen = {k: v for k, v in options.items() if k in KNOWN or k in UNBUILT}
    if chosen.get("model") == "":
        raise ConfigError("--model is empty; leave it out for the embedded model", param="model")
    if isinstance(chosen.get("max_model_len"), str):
        chosen["max_model_len"] = _length(chosen["max_model_len"])
    kinds = {KV_ALIASES.get(v, v) for k in ("kv_cache_dtype", "ctk", "ctv") if (v := options.get(k)) is not None}
    if len(kinds) > 1:
        raise ConfigError(f"keys and values are kept in one format, not in {' and '.join(sorted(kinds))}")
    if kinds:
        chosen["kv_cache_dtype"] = kinds.pop()
    return engine_config(chosen)


def to_server(options: Mapping[str, Any]) -> ServerOptions:
    """The server's part of `options`."""
    server = pick(options, ServerOptions)
    server.validate()
    return server


def pick(options: Mapping[str, Any], struct: type[T]) -> T:
    """The options of `struct`, checked."""
    try:
        return msgspec.convert({k: v for k, v in options.items() if k in struct.__struct_fields__}, struct)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad option value: {error}") from None


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    """The command line that gives `options`."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(_long(name if value else f"no_{name}"))
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [_long(name), str(each)]
    return words


def _length(value: str) -> int | str:
    if value == "auto":
        return value
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"--max-model-len {value!r} is neither a number of tokens nor auto", param="max_model_len")
    return int(value)
