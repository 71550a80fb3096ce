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

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from quire.compress.recipes.gguf_formats import gguf_format
from quire.compress.recipes.stages import METHODS, Count, Gguf, Gptq, Lora, Merge, Names, Stage
from quire.core.errors import ConfigError
from quire.core.options.fields import fields_of
from quire.core.options.values import Place, check_names, flag_file, from_text, read_table, read_toml, with_underscores

T = TypeVar("T", bound=Struct)
OF_TABLE = ("kind", "method")
"""Keys of a stage that say which options it has."""


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
        """Digest of what the recipe says, defaults included: the same for two spellings of one recipe."""
        # Fields of a stage are those of its own struct, which the encoder looks up by the value's type.
        return hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=16).hexdigest()


TABLES: dict[str, type[Struct]] = {"source": Source, "calibration": Calibration, "output": Output}

WITHOUT_ACT_ORDER = ("compressed-tensors", "awq", "bitsandbytes")
"""Layouts without a place for a group of columns that do not lie together, or whose readers refuse it."""


def read_recipe(path: Path) -> Recipe:
    """The recipe in the file. `ConfigError` for a file that cannot be read, and for each of its mistakes."""
    return recipe_of(read_toml(path, flag_file("recipe", path)), str(path))


def recipe_of(given: Mapping[str, Any], origin: str) -> Recipe:
    """The recipe that the tables of `given` are; `origin` begins what is said of mistakes."""
    place = Place(origin, "recipe")
    check_names(given, (*TABLES, "stage"), place, "table")
    stages = given.get("stage", [])
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise place.error(": stage: a list of tables is needed, each below a line [[stage]]")
    if not stages:
        raise place.error(": there is no stage; write one below a line [[stage]]")
    parts: dict[str, Any] = {}
    for name, struct in TABLES.items():
        table = given.get(name, {})
        if not isinstance(table, dict):
            raise place.error(f": {name}: a table [{name}] is needed, not {table!r}")
        parts[name] = _table(struct, table, place.key(f"[{name}]"))
    recipe = Recipe(stages=tuple(_stage(s, place.key(f"stage {n}")) for n, s in enumerate(stages, 1)), **parts)
    _check_order(recipe, origin)
    return recipe


def stage_from_flags(kind: str, method: str, options: Mapping[str, str]) -> Stage:
    """A stage from words of the command line: `options` maps names to text, lists are divided by commas."""
    struct = _method({"kind": kind, "method": method}, "")
    place = Place(f"{kind} {method}", "recipe")
    fields = {field.name: field for field in fields_of(struct) if field.name not in OF_TABLE}
    check_names(options, fields, place, "option")
    given = {name: from_text(fields[name], text, ",") for name, text in with_underscores(options, place).items()}
    made: Stage = _table(struct, given | {"kind": kind, "method": method}, place)
    return made


def _stage(given: Mapping[str, Any], place: Place) -> Stage:
    struct = _method(given, f"{place.words}: ")
    made: Stage = _table(struct, given, Place(f"{place.words} ({given['kind']} {given['method']})", place.param))
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


def _table(struct: type[T], given: Mapping[str, Any], place: Place) -> T:
    """A `struct` of the values of a table, all of which are finite."""
    if struct is Gguf and isinstance(name := given.get("format"), str):
        given = {**given, "format": gguf_format(name) or name}
    made = read_table(struct, given, place, OF_TABLE)
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise place.key(name).error(f" {value} is not a number that can be used")
    return made


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
