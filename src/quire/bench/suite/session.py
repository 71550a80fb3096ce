"""A suite from its file to rows in another: what is there is left alone, what is missing is measured, with a bar."""

from __future__ import annotations

from pathlib import Path

from quire.bench.suite.cases import Match, matches
from quire.bench.suite.compared import beside
from quire.bench.suite.engines import name_of
from quire.bench.suite.suite_file import Suite
from quire.bench.suite.suite_models import source_of
from quire.bench.suite.suite_runner import Bench
from quire.core.errors import ConfigError
from quire.core.progress import stage
from quire.figures.files import Appending, read_rows, write_rows
from quire.figures.schema import FigureRow


def run_suite(
    file: Path, suite: Suite, out: Path, work: Path, *, only: str, retry: bool, make: bool
) -> list[FigureRow]:
    """Measure what `out` lacks of a suite; the rows of the whole suite that are then there.

    `only`: the row whose key begins so, with those that it takes turns with. `retry`: rows that failed are measured
    again. `ConfigError` before anything is measured where the suite asks for what there is not.
    """
    if out.suffix == ".parquet":
        raise ConfigError(f"{out}: rows are appended to JSON lines; name a .jsonl file, and `quire bench export` it")
    bench = Bench(suite, file, work, make)
    named = dict.fromkeys(model for grid in suite.grid for model in grid.models)
    sources = {name: source_of(name, work) for name in named}
    every = matches(suite, sources)
    for match in every:
        bench.prompts.check(match.variants[0].source, match.load)
    keys = {id(match): [bench.key(variant, match.load) for variant in match.variants] for match in every}
    if only:
        every = [match for match in every if any(key.startswith(only) for key in keys[id(match)])]
        if not every:
            raise ConfigError(f"--only {only}: no row of {file} has a key that begins so")
    if retry and out.exists():
        write_rows(out, [row for row in read_rows(out) if row.metrics])
    rows = Appending(out)
    left = [match for match in every if not rows.have.issuperset(keys[id(match)])]
    loads = sum(len(match.variants) * suite.rounds for match in left)
    try:
        with stage("suite", loads) as at:
            for number, match in enumerate(left, 1):
                at.update(note=f"{number} of {len(left)}: {told(match)}")
                found = bench.measure(match, at.advance)
                for row in found:
                    if row.key not in rows.have:
                        rows.add(row)
                    at.say(line_of(row))
                at.say(beside(found))
        bench.close()
    finally:
        bench.kill()
    wanted = {key for match in every for key in keys[id(match)]}
    return [row for row in read_rows(out) if row.key in wanted]


def told(match: Match) -> str:
    """A match in a few words."""
    first, load = match.variants[0], match.load
    what = first.technique or " and ".join(dict.fromkeys(name_of(v.engine) for v in match.variants))
    return f"{first.source.name} {first.format} {what}, {load.batch} x {load.input} -> {load.output}, {load.arrivals}"


def line_of(row: FigureRow) -> str:
    """What came of it, in a line."""
    switched = f" {row.technique} {'on' if row.on else 'off'}" if row.technique else ""
    head = f"{row.engine.name} {row.model.name} {row.model.format}{switched}, batch {row.load.batch}: "
    if not row.metrics:
        return head + "; ".join(row.notes)
    found = row.metrics
    parts = [f"{found['output_tokens_per_s']:.1f} tokens/s"] if "output_tokens_per_s" in found else []
    parts += [f"{name} {found[f'{name}_ms_p50']:.1f} ms" for name in ("ttft", "tpot") if f"{name}_ms_p50" in found]
    return head + ", ".join(parts)
