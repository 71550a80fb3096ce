"""Engines under supervision that die when a test says so."""

from __future__ import annotations

import time
from binascii import crc32
from collections.abc import Callable
from typing import Any

from quire.core.config import SchedulerConfig
from quire.core.errors import EngineFailure
from quire.core.params import SamplingParams
from quire.core.request import Output, Request
from quire.engine.client import AdapterChanged, EngineInfo, StepReport
from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine
from stub_engine import StubEngine, expected
from turns import turns

LIMITS = SchedulerConfig(max_num_seqs=64)
FOREVER = RestartPolicy(deaths=10_000)


def request(name: str, tokens: int = 8, n: int = 1, **params: Any) -> Request:
    asked = SamplingParams(max_tokens=tokens, n=n, **params)
    return Request(id=name, prompt=(5, 6, 7), params=asked, seed=crc32(name.encode()), arrival=time.monotonic())


class Engine(StubEngine):
    """A stub that dies of prompts in `deadly`, once they made so many tokens; `end` is how."""

    def __init__(self, deadly: dict[int, int], end: type[EngineFailure] = EngineFailure) -> None:
        super().__init__()
        self.deadly, self.end = deadly, end
        self.changed: list[tuple[str, str]] = []
        self.silent = False

    def change_adapter(self, name: str, folder: str) -> None:
        """Loaded at once, unless the folder is "bad"."""
        self.changed.append((name, folder))

    def poll(self, timeout: float) -> StepReport | None:
        """A step, unless it is the last."""
        if self.silent:
            time.sleep(timeout)
            return None
        for row in self._rows:
            if row.request.seed in self.deadly and len(row.tokens) - 3 >= self.deadly[row.request.seed]:
                self.dead = True
        if self.dead:
            raise self.end("the stub died")
        report = super().poll(timeout)
        if self.changed:
            changes = tuple(AdapterChanged(n, (n,) if f else (), "bad" if f == "bad" else "") for n, f in self.changed)
            self.changed = []
            return StepReport(report.outputs if report else [], self._stats, changes)
        return report


class Edge:
    """Collects what a supervised engine says."""

    def __init__(self, deadly: dict[int, int] | None = None, patience: RestartPolicy = FOREVER, **how: Any) -> None:
        self.engines: list[Engine] = []
        self.limits: list[EngineInfo | None] = []

        def start(before: EngineInfo | None, given_up: Callable[[], bool]) -> Engine:
            self.limits.append(before)
            self.engines.append(Engine(deadly or {}, **how))
            return self.engines[-1]

        self.client = SupervisedEngine(start, patience, LIMITS)
        self.outputs: list[Output] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self.live: dict[str, Request] = {}

    @property
    def engine(self) -> Engine:
        return self.engines[-1]

    def submit(self, *requests: Request) -> None:
        for each in requests:
            self.live[each.id] = each
            self.client.submit(each)

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            report = self.client.poll(0.001)
            for output in report.outputs if report else ():
                self.outputs.append(output)
                key = (output.request_id, output.index)
                self.tokens.setdefault(key, []).extend(output.tokens)
                if output.finish_reason is not None:
                    assert key not in self.ends
                    self.ends[key] = output.finish_reason

    def finish(self) -> None:
        for _ in turns(lambda: self.client._kept):
            self.poll()

    def check(self, *dead: str) -> None:
        """Everything is as if one engine had lived; requests in `dead` ended with an error."""
        for name, each in self.live.items():
            for index in range(each.params.n):
                got, want = self.tokens.get((name, index), []), expected(each, index)
                assert got == (want[: len(got)] if name in dead else want), name
                assert self.ends[name, index] == ("error" if name in dead else "length")
