"""Flags of the command line, made from options: one source for their names, types, defaults and help."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
import msgspec
from click.shell_completion import CompletionItem

from quire.cli.complete import complete_model
from quire.cli.params import INTEGER, Argument, Command, Option, without_suffix
from quire.core.config import KV_ALIASES, SECTIONS, EngineConfig
from quire.core.errors import BadRequest, ConfigError
from quire.core.options.fields import OptionField, Struct, fields_of, flag
from quire.core.options.values import read_options
from quire.engine.engine_options import KNOWN, UNBUILT, engine_config
from quire.server.server_options import ServerOptions

if TYPE_CHECKING:
    from quire.core.options.aliases import Alias

T = TypeVar("T", bound=msgspec.Struct)
PANELS = {"model": "Model", "cache": "KV cache", "scheduler": "Scheduler", "device": "Device", "lora": "LoRA",
          "speculation": "Speculation", "parallel": "Ranks", "offload": "Weights elsewhere",
          "tiers": "Tiers of the KV cache", "cluster": "Hosts", "media": "Images"}  # fmt: skip
ENGINE: dict[str, Struct] = {PANELS[name]: section for name, section in SECTIONS.items()}
SERVER: dict[str, Struct] = {"Server": ServerOptions}
LARGE = frozenset({*ENGINE.values(), ServerOptions})
"""Structs of which help shows the common options, unless all are asked for."""

SHORT = {"model": "-m", "max_model_len": "-c", "threads": "-t"}

ARGUMENT = "model_argument"


def option_command(
    name: str,
    groups: Mapping[str, Struct],
    *params: click.Parameter,
    model_argument: bool = True,
    several: bool = False,
    examples: Sequence[tuple[str, str]] = (),
    foreign: tuple[Alias, ...] = (),
) -> Callable[[Callable[..., Any]], Command]:
    """Make a function the command `name` with a flag for every option of `groups` (heading of help -> struct).

    The function gets the options that were given as one mapping, its first argument, and `params` by their names.
    `model_argument`: the model may be given as the argument [MODEL] too; where --model gives one and the command takes
    `words`, that argument is the first of these. `several`: --model may be given several times,
    and is a list then. `examples`: command lines for its help, and what each does.
    `foreign`: flags of other tools that mean something in this command alone.
    """
    flags = flags_of(groups, several)
    first = [*params, _model_argument()] if model_argument else list(params)

    def made(function: Callable[..., Any]) -> Command:
        def run(**given: Any) -> Any:
            options = _given({name: given.pop(name) for name in flags})
            if several and len(options.get("model", ())) == 1:
                [options["model"]] = options["model"]
            if (model := given.pop(ARGUMENT, None)) is not None:
                if "words" in given and options.get("model", model) != model:
                    given["words"] = (model, *given["words"])
                else:
                    set_model(options, model)
            return function(options, **given)

        params = [*first, *flags.values()]
        return Command(
            name, groups=groups, examples=examples, foreign=foreign, params=params, callback=run, help=function.__doc__
        )

    return made


def _model_argument() -> Argument:
    [field] = [field for field in fields_of(SECTIONS["model"]) if field.name == "model"]
    return Argument([ARGUMENT], metavar="MODEL", required=False, help=field.help, shell_complete=complete_model)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given: click has None, or (), for others."""
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: value for name, value in found.items() if value not in (None, [])}


def flags_of(groups: Mapping[str, Struct], several: bool = False) -> dict[str, Option]:
    """The flag of every option by its name; of two options of one name the first group has it."""
    flags: dict[str, Option] = {}
    for group, struct in groups.items():
        for field in fields_of(struct):
            if field.name not in flags:
                flags[field.name] = _flag(field, group, several and field.name == "model", struct in LARGE)
    if "block_size" in flags:
        for alias in ("ctk", "ctv"):
            flags[alias] = Option([alias, f"-{alias}"], hidden=True)
        for name, (neutral, _) in UNBUILT.items():
            kind = next((type(v) for v in neutral if v is not None), str)
            flags[name] = Option([name, _spelling(name, kind)], type=kind, default=None, hidden=True)
    return flags


def _flag(field: OptionField, group: str, several: bool, large: bool) -> Option:
    """The flag of an option; None, or () where it may be given `several` times, is what it is if it is not given.

    `large`: its struct has many, of which help shows the common ones.
    """
    name, kind, default = field.name, field.plain, field.default
    if field.several:
        kind, several = str, True
    elif name == "max_model_len":
        kind, default = str, "auto"
    else:
        kind = next((each for each in get_args(kind) if each is not type(None)), kind)
    return Option(
        [name, _spelling(name, kind), *([SHORT[name]] if name in SHORT else [])],
        group=group,
        field=field,
        rare=large and not field.common,
        type=INTEGER if kind is int else kind,
        multiple=several,
        default=None,
        help=field.help + _shown(default),
        metavar="|".join(field.choices) or None,
        shell_complete=complete_model if name == "model" else partial(_complete_choice, field.choices),
    )


def _complete_choice(
    choices: tuple[str, ...], ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    found = [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def _spelling(name: str, kind: Any) -> str:
    """The flag as click declares it: with its --no- where it is on or off."""
    return f"{flag(name)}/{flag(f'no_{name}')}" if kind is bool else flag(name)


def _shown(default: object) -> str:
    """The default as a part of the help text."""
    if default in (None, "", ()):
        return ""
    return f" [{'on' if default is True else 'off' if default is False else default}]"


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
    server = read_options(ServerOptions, options)
    server.validate()
    return server


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    """The command line that gives `options`."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [flag(name), str(each)]
    return words


def _length(value: str) -> int | str:
    value = without_suffix(value)
    if value == "auto":
        return value
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"--max-model-len {value!r} is neither a number of tokens nor auto", param="max_model_len")
    return int(value)
