"""Several engines of one model behind one edge (data parallel). Each is supervised, and has a thread that polls it.
See docs/design/replicas.md.

When one dies, or is started anew because somebody asked for that, the others go on with its requests bit for bit;
what may have killed it stays with it, to be tried alone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import msgspec

from quire.core.errors import QuireError
from quire.core.request import Request
from quire.engine.client import AdapterChanged, EngineInfo, StepReport
from quire.engine.processes.router import Ready, Router, suited
from quire.engine.processes.supervisor import SupervisedEngine
from quire.engine.processes.unfinished import UnfinishedRequest
from quire.engine.stat_field import ended, over_replicas
from quire.engine.stats import ReplicaStats, Stats

logger = logging.getLogger("quire.engine")

POLL_SECONDS = 0.1
READER_SECONDS = 5.0
"""How long a thread that reads reports may take to see that all is over; it looks every `POLL_SECONDS`."""
Make = Callable[[int, Callable[[], object]], SupervisedEngine]
"""Makes the replica of that number, which calls the second argument when its engine has died."""


class _Change(NamedTuple):
    """A change of adapters: who has still to say what became of it, and what the others said."""

    awaited: set[int]
    said: list[AdapterChanged]


class ReplicatedEngine:
    """`EngineClient` over `count` replicas. `poll` gives the report of one of them, with the numbers of all.

    The first `prefill` of them compute prompts, and the others go on with what these began, as DistServe (Zhong et al.
    2024) and Splitwise (Patel et al. 2024) do: no decode waits for a prompt. Where none of a kind runs the others do
    both.
    """

    def __init__(self, count: int, make: Make, prefill: int = 0, together: bool = False) -> None:
        """`together`: they are made at once, as none is ready without the others."""
        self._prefill = prefill
        self._lock = threading.RLock()
        self._replicas: list[SupervisedEngine] = []
        try:
            self._make(count, make, together)
        except BaseException:
            self.close()
            raise
        info = self._replicas[0].info
        self._router = Router(count, info.block_size, info.num_blocks)
        self._places: dict[str, int] = {}
        self._reports: queue.SimpleQueue[tuple[int, StepReport | QuireError]] = queue.SimpleQueue()
        self._stats = [Stats(total_blocks=info.num_blocks)] * count
        self._changes: dict[str, _Change] = {}
        self._alive = set(range(count))
        self._closing, self._renewing = threading.Event(), threading.Lock()
        self._readers = [
            threading.Thread(target=self._read, args=(i,), name=f"quire-replica-{i}", daemon=True) for i in range(count)
        ]
        for reader in self._readers:
            reader.start()

    def _make(self, count: int, make: Make, together: bool) -> None:
        calls = [partial(make, i, partial(self._move, i)) for i in range(count)]
        if not together:
            for call in calls:
                self._replicas.append(call())
            return
        pool = ThreadPoolExecutor(count, "quire-start")
        try:
            self._replicas += [made.result() for made in [pool.submit(call) for call in calls]]
        finally:
            pool.shutdown(wait=False)  # those that wait for one that failed are given up with the server

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model; a replica's."""
        return self._replicas[0].info

    @property
    def ready(self) -> bool:
        """Whether any of them is there."""
        return any(self._ready)

    @property
    def _ready(self) -> list[bool]:
        return [i in self._alive and replica.ready for i, replica in enumerate(self._replicas)]

    def submit(self, request: Request) -> None:
        """Submit to the replica that the router chooses."""
        with self._lock:
            there = self._ready
            if not any(there):  # those that are being started; none that is gone for good
                there = [i in self._alive for i in range(len(there))]
            ready = suited(there, self._prefill, started=False)
            place = self._places[request.id] = self._router.place(request, ready)
            self._replicas[place].submit(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a request, or one of its sequences, wherever it is."""
        with self._lock:
            place = self._places.get(request_id)
            if place is not None:
                self._replicas[place].abort(request_id, index)
                if index is None:
                    self._leave(request_id)

    def pause(self, request_id: str) -> bool:
        """Wherever it is."""
        with self._lock:
            place = self._places.get(request_id)
            return place is not None and self._replicas[place].pause(request_id)

    def resume(self, request_id: str) -> None:
        """Where it is by now."""
        with self._lock:
            place = self._places.get(request_id)
            if place is not None:
                self._replicas[place].resume(request_id)

    def change_adapter(self, name: str, folder: str) -> None:
        """Everywhere; it is done when all have done it."""
        with self._lock:
            self._changes[name] = _Change(set(self._alive), [])
            for i in self._alive:
                self._replicas[i].change_adapter(name, folder)

    def reset_prefix_cache(self) -> None:
        """Everywhere."""
        with self._lock:
            for i in self._alive:
                self._replicas[i].reset_prefix_cache()
                self._router.forget(i)

    def restart(self) -> None:
        """One after the other, each once another one is there: what it had, the others go on with."""
        if self._renewing.acquire(blocking=False):
            threading.Thread(target=self._restart_each, name="quire-restart", daemon=True).start()
        else:
            logger.warning("replicas are being started anew already")

    def poll(self, timeout: float) -> StepReport | None:
        """The next report of any replica. `EngineFailure` when all of them died too often."""
        try:
            place, found = self._reports.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(found, QuireError):
            return self._lost(place, found)
        with self._lock:
            self._stats[place] = found.stats
            for output in found.outputs:
                if output.finish_reason is not None:
                    self._ended(output.request_id, place)
            changes = [done for change in found.changes for done in self._settled(place, change)]
            return StepReport(found.outputs, self._total(), tuple(changes))

    def close(self) -> None:
        """End all of them."""
        if hasattr(self, "_readers"):
            self._closing.set()
            for reader, replica in zip(self._readers, self._replicas, strict=True):
                if replica.ready:  # a socket that is closed while another thread reads it ends that thread
                    reader.join(READER_SECONDS)
        for replica in self._replicas:
            replica.close()

    def _read(self, place: int) -> None:
        replica = self._replicas[place]
        while not self._closing.is_set():
            try:
                report = replica.poll(POLL_SECONDS)
            except QuireError as error:
                self._reports.put((place, error))
                return
            if report is not None:
                self._reports.put((place, report))
                if place < self._prefill and report.portable:  # in this thread: what came before is on its way
                    self._hand_on(place, report.portable)

    def _restart_each(self) -> None:
        try:
            for i, replica in enumerate(self._replicas):
                while not self._dispensable(i) and not self._closing.wait(POLL_SECONDS):
                    pass
                replica.restart()
                while replica.renewing and i in self._alive and not self._closing.wait(POLL_SECONDS):
                    pass
            logger.info("all replicas were started anew")
        finally:
            self._renewing.release()

    def _dispensable(self, place: int) -> bool:
        """Whether another one is there, or never will be."""
        others = self._alive - {place}
        return not others or any(self._replicas[i].ready for i in others)

    def _hand_on(self, place: int, requests: Sequence[str]) -> None:
        """Others go on with these, where there are any: the store has what was computed of them."""
        with self._lock:
            ready = [each and i >= self._prefill for i, each in enumerate(self._ready)]
            for request_id in requests if any(ready) else ():
                kept = self._replicas[place].give(request_id)
                if kept is not None:
                    self._adopt(kept, ready)

    def _adopt(self, kept: UnfinishedRequest, ready: Ready) -> None:
        """Let one of those that are `ready` go on with it."""
        self._leave(kept.request.id)
        place = self._places[kept.request.id] = self._router.place(kept.request, ready)
        self._replicas[place].adopt(kept)

    def _ended(self, request_id: str, place: int) -> None:
        """A sequence ended there; with the last of a request so does the request, unless it went elsewhere."""
        if self._places.get(request_id) == place and not self._replicas[place].holds(request_id):
            self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is not None:
            self._router.left(place)

    def _move(self, dead: int, gone: bool = False) -> None:
        """Other replicas go on with the requests of one. `gone`: it does not come back, so those that are being started
        take them where none runs; else they wait for it."""
        with self._lock:
            self._router.forget(dead)
            ready = [is_ready and i != dead for i, is_ready in enumerate(self._ready)]
            if not any(ready):
                ready = [gone and i in self._alive for i in range(len(self._replicas))]
            for kept in self._replicas[dead].release(gone) if any(ready) else ():
                self._adopt(kept, suited(ready, self._prefill, kept.started))

    def _lost(self, place: int, error: QuireError) -> StepReport:
        """A replica that died too often stays dead; the others go on while there are any."""
        with self._lock:
            self._alive.discard(place)
            if not self._alive:
                raise error
            self._move(place, gone=True)
            self._stats[place] = msgspec.structs.replace(ended(self._stats[place]), total_blocks=0)
            for asked in self._changes.values():
                asked.awaited.discard(place)
            return StepReport([], self._total(), tuple(self._done()))

    def _total(self) -> Stats:
        """The numbers of all together, and of each."""
        each = tuple(ReplicaStats.of(stats, up) for up, stats in zip(self._ready, self._stats, strict=True))
        return msgspec.structs.replace(over_replicas(self._stats), replicas=each)

    def _settled(self, place: int, change: AdapterChanged) -> list[AdapterChanged]:
        """What became of a change once every replica said so: the first error, if there was one."""
        asked = self._changes.get(change.name)
        if asked is None:
            return [change]
        asked.said.append(change)
        asked.awaited.discard(place)
        return self._done()

    def _done(self) -> list[AdapterChanged]:
        """Changes that no replica is awaited for any more."""
        done = [name for name, asked in self._changes.items() if asked.said and not asked.awaited]
        said = [self._changes.pop(name).said for name in done]
        return [next((each for each in found if each.error), found[-1]) for found in said]
