"""Ways to be parallel beside features: what the table of docs says is what happens."""

from __future__ import annotations

from typing import Any

import pytest

from oracle import BACKENDS
from parallel_pairs import FEATURES, PAGE, SIZES, WAYS, Folders, excluded, of_the_table, right, told

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
OFTEN = (
    ("windows", "stages 2"),
    ("experts beside an MLP", "tensor 2, sequence"),
    ("states alone", "stages 2"),
    ("per-layer embeddings", "tensor 2, stages 2"),
)
"""What every run tries; the slow one tries all."""
PAIRS = [
    pytest.param(feature, way, marks=[] if (feature, way) in OFTEN else [pytest.mark.slow])
    for feature in FEATURES
    for way in WAYS
]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


def test_the_table_has_all_pairs() -> None:
    assert set(told(PAGE.read_text())) == {(feature, way) for feature in FEATURES for way in WAYS}, "run `make pairs`"


@pytest.mark.parametrize("feature", FEATURES)
def test_every_refusal_is_the_tables_or_one_of_sizes(feature: str, folders: Folders) -> None:
    """Asked without an engine: what the page says is refused, and nothing else, is so by the table of exclusions."""
    cells = told(PAGE.read_text())
    for way, options in WAYS.items():
        said, asked = cells[feature, way], excluded(feature, options, folders).replace(f"{folders.root}/", "")
        if asked:
            assert said == asked, way
        else:
            assert said == "yes" or SIZES.search(said) or of_the_table(said), way


@pytest.mark.parametrize(("feature", "way"), PAIRS)
def test_the_table_says_what_happens(feature: str, way: str, folders: Folders, golden: dict[str, Any]) -> None:
    said = told(PAGE.read_text())[feature, way]
    assert right(feature, WAYS[way], folders, golden) == said, "run `make pairs`"
