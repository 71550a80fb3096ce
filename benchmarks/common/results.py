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


def parser_of(doc: str | None, parts: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """A parser whose help is the module's, and which takes some of `parts` where there are any."""
    about, _, more = (doc or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if parts is not None:
        parser.add_argument("what", choices=parts, nargs="+")
    return parser


def measure(
    parts: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]],
    args: argparse.Namespace,
    file: str | Mapping[str, str],
) -> None:
    """Run those that were asked for; print what each found, and keep it in `results/FILE.json`, a name for all parts or
    one for each."""
    for what in args.what:
        found = parts[what](args)
        print(what, json.dumps(found, indent=1), flush=True)
        keep(file if isinstance(file, str) else file[what], {what: found})


def keep(file: str, found: Mapping[str, Any]) -> None:
    """Put figures into `results/FILE.json`, in the place of those of the same names."""
    path = RESULTS / f"{file}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | found, indent=1) + "\n")
