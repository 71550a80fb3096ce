"""`quire bench suite`, `import` and `export`: rows of figures, measured, taken from other tools, written for others."""

from __future__ import annotations

from pathlib import Path

import click

from quire.cli.params import PATH, Option, argument, command, option, quiet_option
from quire.core.errors import ConfigError


def rows_option() -> Option:
    """Where rows are added."""
    return option("--output", "-o", type=PATH, required=True, help="File of rows, JSON lines; it is appended to.")


@command(
    "suite",
    argument("file", metavar="SUITE.toml", type=PATH, help="What to measure: see benchmarks/suites/."),
    rows_option(),
    option("--only", metavar="KEY", default="", show_default=False, help="One row, by the beginning of its key."),
    option("--retry", is_flag=True, help="Measure rows again that failed."),
    option("--make-peers", is_flag=True, help="Make the environments of other engines that are missing (minutes)."),
    option("--work", type=PATH, help="Folder of other engines' environments and model files; among the user's caches."),
    quiet_option(),
)
def suite(file: Path, output: Path, only: str, retry: bool, make_peers: bool, work: Path | None) -> None:
    """Measure models, formats, techniques, loads and engines in turns; run again, it goes on where it was."""
    from quire.bench.suite.suite_file import read_suite

    found = read_suite(file)
    from quire.bench.suite.compared import lines
    from quire.bench.suite.session import run_suite
    from quire.core.machine import cache_folder

    place = (work or cache_folder() / "bench").absolute()
    rows = run_suite(file, found, output, place, only=only, retry=retry, make=make_peers)
    for line in lines(rows):
        print(line)
    if rows and not any(row.metrics for row in rows):
        raise click.exceptions.Exit(1)


@command(
    "import",
    argument("files", metavar="FILES...", type=PATH, nargs=-1, required=True, help="What another tool wrote."),
    rows_option(),
)
def imported(files: tuple[Path, ...], output: Path) -> None:
    """Rows from files of LLM-Inference-Bench, vLLM's benchmarks, GuideLLM, llama-bench or AIPerf."""
    from quire.bench.suite.imports.read import read_foreign
    from quire.figures.files import Appending

    rows = [row for file in files for row in read_foreign(file)]
    out = Appending(output)
    new = [row for row in rows if row.key not in out.have]
    for row in new:
        if row.key not in out.have:
            out.add(row)
    print(f"{len(rows)} rows of {len(files)} files, {len(new)} of them new to {output}")


@command(
    "export",
    argument("file", metavar="ROWS", type=PATH, help="A .jsonl or .parquet file of rows."),
    option("--output", "-o", type=PATH, required=True, help="The other: .parquet or .jsonl."),
)
def export(file: Path, output: Path) -> None:
    """Rows as a Parquet file for other tools, or back as JSON lines."""
    from quire.figures.files import read_rows, write_rows

    for path in (file, output):
        if path.suffix not in (".jsonl", ".parquet"):
            raise ConfigError(f"{path} ends neither in .jsonl nor in .parquet")
    rows = read_rows(file)
    write_rows(output, rows)
    print(f"{len(rows)} rows in {output}")
