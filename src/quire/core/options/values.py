"""Values of options: read from text, pairs in one text or TOML files, and checked by type, choices and range.

An error names the option and the value as they were given, and what the option takes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from quire.core.errors import ConfigError, ModelError
from quire.core.files import read_bounded
from quire.core.options.fields import OptionField, Struct, fields_of, flag, unwrapped
from quire.core.options.ranges import Range

T = TypeVar("T", bound=msgspec.Struct)
MAX_BYTES = 1 << 20
"""The largest file of options."""
MANY = 40
"""Names from which on an error lists none of them."""
KINDS: dict[Any, str] = {
    int: "an integer", float: "a number", bool: "true or false", str: "text", list: "a list", tuple: "a list",
    dict: "a table",
}  # fmt: skip


class Place(NamedTuple):
    """Where a value stands, as messages name it: `--port`, or `recipe.toml: stage 1: bits`.

    `param` is the option that the error is of.
    """

    words: str
    param: str | None = None

    def key(self, name: str) -> Place:
        """A key of the table that stands here."""
        return Place(f"{self.words}: {name}", self.param)

    def error(self, text: str) -> ConfigError:
        """An error that begins with the place."""
        return ConfigError(f"{self.words}{text}", param=self.param)


def flag_place(name: str) -> Place:
    """The place of an option of the command line, or of a call that takes the same options."""
    return Place(flag(name), name)


def read_options(struct: type[T], given: Mapping[str, Any], place: Callable[[str], Place] = flag_place) -> T:
    """A `struct` of the options that `given` has of it; others are passed over.

    `place` says where an option stands. `ConfigError` for a value of another type, out of range, or no choice.
    """
    own = {name: given[name] for name in struct.__struct_fields__ if name in given}
    try:
        made = msgspec.convert(own, struct)
    except msgspec.ValidationError as error:
        for field in fields_of(struct):
            if field.name in own:
                read_value(field.type, own[field.name], place(field.name))
        raise ConfigError(f"{struct.__name__}: {error}") from None
    check_choices(made, place)
    return made


def check_values(options: msgspec.Struct) -> None:
    """`ConfigError` for an option of a struct that is out of range, or no choice."""
    for field in fields_of(type(options)):
        value = getattr(options, field.name)
        _, said = unwrapped(field.type)
        if isinstance(value, int | float) and (limits := Range.of(said)) and not limits.holds(value):
            raise flag_place(field.name).error(f" {value!r} {limits.words}")
    check_choices(options)


def check_choices(options: msgspec.Struct, place: Callable[[str], Place] = flag_place) -> None:
    """`ConfigError` for an option of a struct that has a value which is no choice; its default is one."""
    for field in fields_of(type(options)):
        value = getattr(options, field.name)
        if field.open or value == field.default or not field.choices or str(value) in field.choices:
            continue
        raise _no_choice(field, value, place(field.name))


def _no_choice(field: OptionField, value: object, place: Place) -> ConfigError:
    if str(value) in field.refused:
        return place.error(f" {value}: {field.refused[str(value)]}")
    return place.error(f" {value!r} is not one of {', '.join(field.choices)}")


def read_table(struct: type[T], given: Mapping[str, Any], place: Place, also: Iterable[str] = ()) -> T:
    """A `struct` of the keys of a TOML table. `also`: fields that a message does not offer.

    `ConfigError` for a key that is none of its fields, one that is missing, and each wrong value.
    """
    fields = fields_of(struct)
    check_names(given, [f.name for f in fields if f.name not in also], place, "key", also)
    given = with_underscores(given, place)
    for field in fields:
        if field.required and field.name not in given:
            raise place.error(f": {field.name} is missing")
    made = {f.name: read_value(f.type, given[f.name], place.key(f.name)) for f in fields if f.name in given}
    try:
        return struct(**made)
    except ValueError as error:
        raise place.error(f": {error}") from None


def with_underscores(given: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The keys of a table spelled with underscores; `ConfigError` for one that is there in both spellings."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in found:
            raise place.error(f": {key}: given twice")
        found[name] = value
    return found


def read_value(kind: Any, value: Any, place: Place) -> Any:
    """`value`, as TOML or JSON has it, as a `kind`: a type with its limits. `ConfigError` for another one."""
    plain, said = unwrapped(kind)
    if (struct := _struct_of(plain)) is not None and isinstance(value, dict):
        return read_table(struct, value, place)
    if get_origin(plain) is tuple and get_args(plain)[-1] is ... and isinstance(value, list | tuple):
        inner = get_args(plain)[0]
        tables = _struct_of(inner) is not None
        return tuple(
            read_value(inner, each, Place(f"{place.words} {number}", place.param) if tables else place)
            for number, each in enumerate(value, 1)
        )
    if isinstance(value, float) and math.isnan(value):
        raise place.error(f" {value!r} is not a number that can be used")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise _refused(place, value, plain, said) from None


def _struct_of(plain: Any) -> Struct | None:
    """The struct that a table is read into; None for a type of plain values."""
    parts = get_args(plain) if get_origin(plain) in (Union, UnionType) else (plain,)
    return next((part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)), None)


def _refused(place: Place, value: object, plain: Any, said: Meta) -> ConfigError:
    """Why a value is not of a type, or not within its limits."""
    if get_origin(plain) is Literal:
        choices = (str(choice) or repr(choice) for choice in get_args(plain))
        return place.error(f" {value!r} is not one of {', '.join(choices)}")
    if limits := Range.of(said):
        with contextlib.suppress(msgspec.ValidationError):
            return place.error(f" {msgspec.convert(value, plain)!r} {limits.words}")
    return place.error(f" {value!r} must be {_kind(plain)}")


def _kind(plain: Any) -> str:
    """A type in words."""
    parts = [part for part in get_args(plain) if part is not type(None)]
    if get_origin(plain) in (Union, UnionType):
        return " or ".join(map(_kind, parts))
    found = get_origin(plain) or plain
    if _struct_of(found) is not None:
        return "a table"
    return KINDS.get(found, f"a {getattr(found, '__name__', found)}")


def from_text(field: OptionField, text: str, separator: str | None = None) -> Any:
    """The value that `text` is for an option; text that is none stays text, which the option's check refuses.

    `separator` divides the values of an option that takes several; without one the text is a single value of it.
    """
    if field.several:
        inner = unwrapped(get_args(field.plain)[0])[0]
        words = [text] if separator is None else [word for word in text.split(separator) if word]
        return tuple(_from_text(inner, word) for word in words)
    return _from_text(field.plain, text)


def _from_text(plain: Any, text: str) -> Any:
    if get_origin(plain) is Literal:
        return next((value for value in get_args(plain) if str(value) == text.strip()), text)
    try:
        return msgspec.convert(text, plain, strict=False)
    except msgspec.ValidationError:
        return text


def check_names(given: Iterable[str], known: Iterable[str], place: Place, noun: str, also: Iterable[str] = ()) -> None:
    """`ConfigError` for a name that is not `known`, with the one that was meant or with all; `also` are fine too.

    Dashes and underscores are the same.
    """
    names = list(known)
    spelled = {name.replace("-", "_") for name in (*names, *also)}
    for name in given:
        if name.replace("-", "_") not in spelled:
            raise place.error(f": {name}: there is no such {noun}{did_you_mean(name, names)}")


def did_you_mean(name: str, known: Iterable[str], most: int = MANY) -> str:
    """The end of an error of an unknown name: the known one that is spelled nearly so, or all, or where they are.

    `most`: as many are listed.
    """
    names = list(known)
    if found := near_names(name, names, 1):
        return f"; is it {found[0].replace('_', '-') if '-' in name else found[0]}?"
    return f"; known are {', '.join(names)}" if len(names) <= most else "; quire serve --help lists them"


def near_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Names that are spelled nearly as `name`, the nearest first; dashes and underscores are the same."""
    import difflib  # a quarter of a command's start, and no command needs it that succeeds

    names = {each.replace("-", "_"): each for each in known}
    return [names[each] for each in difflib.get_close_matches(name.replace("-", "_"), names, most)]


def number_pairs(option: str, text: str, names: Sequence[str]) -> dict[str, str]:
    """The number, as it was written, of each name in a text such as `rate=2,input=512`.

    `ConfigError` for what is no pair of a name and a number.
    """
    place, found = flag_place(option), dict[str, str]()
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or name not in names or name in found:
            known = ", ".join(f"{each}=NUMBER" for each in names)
            raise place.error(f" {text!r}: {word!r} is not one of {known}, each once")
        try:
            float(value)
        except ValueError:
            raise place.error(f" {text!r}: {value!r} is no number") from None
        found[name] = value
    return found


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
