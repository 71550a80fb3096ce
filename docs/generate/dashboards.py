"""The dashboard of the committed rows, as a page of the site: it is made when the site is built."""

from __future__ import annotations

from pathlib import Path

from quire.bench.suite.imports.read import read_foreign
from quire.dashboard.gather import File
from quire.dashboard.page import page
from quire.figures.files import read_rows

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def techniques() -> str:
    """Return the page of what techniques buy, beside a few rows of another tool's layout."""
    rows = read_rows(BENCHMARKS / "results" / "techniques.jsonl")
    imported = read_foreign(BENCHMARKS / "suites" / "llm_inference_bench_sample.csv")
    return page([File("imported.jsonl", imported), File("techniques.jsonl", rows)]).decode()
