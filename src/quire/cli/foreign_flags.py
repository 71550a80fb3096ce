"""Command lines as users of other tools type them, in the flags of ours (`core/options/aliases.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.core.errors import ConfigError
from quire.core.options.fields import flag

if TYPE_CHECKING:
    from quire.core.options.aliases import Alias

NAMED = re.compile(r"(?<![\w-])--?[a-z][a-z-]*[a-z]")
"""Flags in a sentence."""


class Known(NamedTuple):
    """The flags of a command: every spelling, with whether it takes a value, and the spelling of each name.

    `own`: flags of other tools that mean something in this command alone.
    """

    takes_value: Mapping[str, bool]
    by_name: Mapping[str, str]
    own: Mapping[str, Alias] = {}


def in_our_flags(words: Sequence[str], known: Known) -> list[str]:
    """The words of a command line with flags of llama.cpp and vLLM as ours.

    A word that is a flag of the command stays, as does the value behind it, and all behind `--`. `ConfigError` for a
    flag that has none like it here, with the reason.
    """
    made: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*made, word, *left]
        name, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-" or name in known.takes_value:
            made.append(word)
            if not equals and known.takes_value.get(name) and left:
                made.append(left.pop(0))
                made += _further(name, left, known, words)
            continue
        made += _translated(name, value if equals else None, left, known, words)
    return made


def _further(name: str, left: list[str], known: Known, words: Sequence[str]) -> list[str]:
    """Values behind the first of a flag that vLLM lets have several, each with the flag; taken from those `left`.

    A word that may be the model is no further name, unless a flag gives the model.
    """
    if known.by_name.get("lora_modules") == name:
        more = _taken(left, lambda word: "=" in word or word.startswith("{"))
    elif known.by_name.get("served_model_name") == name and "port" in known.by_name and _has_model(words):
        more = _taken(left, lambda word: True)
    else:
        more = []
    return [part for word in more for part in (name, word)]


def _taken(left: list[str], fits: Callable[[str], bool]) -> list[str]:
    found = []
    while left and not left[0].startswith("-") and fits(left[0]):
        found.append(left.pop(0))
    return found


def _has_model(words: Sequence[str]) -> bool:
    """Whether the command line gives the model by its flag, or as its first word."""
    return not words[0].startswith("-") or any(word.partition("=")[0] in ("-m", "--model") for word in words)


def _translated(name: str, value: str | None, left: list[str], known: Known, words: Sequence[str]) -> list[str]:
    """What a flag that the command has not is here; takes its value from those `left`."""
    from quire.core.options.aliases import alias_of, value_here

    dashed = f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name
    if dashed in known.takes_value:
        return [dashed if value is None else f"{dashed}={value}"]
    mine = known.own.get(dashed)
    alias = mine or alias_of(name)
    ours = known.by_name.get(alias.ours) if alias is not None else None
    if alias is not None and alias.ours and ours is None and "block_size" in known.by_name:
        here = flag(alias.ours)
        raise ConfigError(f"{name}: is {here} here, a flag of other commands or a field of requests to a server")
    if alias is None or (mine is None and "block_size" not in known.by_name):
        return [name if value is None else f"{name}={value}"]
    if value is None and not alias.flag and left and not _is_flag(left[0]):
        value = left.pop(0)
    if not {word.partition("=")[0] for word in words}.isdisjoint(alias.beside):
        return []
    found = value_here(_told_here(alias, known), name, value)
    if found is None or ours is None:
        return []
    return [ours] if alias.flag else [ours, found] if value is not None else [ours]


def _told_here(alias: Alias, known: Known) -> Alias:
    """The row, whose reason says of flags that this command has not whose they are."""
    named = NAMED.findall(alias.reason)
    if not named or any(each in known.takes_value for each in named):
        return alias
    return alias._replace(reason=f"this command has none like it; of quire serve: {alias.reason}")


def _is_flag(word: str) -> bool:
    """Whether the word behind a flag is no value of it, which a number below zero is."""
    number = word.lstrip("-").replace(".", "", 1).isdecimal()
    return word.startswith("-") and not number
