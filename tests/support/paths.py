"""Where things of this repository lie, for tests and their helpers."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "quire"
PYDOC = SOURCE / "assets" / "pydoc"
"""The folder of the embedded model."""

TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
"""Helpers, which tests and the processes that they start import by their names."""

DATA = TESTS / "data"
BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"
CSRC = ROOT / "csrc"
