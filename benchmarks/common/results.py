"""The command line of a benchmark, and the file of its figures: one entry for each of its parts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""The repository."""
RESULTS = ROOT / "benchmarks" / "results"


def parser_of(doc: str | None, parts: Mapping[str, Any]) -> argparse.ArgumentParser:
    """A parser whose help is the module's, and which takes some of `parts`."""
    about, _, more = (doc or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=parts, nargs="+")
    return parser


def measure(
    parts: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]], args: argparse.Namespace, name: str
) -> None:
    """Run those that were asked for; print what each found, and keep it in `results/NAME.json`."""
    path = RESULTS / f"{name}.json"
    for what in args.what:
        found = parts[what](args)
        print(what, json.dumps(found, indent=1), flush=True)
        kept = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(kept | {what: found}, indent=1) + "\n")
