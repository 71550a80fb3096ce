"""Ranges of numbers: a field declares its own, one check reads it, and JSON schemas and pages show it.

msgspec enforces the range of an option (`about`), as options are read one at a time. It only shows that of a request's
field (`within`): a body may hold a value that its route gives another meaning, as `max_tokens` 0 beside `echo`, and a
value that is out of range gets the same words whether it came in any API's body or from Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

from quire.core.errors import BadRequest


class Range(NamedTuple):
    """The numbers between `low` and `high`, which are in it unless it is open there.

    `words`: what an error says that a number must do.
    """

    low: float
    high: float
    open_low: bool
    open_high: bool
    words: str

    @classmethod
    def of(cls, said: Meta, note: str = "", words: str = "") -> Range | None:
        """The range that limits (`ge`, `gt`, `le`, `lt`) make, None without any; `note` and `words`: see `within`."""
        if said.ge is said.gt is said.le is said.lt is None:
            return None
        low = next((limit for limit in (said.ge, said.gt) if limit is not None), -math.inf)
        high = next((limit for limit in (said.le, said.lt) if limit is not None), math.inf)
        words = words or range_words(low, high, said.gt is not None, said.lt is not None)
        return cls(low, high, said.gt is not None, said.lt is not None, f"{words}; {note}" if note else words)

    def holds(self, value: float) -> bool:
        """Whether a number is in the range; no range holds NaN."""
        above = self.low < value if self.open_low else self.low <= value
        return above and (value < self.high if self.open_high else value <= self.high)


def range_words(low: float, high: float, open_low: bool, open_high: bool) -> str:
    """What a number must do to be in a range; `low` and `high` are infinite where it has no end."""
    if math.isfinite(low) and math.isfinite(high):
        return f"must lie in {'(' if open_low else '['}{low:.10g}, {high:.10g}{')' if open_high else ']'}"
    if low == 0 and not open_low:
        return "must not be negative"
    if math.isfinite(high):
        return f"must be {'less than' if open_high else 'at most'} {high:.10g}"
    if open_low:
        return f"must be more than {low:.10g}"
    return f"must be at least {low:.10g}"


def within(
    *, ge: float | None = None, gt: float | None = None, le: float | None = None, note: str = "", words: str = ""
) -> Meta:
    """The range of a request's field: at least `ge` or more than `gt`, and at most `le`.

    `note`: what an error says behind the range. `words`: what it says in place of the range.
    """
    limits: dict[str, Any] = {"ge": ge, "gt": gt, "le": le}
    schema = {"minimum": ge, "exclusiveMinimum": gt, "maximum": le}
    return Meta(
        extra={"range": Range.of(Meta(**limits), note, words)},
        extra_json_schema={name: limit for name, limit in schema.items() if limit is not None},
    )


@cache
def ranges_of(kind: type) -> Mapping[str, Range]:
    """The ranges that the fields of a class declare by `within`, by name; found once, as it takes milliseconds."""
    found = {name: _declared(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    return {name: each for name, each in found.items() if each is not None}


def _declared(hint: Any) -> Range | None:
    """The range in a type, which may be one of several that a field may have."""
    if get_origin(hint) is Annotated:
        plain, *said = get_args(hint)
        own = (each.extra["range"] for each in said if isinstance(each, Meta) and each.extra and "range" in each.extra)
        return next(own, None) or _declared(plain)
    if get_origin(hint) in (Union, UnionType):
        return next(filter(None, map(_declared, get_args(hint))), None)
    return None


def check_ranges(params: Any, names: Iterable[str] | None = None) -> None:
    """`BadRequest` naming the first field of `params` that is out of its range; None is in every range.

    `names`: the fields to check, instead of all.
    """
    ranges = ranges_of(params.__class__)
    for name, limits in ranges.items() if names is None else ((name, ranges[name]) for name in names):
        value = getattr(params, name)
        if value is None or limits.low < value < limits.high:
            continue  # most values are inside, and the call below takes longer
        if not limits.holds(value):
            finite = isinstance(value, int) or math.isfinite(value)
            raise BadRequest(f"{name}: {limits.words if finite else 'must be a finite number'}", param=name)
