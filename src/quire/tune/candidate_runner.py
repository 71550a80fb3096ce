"""One run of a candidate under the load: requests as they come, figures in the names of METRICS."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

from quire.bench.drive import drive
from quire.bench.records import Record, goodput, latencies, rates
from quire.bench.workload import Item, Length, random_items, requests_of
from quire.core.errors import ConfigError
from quire.core.progress import stage
from quire.core.request import Request
from quire.engine.client import EngineClient
from quire.figures.metric_definitions import PERCENTILES
from quire.figures.statistics import median
from quire.plan.planned_load import PlannedLoad
from quire.text.tokenizer import Tokenizer
from quire.tune.engines import EnginePool
from quire.tune.objective import Objective
from quire.tune.report import difference
from quire.tune.space import Candidate

SECONDS = 0.5
"""A run is so long at least. Of 0.2 s runs of a model of 6 M parameters on a shared machine one in ten was 8 % off."""
BATCHES = 3
"""Batches of a run at least, whose median counts: a machine that stalls half a second stalls one of them."""
LEAST = 8
"""Requests of a run of a stream at least."""
MAX_PROMPTS = 64 << 20
SHARED = 7
"""Seed of the tokens that all prompts begin with: they stay in the cache between runs."""


class CandidateRunner:
    """Runs candidates; all get the same requests in the same round. `seconds`: spent on runs."""

    def __init__(
        self, engines: EnginePool, load: PlannedLoad, objective: Objective, seed: int, prompts: Path | None
    ) -> None:
        self.engines, self.load, self.objective = engines, load, objective
        self._seed, self._prompts = seed, prompts
        self._texts: list[tuple[int, ...]] = []
        self._turn, self._times = 0, 0
        self.seconds = 0.0

    def run(self, candidate: Candidate, round_: int) -> dict[str, float]:
        """Figures of one run. `ConfigError` where the engine refuses the candidate, or a request does not fit in it."""
        with stage(f"{difference(candidate)}, run {round_ + 1}") as at:
            at.update(note="starting the engine")
            engine, fresh = self.engines.of(candidate.config)
            at.update(note="measuring")
            return self._run(engine, fresh, round_)

    def _run(self, engine: EngineClient, fresh: bool, round_: int) -> dict[str, float]:
        began = time.perf_counter()
        try:
            if fresh or not self._times:
                self._batch(engine, -1)  # steps of its sizes are recorded, and pages touched
            if not self._times:
                _, seconds = self._batch(engine, -1)
                self._times = max(BATCHES, math.ceil(SECONDS / max(seconds, 1e-6)))
            found = [self._figures(*each) for each in self._measured(engine, round_)]
            return {name: median([each[name] for each in found]) for name in found[0]}
        finally:
            self.seconds += time.perf_counter() - began

    def _measured(self, engine: EngineClient, round_: int) -> list[tuple[list[Record], float]]:
        """Batches one after the other, or a stream, a longer one in later rounds."""
        if self.load.rate:
            count = max(LEAST, math.ceil(self.load.rate * SECONDS)) * min(8, 1 + round_)
            rng, due = random.Random(f"{self._seed}/{round_}"), [0.0]
            while len(due) < count:
                due.append(due[-1] + rng.expovariate(self.load.rate))
            return [drive(engine, self._requests(engine, count, round_), due=due)]
        found = []
        with stage("batches", self._times) as at:
            for turn in range(self._times):
                found.append(self._batch(engine, round_ * 1000 + turn))
                at.advance()
        return found

    def _batch(self, engine: EngineClient, number: int) -> tuple[list[Record], float]:
        count = self.load.batch if not self.load.rate else LEAST
        return drive(engine, self._requests(engine, count, number))

    def _requests(self, engine: EngineClient, count: int, number: int) -> list[Request]:
        self._turn += 1
        seed = hash((self._seed, number)) & 0xFFFFFFFF
        return requests_of(self._items(engine, count, seed), engine.info, f"tune-{self._turn}")

    def _items(self, engine: EngineClient, count: int, seed: int) -> list[Item]:
        load, size = self.load, engine.info.vocab_size
        if self._prompts is not None:
            self._texts = self._texts or read_prompts(self._prompts, engine.info.folder)
            engine.reset_prefix_cache()  # what texts share in one run they find, not what was in the run before
            first = random.Random(seed).randrange(len(self._texts))
            return [Item(self._texts[(first + i) % len(self._texts)], load.output) for i in range(count)]
        prefix: tuple[int, ...] = ()
        if load.shared:
            [shared] = random_items(1, _length(load.shared), _length(1), vocab_size=size, seed=SHARED)
            prefix = shared.prompt
        own = _length(load.input - load.shared)
        items = random_items(count, own, _length(load.output), vocab_size=size, seed=seed)
        return [Item(prefix + item.prompt, item.output_tokens) for item in items]

    def _figures(self, records: Sequence[Record], seconds: float) -> dict[str, float]:
        made = rates(records, seconds)
        found = {name: made[name] for name in ("output_tokens_per_s", "total_tokens_per_s")}
        found["requests_per_s"] = made["completed"] / seconds
        found["goodput_per_s"] = goodput(records, self.objective.of_requests, seconds)
        for name, spread in latencies(records).items():
            for part in PERCENTILES if spread is not None else ():
                found[f"{name}_ms_{part}"] = spread[part]  # type: ignore[index]
        return found


def _length(tokens: int) -> Length:
    return Length(tokens, tokens)


def read_prompts(path: Path, folder: str) -> list[tuple[int, ...]]:
    """The lines of a file as tokens of the model in `folder`. `ConfigError` where there are none."""
    try:
        if path.stat().st_size > MAX_PROMPTS:
            raise ConfigError(f"--prompts {path}: larger than {MAX_PROMPTS >> 20} MiB", param="prompts")
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror}", param="prompts") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {path}: not UTF-8 text: {error.reason}", param="prompts") from None
    if not lines:
        raise ConfigError(f"--prompts {path}: no line with text", param="prompts")
    tokenizer = Tokenizer.from_folder(folder)
    return [tuple(tokenizer.encode(line)) for line in lines]
