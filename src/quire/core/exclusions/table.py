"""The whole table, and who asks it: what options exclude is said before anything is read, the rest once it is known."""

from __future__ import annotations

from quire.core.exclusions import of_models, of_options
from quire.core.exclusions.exclusion import Exclusion, Known
from quire.core.exclusions.features import Feature

TABLE: tuple[Exclusion, ...] = (*of_options.ROWS, *of_options.AT_THE_DEVICE, *of_models.ROWS)


def row_of(a: Feature, b: Feature) -> Exclusion:
    """The row of `a` beside `b`, for whoever finds out by itself that both are there."""
    return next(row for row in TABLE if (row.a, row.b) == (a, b))


def check_options(asked: frozenset[Feature]) -> None:
    """`ConfigError` for the first two of the options' features that exclude each other."""
    for row in of_options.ROWS:
        if row.a in asked and row.b in asked:
            raise row.refusal({})


def check_known(asked: frozenset[Feature], known: Known) -> None:
    """`ConfigError` for the first of the options' features that something of `known` excludes."""
    there = asked | known.features
    for row in of_models.ROWS:
        if row.a in there and row.b in there and (row.a in known.features or row.b in known.features):
            raise row.refusal(known.words)
