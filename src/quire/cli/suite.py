"""`quire bench suite`, `import` and `export`: rows of figures, measured, taken from other tools, written for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.core.errors import ConfigError

Out = Annotated[Path, typer.Option("--output", "-o", help="File of rows, JSON lines; it is appended to.")]


def suite(
    file: Annotated[Path, typer.Argument(metavar="SUITE.toml", help="What to measure: see benchmarks/suites/.")],
    output: Out,
    only: Annotated[str, typer.Option(metavar="KEY", help="One row, by the beginning of its key.")] = "",
    retry: Annotated[bool, typer.Option("--retry", help="Measure rows again that failed.")] = False,
    make_peers: Annotated[
        bool, typer.Option("--make-peers", help="Make the environments of other engines that are missing (minutes).")
    ] = False,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder of other engines' environments and model files; among the user's caches."),
    ] = None,
) -> None:
    """Measure models, formats, techniques, loads and engines in turns; run again, it goes on where it was."""
    from quire.bench.suite.spec import read_suite

    found = read_suite(file)
    from quire.bench.suite.compared import lines
    from quire.bench.suite.session import run_suite
    from quire.core.machine import cache_folder

    place = (work or cache_folder() / "bench").absolute()
    rows = run_suite(file, found, output, place, only=only, retry=retry, make=make_peers)
    for line in lines(rows):
        print(line)
    if rows and not any(row.metrics for row in rows):
        raise typer.Exit(1)


def imported(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="What another tool wrote.")], output: Out
) -> None:
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


def export(
    file: Annotated[Path, typer.Argument(metavar="ROWS", help="A .jsonl or .parquet file of rows.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The other: .parquet or .jsonl.")],
) -> None:
    """Rows as a Parquet file for other tools, or back as JSON lines."""
    from quire.figures.files import read_rows, write_rows

    for path in (file, output):
        if path.suffix not in (".jsonl", ".parquet"):
            raise ConfigError(f"{path} ends neither in .jsonl nor in .parquet")
    rows = read_rows(file)
    write_rows(output, rows)
    print(f"{len(rows)} rows in {output}")


COMMANDS: dict[str, Callable[..., Any]] = {"suite": suite, "import": imported, "export": export}
"""Of `quire bench`."""
