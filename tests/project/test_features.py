"""Features: each is one folder with three sides, plans know no arrays, and none knows another."""

from __future__ import annotations

import pytest

from paths import ROOT, SOURCE
from source_tree import DEEPER, SIDES, home, imports, module_of

ELSEWHERE = {"speculate/draft_limits.py"}
"""Plan sides of features that are packages: drafts have a layer of their own, between run/ and engine/."""


def features() -> list[str]:
    return [path.name for path in sorted((SOURCE / "features").iterdir()) if (path / "__init__.py").exists()]


@pytest.mark.parametrize("feature", features())
def test_a_feature_has_all_sides_and_knows_no_other(feature: str) -> None:
    sides, wrong = set(), []
    for path in sorted((SOURCE / "features" / feature).rglob("*.py")):
        if path.stem != "__init__":
            sides.add(path.stem.partition("_")[0])
        for module, line in imports(path):
            if module.startswith("quire.features") and module.split(".")[2:3] not in (["feature"], [feature]):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert sides == SIDES.keys(), f"{feature}: {sorted(sides)}"
    assert not wrong, "\n".join(wrong)


def test_sides_are_told_by_names() -> None:
    for module, package in (("feature", "sched"), ("images.plan_images", "sched"), ("images", "engine")):
        assert home(f"quire.features.{module}") == package
    assert home("quire.features.structured_output.run_grammar_masks") == "sample"
    assert all((SOURCE / f"{name.replace('.', '/')}.py").exists() for name in DEEPER)


def test_plans_of_features_have_no_arrays() -> None:
    paths = [path for path in (SOURCE / "features").rglob("*.py") if home(module_of(path)) == SIDES["plan"]]
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in (*paths, *(SOURCE / name for name in ELSEWHERE))
        for module, line in imports(path)
        if module.split(".")[0] in ("torch", "numpy", "ml_dtypes") or module.startswith("quire.ops")
    ]
    assert len(paths) > len(features()) and not found, found
