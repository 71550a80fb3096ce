"""Families without their rows, so that models of them run by the code of transformers."""

from __future__ import annotations

import pytest

from quire.model.families.table import FAMILIES


def hide_rows(monkeypatch: pytest.MonkeyPatch, *families: str) -> None:
    """Take the rows of `families`, where there are any, out of the table for the rest of the test."""
    for family in families:
        monkeypatch.delitem(FAMILIES, family, raising=False)
