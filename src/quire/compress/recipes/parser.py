"""RECIPE.toml: what is done to a model, in which order, and with which text.

    [calibration]
    files = ["notes.txt", "chats.jsonl"]
    samples = 256

    [[stage]]
    kind = "prune"
    method = "wanda"
    pattern = "2:4"

    [[stage]]
    kind = "quantize"
    method = "gptq"
    bits = 4

Everything that is wrong is one line which names the place, and what is known there.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from quire.compress.recipes.stages import METHODS, Count, Gguf, Gptq, Lora, Merge, Names, Stage
from quire.core.errors import ConfigError
from quire.core.files import read_bounded

MAX_BYTES = 1 << 20


class Source(Struct, frozen=True, kw_only=True):
    """`model`: a folder or hub name, for a recipe of one model; empty = what the command names."""

    model: str = ""


class Calibration(Struct, frozen=True, kw_only=True):
    """Text that methods look at: `samples` rows of `length` tokens; no files = the shipped `text`: "general" is of
    several domains and languages, "python" the standard library and the embedded model's questions. `chat`: whether a
    line's prompt and completion are told as a conversation. `spill`: what layers make of the text lies in files beside
    OUT, not in memory."""

    files: Names = ()
    text: Literal["general", "python"] = "general"
    samples: Count = 256
    length: Annotated[int, Meta(ge=8)] = 512
    seed: int = 0
    chat: bool = False
    spill: bool = False


class Output(Struct, frozen=True, kw_only=True):
    """`layout`: how the folder says what its numbers are; auto = what the last stage's method usually has."""

    layout: Literal["auto", "dense", "compressed-tensors", "gptq", "gptq_v2", "awq", "bitsandbytes"] = "auto"


class Recipe(Struct, frozen=True, kw_only=True):
    """A recipe that was checked."""

    stages: tuple[Stage, ...]
    source: Source = Source()
    calibration: Calibration = Calibration()
    output: Output = Output()

    @property
    def digest(self) -> str:
        """Of what it says, defaults included: the same for two spellings of one recipe."""
        # Fields of a stage are those of its own struct, which the encoder looks up by the value's type.
        return hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=16).hexdigest()


TABLES: dict[str, type[Struct]] = {"source": Source, "calibration": Calibration, "output": Output}

WITHOUT_ACT_ORDER = ("compressed-tensors", "awq", "bitsandbytes")
"""Layouts without a place for a group of columns that do not lie together, or whose readers refuse it."""


def read_recipe(path: Path) -> Recipe:
    """The recipe in the file. `ConfigError` for a file that cannot be read, and for each of its mistakes."""
    try:
        given = tomllib.loads(read_bounded(path, MAX_BYTES).decode())
    except OSError as error:
        raise ConfigError(f"--recipe {path}: {error.strerror}", param="recipe") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--recipe {path}: not TOML: {error}", param="recipe") from None
    return recipe_of(given, str(path))


def recipe_of(given: Mapping[str, Any], origin: str) -> Recipe:
    """The recipe that the tables of `given` are; `origin` begins what is said of mistakes."""
    _known(given, (*TABLES, "stage"), origin, "table")
    stages = given.get("stage", [])
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise ConfigError(f"{origin}: stage: a list of tables is needed, each below a line [[stage]]", param="recipe")
    if not stages:
        raise ConfigError(f"{origin}: there is no stage; write one below a line [[stage]]", param="recipe")
    parts: dict[str, Any] = {}
    for name, struct in TABLES.items():
        table = given.get(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{origin}: {name}: a table [{name}] is needed, not {table!r}", param="recipe")
        parts[name] = _struct(struct, table, f"{origin}: [{name}]")
    recipe = Recipe(stages=tuple(_stage(s, f"{origin}: stage {n}") for n, s in enumerate(stages, 1)), **parts)
    _check_order(recipe, origin)
    return recipe


def stage_from_flags(kind: str, method: str, options: Mapping[str, str]) -> Stage:
    """A stage from words of the command line: `options` maps names to text, lists are divided by commas."""
    struct = _method({"kind": kind, "method": method}, "")
    hints = get_type_hints(struct, include_extras=True)
    _known(options, _own(struct), f"{kind} {method}", "option")
    given: dict[str, Any] = {}
    for name, text in options.items():
        listed = get_origin(hints[name]) is tuple
        value: Any = [word for word in text.split(",") if word] if listed else text
        for plain in (int, float, bool):
            if not listed and _takes(hints[name], plain):
                try:
                    value = msgspec.convert(text, plain, strict=False)
                    break
                except msgspec.ValidationError:
                    continue
        if listed and get_origin(get_args(hints[name])[0]) is Literal:
            value = [int(word) if word.strip().isdigit() else word for word in value]
        given[name] = value
    made: Stage = _struct(struct, given | {"kind": kind, "method": method}, f"{kind} {method}")
    return made


def _takes(hint: Any, plain: type) -> bool:
    """Whether values of a field are of the type `plain`."""
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return hint is plain or (get_origin(hint) is Literal and all(type(v) is plain for v in get_args(hint)))


def _stage(given: Mapping[str, Any], place: str) -> Stage:
    struct = _method(given, f"{place}: ")
    made: Stage = _struct(struct, given, f"{place} ({given['kind']} {given['method']})")
    return made


def _method(given: Mapping[str, Any], place: str) -> type[Stage]:
    """The struct of a stage, which its kind and method name."""
    methods = METHODS[_one_of(METHODS, given, "kind", f"{place}kind")]
    of = f" of {given['kind']}" if "method" in given else ""
    return methods[_one_of(methods, given, "method", f"{place}method{of}")]


def _one_of(known: Mapping[str, Any], given: Mapping[str, Any], key: str, place: str) -> str:
    if key not in given:
        raise ConfigError(f"{place} is missing; it is one of {', '.join(known)}", param="recipe")
    name = given[key]
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{place}: {name!r} is not one of {', '.join(known)}", param="recipe")
    return name


def _struct(struct: type[Any], given: Mapping[str, Any], place: str) -> Any:
    """A `struct` of the values of a table."""
    fields = {f.name: f for f in msgspec.structs.fields(struct)}
    hints = get_type_hints(struct, include_extras=True)
    _known(given, [n for n in fields if n not in ("kind", "method")], place, "key", ("kind", "method"))
    for name, field in fields.items():
        if name not in given and field.required:
            raise ConfigError(f"{place}: {name} is missing", param="recipe")
    made = {name: _value(value, hints[name], f"{place}: {name}") for name, value in given.items()}
    try:
        return struct(**made)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}", param="recipe") from None


def _value(value: Any, hint: Any, place: str) -> Any:
    inner = next((a for a in get_args(hint) if isinstance(a, type) and issubclass(a, Struct)), None)
    if inner is not None and get_origin(hint) in (Union, UnionType) and isinstance(value, dict):
        return _struct(inner, value, place)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{place}: {value} is not a number that can be used", param="recipe")
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        reason = str(error).split(" - at ")[0].replace("`", "")
        choices = _choices(hint)
        known = f"one of {', '.join(map(repr, choices))} is needed" if choices else reason
        raise ConfigError(f"{place}: {value!r}: {known}", param="recipe") from None


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values that a field may have, or its list's items; () of one with other limits."""
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    return get_args(hint) if get_origin(hint) is Literal else ()


def _own(struct: type[Stage]) -> list[str]:
    return [f.name for f in msgspec.structs.fields(struct) if f.name not in ("kind", "method")]


def _known(given: Iterable[str], known: Iterable[str], place: str, what: str, also: Iterable[str] = ()) -> None:
    """Refuse a name that is not `known`, with those that are."""
    names = list(known)
    for name in given:
        if name in names or name in also:
            continue
        near = difflib.get_close_matches(name, names, 1)
        hint = f"is it {near[0]}?" if near else f"known: {', '.join(names)}"
        raise ConfigError(f"{place}: {name}: there is no such {what}; {hint}", param="recipe")


def _check_order(recipe: Recipe, origin: str) -> None:
    """A merge needs an adapter that is there by then, nothing goes on with a GGUF file, and the last stage's groups are
    such as the layout holds."""
    made = False
    for number, stage in enumerate(recipe.stages, 1):
        if isinstance(stage, Gguf) and number < len(recipe.stages):
            raise ConfigError(f"{origin}: stage {number} ({stage.kind} gguf): no stage can follow it", param="recipe")
        if isinstance(stage, Merge) and not stage.adapter and not made:
            raise ConfigError(
                f"{origin}: stage {number} (merge {stage.method}): no stage before it trains an adapter; name a folder "
                "with adapter",
                param="recipe",
            )
        made = made or isinstance(stage, Lora)
    last, layout = recipe.stages[-1], recipe.output.layout
    if isinstance(last, Gptq) and layout in WITHOUT_ACT_ORDER and last.ordered:
        raise ConfigError(
            f"{origin}: stage {len(recipe.stages)} (quantize gptq): layout {layout} holds no groups in the order of "
            "activations, which no current reader takes; set static_groups = true, or write layout gptq",
            param="recipe",
        )
