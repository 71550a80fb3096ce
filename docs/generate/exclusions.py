"""Which features exclude each other, from the table that starts ask."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from quire.core.exclusions.exclusion import DIFFERS, Exclusion
from quire.core.exclusions.features import Feature
from quire.core.exclusions.table import TABLE
from words import escaped, table

HEAD = ("not beside", "why", "what to do", "known from")


def every_exclusion() -> str:
    """A section for each feature that is refused, with what it is refused beside."""
    by_feature: dict[Feature, list[Exclusion]] = {}
    for row in TABLE:
        by_feature.setdefault(row.a, []).append(row)
    return "\n".join(section(feature, rows) for feature, rows in by_feature.items())


def section(feature: Feature, rows: list[Exclusion]) -> str:
    """A heading and a table."""
    typed = f" (`{feature.flag}`)" if feature.option else ""
    return f"### {feature.name[0].upper()}{feature.name[1:]}{typed}\n\n{table(HEAD, lines(rows))}"


def lines(rows: list[Exclusion]) -> Iterator[tuple[str, ...]]:
    """Rows that follow each other and say the same are one."""
    for _, same in groupby(rows, lambda row: (row.reason, row.instead, row.known_from)):
        first, *others = same
        words = {"b": DIFFERS, "value": DIFFERS} if others else {}
        reason, instead = first.told(words)
        yield ", ".join(called(row.b) for row in (first, *others)), escaped(reason), escaped(instead), first.known_from


def called(feature: Feature) -> str:
    """A feature in a cell."""
    return f"{feature.name} (`{feature.flag}`)" if feature.option else feature.name
