"""Tables of which every run tries a part, evenly spread; the slow run tries all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_of(every: int, cases: Iterable[Any]) -> list[Any]:
    """`cases` for `parametrize`: the first of each `every` is tried by every run, the others by the slow one."""
    return [only_slow(case) if i % every else case for i, case in enumerate(cases)]


def only_slow(case: Any) -> Any:
    """A case, or several arguments of one, that the slow run alone tries."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
