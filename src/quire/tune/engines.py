"""Engines of candidates: loaded once for all that have the same weights, and arranged anew between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import NamedTuple

from quire.core.config import EngineConfig
from quire.core.machine import available_memory
from quire.engine.client import EngineClient
from quire.engine.components.memory_plan import same_weights
from quire.engine.hosts.placing import Placing
from quire.engine.local import LocalEngine
from quire.engine.processes.replicas import ReplicatedEngine
from quire.engine.processes.supervisor import RestartPolicy, SupervisedEngine

MOST = 3
"""Engines that wait for their next turn: more would only take memory from the one that is measured."""


class _Kept(NamedTuple):
    """An engine as it is arranged, and what ends it."""

    config: EngineConfig
    engine: EngineClient
    until: ExitStack


class EnginePool:
    """Starts what is asked for, and keeps it while there is room. `seconds`: spent on starts and arranging."""

    def __init__(self, bytes_of: Callable[[EngineConfig], int]) -> None:
        """`bytes_of`: memory that an engine will take."""
        self._bytes_of = bytes_of
        self._kept: list[_Kept] = []
        self.seconds = 0.0

    def of(self, config: EngineConfig) -> tuple[EngineClient, bool]:
        """An idle engine with `config`, and whether it is new or arranged anew. `ConfigError` where it refuses."""
        for kept in self._kept:
            if kept.config == config:
                self._kept.remove(kept)
                self._kept.append(kept)
                return kept.engine, False
        began = time.perf_counter()
        try:
            return self._arranged(config) or self._started(config), True
        finally:
            self.seconds += time.perf_counter() - began

    def _arranged(self, config: EngineConfig) -> EngineClient | None:
        """One that is there with these weights."""
        for kept in self._kept:
            engine = kept.engine
            if isinstance(engine, LocalEngine) and same_weights(kept.config, config):
                self._kept.remove(kept)
                try:
                    engine.rearrange(config)
                except BaseException:
                    kept.until.close()
                    raise
                self._kept.append(_Kept(config, engine, kept.until))
                return engine
        return None

    def _started(self, config: EngineConfig) -> EngineClient:
        needed = self._bytes_of(config)
        while self._kept and (len(self._kept) >= MOST or available_memory() < 2 * needed):
            self._kept.pop(0).until.close()
        with ExitStack() as until:
            engine = _start(config, until)
            self._kept.append(_Kept(config, engine, until.pop_all()))
        return engine

    def close(self) -> None:
        """End them all."""
        while self._kept:
            self._kept.pop().until.close()


def _start(config: EngineConfig, until: ExitStack) -> EngineClient:
    """One in this process, or replicas as a server has them."""
    count = config.parallel.data_parallel_size
    if count == 1:
        return until.enter_context(closing(LocalEngine(config)))
    placing = until.enter_context(closing(Placing(config)))
    patience = RestartPolicy(deaths=1)
    replicas = ReplicatedEngine(
        count,
        lambda i, died: SupervisedEngine(partial(placing.start, i), patience, config.scheduler, died),
        config.parallel.prefill_replicas,
        placing.together,
    )
    return until.enter_context(closing(replicas))
