"""Every family in every format: what the table of docs/models/pairs.md says is what happens."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gguf")

from family_formats import PAGE, head, lines_of_rows, outcomes, row
from often import one_of
from oracle import BACKENDS
from quire.model.families.table import FAMILIES


@pytest.mark.sampled(12)
@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
@pytest.mark.parametrize("family", one_of(5, sorted(FAMILIES)))
def test_the_table_says_what_happens(family: str, tmp_path: Path) -> None:
    line = row(family, dict(outcomes(family, tmp_path)))
    assert head() + "|" in PAGE.read_text() and line in PAGE.read_text(), f"run `make table`; now: {line}"


def test_every_family_has_a_row_of_few_lines() -> None:
    lines = lines_of_rows()
    assert set(lines) == set(FAMILIES)
    assert max(lines.values()) <= 15
