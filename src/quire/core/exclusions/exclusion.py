"""A row of the table: two features that exclude each other, why, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.core.errors import ConfigError
from quire.core.exclusions.features import OPTIONS, Feature

DIFFERS = "…"
"""In a message, where no word is known."""


class _Words(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return DIFFERS


@dataclass(frozen=True)
class Known:
    """What is known of a model, a device or a command beyond the options, and the words that messages need of it."""

    features: frozenset[Feature] = frozenset()
    words: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Known) -> Known:
        """Join two sets of known features."""
        return Known(self.features | other.features, {**self.words, **other.words})


NOTHING = Known()


@dataclass(frozen=True)
class Exclusion:
    """`a` is refused beside `b`, for `reason`; `instead`: what to do.

    Both may name {a} and {b} as they are typed, {value} of b, and words of `Known`. `option`: the one that an error
    names as its parameter, where it is not a's.
    """

    a: Feature
    b: Feature
    reason: str
    instead: str
    option: str = ""

    @property
    def param(self) -> str | None:
        """The option that an error names, if any."""
        return self.option or self.a.option or None

    @property
    def known_from(self) -> str:
        """What says that both are there, beyond the options."""
        return self.b.known_from if self.a.known_from == OPTIONS else self.a.known_from

    def told(self, words: Mapping[str, str]) -> tuple[str, str]:
        """Why, and what to do instead, with `words` in their places."""
        known = _Words({"a": self.a.flag, "b": self.b.flag, "value": self.b.value, **words})
        return self.reason.format_map(known), self.instead.format_map(known)

    def message(self, words: Mapping[str, str], subject: str = "") -> str:
        """What is said; `subject`: in front of it instead of the flag of `a`, such as a folder."""
        return f"{subject or self.a.flag}: {'; '.join(self.told(words))}"

    def refusal(self, words: Mapping[str, str], subject: str = "") -> ConfigError:
        """The error."""
        return ConfigError(self.message(words, subject), param=self.param)


def each(a: Feature, others: tuple[Feature, ...], reason: str, instead: str, option: str = "") -> tuple[Exclusion, ...]:
    """A row of `a` beside each of `others`."""
    return tuple(Exclusion(a, b, reason, instead, option) for b in others)
