"""Ways to be parallel beside features: what README.md's table says is what happens."""

from __future__ import annotations

from typing import Any

import pytest

from oracle import BACKENDS
from parallel_pairs import FEATURES, README, WAYS, Folders, right, told

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
OFTEN = ("plain", "windows", "ngram")
"""Features that every run tries beside every way; the slow one tries all."""


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("feature", [pytest.param(f, marks=[] if f in OFTEN else [pytest.mark.slow]) for f in FEATURES])
def test_the_table_says_what_happens(feature: str, way: str, folders: Folders, golden: dict[str, Any]) -> None:
    said = told(README.read_text())[feature, way]
    assert right(feature, WAYS[way], folders, golden) == said, "run `make pairs`"
