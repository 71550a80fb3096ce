"""What is known of a statistic beside its value: how it adds over engines, and the metric that Prometheus shows of it.

Both are annotations of its field in `quire.engine.stats`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain, zip_longest
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

from msgspec import Struct

S = TypeVar("S", bound=Struct)
A = TypeVar("A", "Adding", "PrometheusMetric")
Add = Callable[[Sequence[Any], str], Any]
"""One value of the field of that name of several structs."""


class Adding(NamedTuple):
    """`replicas`: over engines side by side; `lives`: over one engine after the other, the latest last.

    `stays`: an engine that is gone leaves its value to the next one, though only the latest counts.
    """

    replicas: Add
    lives: Add
    stays: bool = False


class PrometheusMetric(NamedTuple):
    """A family of Prometheus, with `help` in the words of /metrics; a counter's `name` is without its `_total`.

    `label`: name of the label that tells the places of a tuple apart. `value`: what is shown of the struct, where that
    is not the field alone. `needs`: the field beside it, or of `EngineInfo`, without which it is not shown.
    """

    kind: Literal["gauge", "counter"]
    name: str
    help: str
    label: str = ""
    value: Callable[[Any], float] | None = None
    needs: str = ""


gauge, counter = partial(PrometheusMetric, "gauge"), partial(PrometheusMetric, "counter")
"""A figure that rises and falls, and a running total."""


def summed(parts: Sequence[Any], name: str) -> Any:
    """Sum of counts."""
    return sum([getattr(part, name) for part in parts])


def latest(parts: Sequence[Any], name: str) -> Any:
    """What is now: of a gauge, which an engine that is gone no longer has."""
    return getattr(parts[-1], name)


def largest(parts: Sequence[Any], name: str) -> Any:
    """What all wait for, or have together."""
    return max([getattr(part, name) for part in parts])


def mean(parts: Sequence[Any], name: str) -> float:
    """Mean of shares."""
    return float(summed(parts, name) / len(parts))


def by_place(parts: Sequence[Any], name: str) -> tuple[int, ...]:
    """Sums of counts by place, of which some have more places than others."""
    return tuple(map(sum, zip_longest(*[getattr(part, name) for part in parts], fillvalue=0)))


def joined(parts: Sequence[Any], name: str) -> tuple[Any, ...]:
    """List of figures by rank: the ranks of the first replica, then those of the next."""
    return tuple(chain(*[getattr(part, name) for part in parts]))


def united(parts: Sequence[Any], name: str) -> tuple[str, ...]:
    """Union of sets of names."""
    return tuple(sorted({*joined(parts, name)}))


GAUGE, COUNTER = Adding(summed, latest), Adding(summed, summed)


@cache
def annotated(kind: type[Struct], what: type[A]) -> dict[str, A]:
    """Fields of a struct -> their annotation of the type `what`, of those that have one."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: note for name, hint in hints.items() for note in get_args(hint) if isinstance(note, what)}


def over_replicas(parts: Sequence[S]) -> S:
    """The statistics of engines side by side."""
    kind = type(parts[0])
    return kind(**{name: adding.replicas(parts, name) for name, adding in annotated(kind, Adding).items()})


def over_lives(parts: Sequence[S]) -> S:
    """The statistics of an engine, the last one, and of those before it, as `ended` left them."""
    kind = type(parts[0])
    return kind(**{name: adding.lives(parts, name) for name, adding in annotated(kind, Adding).items()})


def ended(part: S) -> S:
    """What is left of an engine that is gone: totals, and no gauges."""
    rules = annotated(type(part), Adding).items()
    return type(part)(
        **{name: getattr(part, name) for name, adding in rules if adding.stays or adding.lives is not latest}
    )
