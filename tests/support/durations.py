"""How long each test function takes, as `make durations` records it, and which of them `make test-fast` runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paths import DATA, ROOT, TESTS

FILE = DATA / "durations.json"
Durations = Mapping[str, Mapping[str, float]]
"""Of each file by its path below tests/, the seconds of each function: of all its cases together."""


def read(path: Path = FILE) -> Durations:
    """Return what was recorded, nothing where there is no record."""
    return json.loads(path.read_text()) if path.exists() else {}


def place(nodeid: str) -> tuple[str, str]:
    """Split the id of a test into its file, below tests/, and its function or method without the case."""
    file, _, name = nodeid.partition("::")
    return file.removeprefix(f"{TESTS.relative_to(ROOT)}/"), name.partition("[")[0]


def chosen(durations: Durations, seconds: float) -> frozenset[tuple[str, str]]:
    """Choose as many functions as fit into `seconds`: those that take least."""
    by_cost = sorted((cost, file, name) for file, names in durations.items() for name, cost in names.items())
    found, left = set(), seconds
    for cost, file, name in by_cost:
        left -= cost
        if left < 0:
            break
        found.add((file, name))
    return frozenset(found)


class Fast:
    """A plugin that runs the chosen functions, and all that have no record: a new test is run until it has one.

    A file none of whose functions is chosen is not even imported.
    """

    def __init__(self, durations: Durations, seconds: float) -> None:
        self.durations = durations
        self.chosen = chosen(durations, seconds)
        self.skipped = frozenset(durations) - {file for file, _ in self.chosen}

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out files that have no chosen function."""
        inside = collection_path.is_relative_to(TESTS)
        return True if inside and str(collection_path.relative_to(TESTS)) in self.skipped else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out functions that are recorded and not chosen."""
        kept, left = [], []
        for item in items:
            file, name = place(item.nodeid)
            runs = (file, name) in self.chosen or name not in self.durations.get(file, {})
            (kept if runs else left).append(item)
        config.hook.pytest_deselected(items=left)
        items[:] = kept


class Recorder:
    """A plugin that adds up what each function takes, set-up and cleaning up included, and writes it to a file.

    Functions that did not run keep their old record, files that are gone lose it.
    """

    def __init__(self, path: Path = FILE) -> None:
        self.path = path
        self.seconds: Counter[tuple[str, str]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a phase of a test."""
        self.seconds[place(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: Any) -> None:
        """Write the record, in an order that does not depend on that of the tests."""
        found = {file: dict(names) for file, names in read(self.path).items() if (TESTS / file).exists()}
        for (file, name), seconds in self.seconds.items():
            found.setdefault(file, {})[name] = max(0.01, round(seconds, 2))
        told = {file: dict(sorted(names.items())) for file, names in sorted(found.items())}
        self.path.write_text(json.dumps(told, indent=1) + "\n")
