"""Several engines behind one edge, and requests that a router places."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from quire.core.params import SamplingParams
from quire.core.request import Output, Request
from quire.engine.client import EngineInfo
from quire.engine.processes.replicas import ReplicatedEngine
from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine
from stub_engine import expected
from supervised_engines import FOREVER, LIMITS, Engine

REPLICAS, BLOCK = 8, 16


def routed_request(name: int, prompt: Sequence[int], tokens: int = 32) -> Request:
    return Request(id=str(name), prompt=tuple(prompt), params=SamplingParams(max_tokens=tokens), seed=0, arrival=0.0)


class Edge:
    """Three replicas, and what came of the requests."""

    def __init__(
        self,
        patience: RestartPolicy = FOREVER,
        pause: float = 0.0,
        prefill: int = 0,
        kind: type[Engine] = Engine,
        **how: Any,
    ) -> None:
        self.engines: list[list[Engine]] = [[], [], []]

        def make(i: int, died: Callable[[], None]) -> SupervisedEngine:
            def start(before: EngineInfo | None, given_up: Callable[[], bool]) -> Engine:
                if before is not None:
                    time.sleep(pause)
                self.engines[i].append(kind({}, **how))
                self.engines[i][-1].step_seconds = 0.001
                return self.engines[i][-1]

            return SupervisedEngine(start, patience, LIMITS, died)

        self.client = ReplicatedEngine(3, make, prefill)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self.live: dict[str, Request] = {}
        self.changes: list[tuple[str, str]] = []
        self.restarts: dict[str, int] = {}

    def submit(self, *requests: Request) -> None:
        for each in requests:
            self.live[each.id] = each
            self.client.submit(each)

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            report = self.client.poll(0.01)
            for change in report.changes if report else ():
                self.changes.append((change.name, change.error))
            for output in report.outputs if report else ():
                self.take(output)

    def take(self, output: Output) -> None:
        key = (output.request_id, output.index)
        if output.request_id in self.live:
            self.tokens.setdefault(key, []).extend(output.tokens)
            self.restarts[output.request_id] = output.restarts
            if output.finish_reason is not None:
                assert key not in self.ends
                self.ends[key] = output.finish_reason

    def finish(self) -> None:
        """Until all have ended; then every sequence has the tokens that it has alone."""
        end = time.monotonic() + 60
        wanted = {(name, i) for name, each in self.live.items() for i in range(each.params.n)}
        while self.ends.keys() < wanted and time.monotonic() < end:
            self.poll()
        for name, each in self.live.items():
            for i in range(each.params.n):
                assert self.tokens[name, i] == expected(each, i) and self.ends[name, i] == "length"
        assert sum(self.client._router.in_flight) == 0 and not self.client._places
        self.client.close()
