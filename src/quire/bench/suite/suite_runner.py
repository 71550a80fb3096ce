"""Running a suite: variants take turns, round by round, and each becomes a row."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quire.bench.suite.cases import Match, Variant
from quire.bench.suite.engines import command_of, name_of
from quire.bench.suite.measures import StepTraffic, metrics_of, roofline
from quire.bench.suite.process import PAUSE, Command, Process
from quire.bench.suite.prompts import Prompts, read_texts
from quire.bench.suite.suite_file import LoadCase, Suite
from quire.bench.suite.watch import Energy, cpu_seconds, peak_bytes
from quire.core.errors import EngineFailure, QuireError
from quire.figures.machine import now, this_engine, this_machine
from quire.figures.schema import FigureRow, RowEngine, RowLoad
from quire.figures.statistics import interval, median

WARM_OUTPUT = 8
DIALECTS = {
    "transformers": {"ttft": "first token - due: all requests of a batch start together, and wait for the one before"},
    "openai": {"itl": "gaps between chunks, of which one may be several tokens"},
}
"""What an engine's figures mean where they are not what METRICS says: metric's name up to `_ms` -> how."""


@dataclass
class Running:
    """A variant whose process is there, or not: `why`. `rounds`: metrics of each; `once`: those measured once."""

    variant: Variant
    process: Process | None = None
    why: str = ""
    rounds: list[dict[str, float]] = field(default_factory=list)
    once: dict[str, float] = field(default_factory=dict)
    roof: StepTraffic | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def engine_pid(self) -> int:
        """Process id of the engine: of the server where one is started, which is not the process that asks it."""
        return int(self.process.facts.get("pid", self.process.pid)) if self.process is not None else 0

    def seconds(self) -> float:
        """Processor time of the engine's processes so far; 0 where it runs elsewhere, or the system does not tell."""
        elsewhere = self.process is None or "://" in self.variant.engine
        return 0.0 if elsewhere else cpu_seconds(self.engine_pid)

    def fail(self, error: Exception) -> None:
        """Stop the variant: it takes part no more."""
        self.why = str(error)
        if self.process is not None:
            self.process.kill()
            self.process = None


@contextmanager
def _failing(one: Running) -> Iterator[None]:
    """What goes wrong ends the variant, not the suite."""
    try:
        yield
    except QuireError as error:
        one.fail(error)


class Bench:
    """Measures matches. Processes are kept for the next match where that needs the same ones."""

    def __init__(self, suite: Suite, file: Path, work: Path, make: bool = False) -> None:
        """`file`: the suite's, which rows name; `work`: a folder for what is made; `make`: peers' environments, too."""
        self.suite, self.file, self.work, self._make = suite, file, work, make
        self._texts = texts = read_texts(suite.texts, file.parent)
        self.prompts, self.energy = Prompts(texts), Energy()
        self.machine, self.engine = this_machine(), this_engine()
        self._kept: dict[tuple[object, ...], Running] = {}
        self._probe: Process | None = None
        self._probe_why = ""
        work.mkdir(parents=True, exist_ok=True)

    def key(self, variant: Variant, load: LoadCase) -> str:
        """Key of the row that a variant becomes under a load."""
        return self._row(variant, load).key

    def measure(self, match: Match, done: Callable[[], None] = lambda: None) -> list[FigureRow]:
        """All rounds of a match: a row for each variant, in order. `done` is called after each load."""
        running = self._started(match)
        limits: list[dict[str, float]] = []
        for number in range(self.suite.rounds):
            items = self.prompts.items(match.variants[0].source, match.load, 1000 * self.suite.seed + number)
            for one in running:
                if one.process is not None:
                    self._round(one, match, items)
                done()
            limits += self._limits()
        for one in running:
            self._finish(one)
        found = {name: median([each[name] for each in limits]) for name in limits[0]} if limits else {}
        return [self._result(one, match.load, found) for one in running]

    def _started(self, match: Match) -> list[Running]:
        """The variants of a match, loaded and warm; those of the last match that are not among them are ended."""
        batch = match.load.batch
        wanted = {
            (v.source.name, v.engine, v.format, repr(v.options), v.mode, v.compress, batch): v for v in match.variants
        }
        for name in [name for name in self._kept if name not in wanted]:
            self._end(self._kept.pop(name))
        for name, variant in wanted.items():
            kept = self._kept.get(name)
            if kept is None or kept.process is None:
                kept = self._kept[name] = self._open(variant, match.load)
            else:
                kept = self._kept[name] = Running(variant, kept.process, once=kept.once, roof=kept.roof)
            if kept.process is not None:
                self._warm(kept, match)
        return [self._kept[name] for name in wanted]

    def _open(self, variant: Variant, load: LoadCase) -> Running:
        one = Running(variant)
        try:
            command = command_of(variant.engine, variant.job(self.work, load.batch, self._make))
            log = self.work / f"{name_of(variant.engine)}-{'on' if variant.on else 'off'}.log"
            one.process = Process(name_of(variant.engine), command, log, self.suite.limit_s)
        except QuireError as error:
            one.fail(error)
            return one
        one.once["load_s"] = one.process.load_seconds
        for name in ("weight_bytes", "kv_bytes"):
            if name in one.process.facts:
                one.once[name] = float(one.process.facts[name])
        return one

    def _warm(self, one: Running, match: Match) -> None:
        """A short load first: it touches memory for the first time, and tunes what is tuned on the first tokens."""
        items = self.prompts.items(one.variant.source, match.load, -1 - self.suite.seed)[: match.load.batch]
        short = [item._replace(output=min(item.output, WARM_OUTPUT), due=0.0) for item in items]
        with _failing(one):
            self._ask(one, {"do": "load", "items": short, "most": 0})
            if one.variant.is_quire and one.variant.mode != "serve" and one.roof is None:
                told = self._ask(one, {"do": "weights_read"})
                one.roof = StepTraffic.told(float(told["bytes"]), one.process.facts if one.process is not None else {})

    def _round(self, one: Running, match: Match, items: list[Any]) -> None:
        most = match.load.batch if match.load.arrivals == "closed" else 0
        command: dict[str, Any] = {"do": "load", "items": items, "most": most}
        if match.technique is not None and match.technique.twice:
            command["twice"] = True
        time.sleep(PAUSE)
        self.energy.joules()
        before = one.seconds()
        with _failing(one):
            found = self._ask(one, command)
            joules, spent = self.energy.joules(), one.seconds() - before
            metrics = metrics_of(found, [len(item.prompt) for item in items], match.load)
            metrics |= {"cpu_s": spent} if spent > 0 else {}
            if found.get("failures"):
                one.notes.append(f"{len(found['failures'])} requests failed: {found['failures'][0]}")
            if self.energy.sources and (written := metrics.get("output_tokens_per_s")):
                metrics |= {"watts": joules / found["seconds"], "joules_per_token": joules / found["seconds"] / written}
            if one.roof is not None:
                metrics |= roofline(metrics, match.load, one.variant.source, one.roof)
            one.rounds.append(metrics)

    def _ask(self, one: Running, command: dict[str, Any]) -> dict[str, Any]:
        if one.process is None:
            raise EngineFailure(one.why)
        return one.process.ask(command, self.suite.limit_s)

    def _finish(self, one: Running) -> None:
        """What is measured once, after all rounds: the largest memory, and how well the model predicts text."""
        if one.process is None:
            return
        peak, processes = peak_bytes(one.engine_pid)
        if peak and "://" not in one.variant.engine:
            one.once["peak_bytes"] = float(peak)
            if processes > 1:
                one.notes.append(f"peak_bytes: of {processes} processes; memory that they share counts in each")
        wanted = self.suite.perplexity_bytes and "perplexity" not in one.once and one.variant.mode != "serve"
        if wanted and one.variant.is_quire and not one.variant.source.random:
            command = {"do": "perplexity", "size": self.suite.perplexity_bytes, "texts": self._texts}
            with suppress(EngineFailure):
                one.once |= {k: v for k, v in self._ask(one, command).items() if k == "perplexity"}

    def _limits(self) -> list[dict[str, float]]:
        """The machine's, now; nothing where they cannot be measured."""
        if self._probe is None and not self._probe_why:
            try:
                words = [sys.executable, "-m", "quire.bench.suite.limits"]
                self._probe = Process("limits", Command(words), self.work / "limits.log")
            except QuireError as error:
                self._probe_why = f"limits of the machine: {error}"
        return [] if self._probe is None else [self._probe.ask({"do": "limits"})]

    def _row(self, variant: Variant, load: LoadCase) -> FigureRow:
        """All that is known before it is measured."""
        arrivals = load.pattern
        ranged = [text for text in (load.input, load.output) if ":" in text]
        name = f"{load.input}/{load.output}" if ranged else ""
        shown = variant.options | ({} if not variant.mode else {"mode": variant.mode})
        shown |= {"compress": " ".join(variant.compress)} if variant.compress else {}
        made = variant.technique if variant.compress else "" if variant.is_quire else variant.format
        about = self.suite.technique_of(variant.technique)
        return FigureRow(
            kind="measured",
            benchmark="suite",
            suite=self.suite.name,
            machine=self.machine,
            engine=self.engine if variant.engine == "quire" else RowEngine(name=name_of(variant.engine)),
            model=variant.source.row(variant.options, made),
            load=RowLoad(
                requests=load.requests,
                batch=load.batch,
                input_len=load.shared_prefix + (load.inputs.low + load.inputs.high) / 2,
                output_len=(load.outputs.low + load.outputs.high) / 2,
                arrivals=arrivals.kind,
                rate=arrivals.rate,
                shared_prefix=load.shared_prefix,
                name=" ".join(part for part in (load.prompts if load.prompts != "random" else "", name) if part),
            ),
            technique=variant.technique,
            on=variant.on,
            improves=about.improves if about else "",
            claim=about.claim if about else "",
            options=shown,
            metrics={},
        )

    def _result(self, one: Running, load: LoadCase, limits: dict[str, float]) -> FigureRow:
        row = self._row(one.variant, load)
        names = dict.fromkeys(name for metrics in one.rounds for name in metrics)
        samples = {name: [m[name] for m in one.rounds if name in m] for name in names}
        facts = {} if one.process is None else one.process.facts
        notes = [note for note in (self.energy.why, self._probe_why, *dict.fromkeys(one.notes)) if note]
        if "://" in one.variant.engine and "model" in facts:
            notes.append(f"the server calls its model {facts['model']}")
        if one.why:
            notes = [one.why]
            samples, one.once = {}, {}
        elif self.suite.rounds < 6:
            notes.append(f"{self.suite.rounds} rounds: intervals are the range of what was seen")
        engine = row.engine
        if one.variant.engine != "quire":
            engine = RowEngine(
                name=engine.name, version=str(facts.get("version", "")), versions=facts.get("versions", {})
            )
        spoken = DIALECTS.get(engine.name, {})
        return msgspec.structs.replace(
            row,
            time=now(),
            command=f"quire bench suite {self.file} --only {row.key} -o rows.jsonl",
            machine=msgspec.structs.replace(row.machine, limits=limits),
            engine=engine,
            metrics={name: median(values) for name, values in samples.items()} | one.once,
            intervals={name: interval(values) for name, values in samples.items() if len(values) > 1},
            samples=samples,
            dialect={m: how for head, how in spoken.items() for m in samples if m.startswith(f"{head}_ms")},
            notes=notes,
        )

    def _end(self, one: Running) -> None:
        if one.process is not None:
            one.process.close()

    def close(self) -> None:
        """End all processes."""
        for one in self._kept.values():
            self._end(one)
        if self._probe is not None:
            self._probe.close()

    def kill(self) -> None:
        """Kill all processes at once."""
        for one in self._kept.values():
            if one.process is not None:
                one.process.kill()
        if self._probe is not None:
            self._probe.kill()
