"""A suite put out: groups of variants that take turns, each with the load that is put on all of them.
See docs/design/bench-suite.md."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.bench.suite.engines import EngineJob, checkout_of, name_of
from quire.bench.suite.models import SuiteModel
from quire.bench.suite.spec import FORMATS, Grid, LoadCase, Suite
from quire.bench.suite.techniques import Technique
from quire.core.errors import ConfigError
from quire.core.machine import cores

BLOCK = 16
NONE = "none"
DRAFTER = "draft"


@dataclass(frozen=True)
class Variant:
    """One configuration of one engine: a row. `options`: flags of quire, in full; empty for peers. `compress`: words of
    `quire compress` that make the model of it."""

    engine: str
    source: SuiteModel
    format: str
    technique: str
    on: bool
    options: dict[str, Any]
    mode: str
    threads: int
    length: int
    compress: tuple[str, ...] = ()

    @property
    def is_quire(self) -> bool:
        """Whether the engine is quire, of this environment or of another checkout."""
        return self.engine == "quire" or checkout_of(self.engine) is not None

    def job(self, work: Path, batch: int, make: bool) -> EngineJob:
        """What the variant's engine is asked to load."""
        options = dict(self.options)
        if "kv_store" in options:
            folder = work / "kv-store" / ("on" if self.on else "off")
            folder.mkdir(parents=True, exist_ok=True)
            options["kv_store"] = str(folder)
        job = EngineJob(work, self.source, self.format, self.threads, batch, self.length, options, self.mode, make)
        return replace(job, compress=self.compress)


@dataclass(frozen=True)
class Match:
    """Variants that are measured in turns under one load."""

    load: LoadCase
    variants: tuple[Variant, ...]
    technique: Technique | None = None
    """What is switched, if anything."""


def matches(suite: Suite, sources: dict[str, SuiteModel]) -> list[Match]:
    """Matches of a suite, less what is excluded, each once; those that share engines follow each other."""
    found: dict[str, Match] = {}
    for grid in suite.grid:
        for model, technique, fmt in itertools.product(grid.models, grid.techniques, grid.formats):
            for load in loads(grid):
                # A technique is compared with itself off; without one, engines are compared with each other.
                for engines in [[e] for e in grid.engines] if technique != NONE else [grid.engines]:
                    named = [(model, fmt, technique, e) for e in engines]
                    kept = [which for which in named if not _excluded(suite, load, which)]
                    made = [_variants(suite, grid, sources[model], which, load) for which in kept]
                    if variants := tuple(itertools.chain.from_iterable(made)):
                        found.setdefault(repr((load, variants)), Match(load, variants, suite.technique_of(technique)))
    if not found:
        raise ConfigError("the suite's `exclude` leaves nothing to measure")
    return list(found.values())


def loads(grid: Grid) -> Iterator[LoadCase]:
    """The loads of a grid."""
    lists = (grid.batch, grid.input, grid.output, grid.shared_prefix, grid.arrivals)
    for batch, inputs, outputs, prefix, arrivals in itertools.product(*lists):
        yield LoadCase(
            requests=grid.requests or batch,
            batch=batch,
            input=str(inputs),
            output=str(outputs),
            shared_prefix=prefix,
            arrivals=arrivals,
            prompts=grid.prompts,
        )


def _excluded(suite: Suite, load: LoadCase, which: tuple[str, str, str, str]) -> bool:
    model, fmt, technique, engine = which
    facts = {"model": model, "format": fmt, "technique": technique, "engine": name_of(engine), "batch": load.batch,
             "input": load.input, "output": load.output, "shared_prefix": load.shared_prefix,
             "arrivals": load.arrivals, "prompts": load.prompts}  # fmt: skip
    return any(
        all(str(facts[name]) in {str(value) for value in (given if isinstance(given, list) else [given])}
            for name, given in rule.items())
        for rule in suite.exclude
    )  # fmt: skip


def _variants(
    suite: Suite, grid: Grid, source: SuiteModel, which: tuple[str, str, str, str], load: LoadCase
) -> Iterator[Variant]:
    model, fmt, technique, engine = which
    threads = int(grid.options.get("threads", suite.options.get("threads", 0))) or cores().threads
    made, plainly = suite.technique_of(technique), "serve" if grid.serve else ""
    length = suite.max_model_len
    if source.facts is not None:
        length = min(length, source.facts.spec.max_position)
    if engine != "quire" and checkout_of(engine) is None:
        if made is None:
            yield Variant(engine, source, fmt, "", True, {}, plainly, threads, length)
        return
    plain = suite.options | grid.options | FORMATS.get(fmt, {})
    if made is None:
        yield Variant(engine, source, fmt, "", True, _sized(plain, load, length, False), plainly, threads, length)
        return
    for on in (False, True):
        own = dict(made.on if on else made.off)
        if on and technique == DRAFTER:
            own["speculative_config"] = json.dumps(suite.speculation[model])
        if on and made.half_weights and source.facts is not None:
            own["weight_memory_gib"] = round(source.facts.parameters / 2**30, 3)
        mode = plainly if on else made.off_mode or plainly
        options, words = _sized(plain | own, load, length, made.bounded), made.compress if on else ()
        yield Variant(engine, source, fmt, technique, on, options, mode, threads, length, words)


def _sized(options: dict[str, Any], load: LoadCase, length: int, bounded: bool) -> dict[str, Any]:
    """`options` with what the load needs, where they do not say: so that all variants have the same room."""
    size = int(options.get("block_size", BLOCK))
    tokens = load.batch * load.mean if bounded else 2.0 * load.batch * load.longest
    # Ranks of a context have a part each, and a sequence may lie with one of them.
    blocks = math.ceil(max(tokens, length) / size) * int(options.get("context_parallel_size", 1))
    room = {"max_model_len": length, "max_num_seqs": load.batch, "num_blocks": blocks}
    return room | options
