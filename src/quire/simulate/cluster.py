"""Replicas behind a router: requests come, go on elsewhere, and end; nothing depends on when or where it runs."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from quire.core.errors import ContextTooLong, Overloaded
from quire.core.request import Output, Request
from quire.engine.frontend.admission import AdmissionControl
from quire.engine.frontend.async_engine import MAX_PROMPT_TOKENS_IN_FLIGHT
from quire.engine.processes.router import Ready, suited
from quire.engine.processes.unfinished import UnfinishedRequest
from quire.sched.admission import check_length
from quire.simulate.fleet import in_flight
from quire.simulate.measures import AnsweredRequest, ClusterPoint, Measures
from quire.simulate.replica import MigratedRequest
from quire.simulate.requests import SimulatedRequest
from quire.simulate.routers import router_of
from quire.simulate.scaling import Scaler
from quire.simulate.timeline import Design, Event, Timeline


@dataclass(slots=True)
class Track:
    """What is known of a request outside of the replica that has it."""

    request: Request
    due: float
    place: int = 0
    scheduled: float = 0.0
    first: float = 0.0
    restarts: int = 0


class Cluster(Timeline):
    """Runs a load over a `Design`. One use."""

    def __init__(self, design: Design, targets: Mapping[str, float] | None = None) -> None:
        super().__init__(design, targets or {})
        setup, count = design.setup, len(self.replicas)
        self.router = router_of(design.router, count, setup.block_size, setup.blocks, design.seed)
        self.tracks: dict[str, Track] = {}
        self.admission = AdmissionControl(1, 1, setup.scheduler.scheduling_policy == "fair")
        self.deaths = self.moved = 0
        self.last = 0.0
        self._held: list[list[MigratedRequest]] = [[] for _ in range(count)]
        self._ends, self._lives = False, [0] * count
        self._rng = random.Random(f"failures {design.seed}")
        self._scaler = None if design.autoscale is None else Scaler(design.autoscale)
        self._counted()

    # ------------------------------------------------------------------------------------------------------- the loop

    def run(self, load: Iterable[SimulatedRequest], on_done: Callable[[], None] = lambda: None) -> Measures:
        """Until every request of the load, by ascending `due`, has ended; `on_done` is called after each."""
        self._on_done = on_done
        self._first_events()
        asks = iter(load)
        ask, number = next(asks, None), 0
        while ask is not None or self.tracks or any(replica.until is not None for replica in self.replicas):
            self._ends = ask is None
            if ask is not None and (not self._events or ask.due <= self._events[0][0]):
                self._pass(ask.due)
                self._arrive(ask, str(number))
                ask, number = next(asks, None), number + 1
                continue
            time, kind, at, version, name = heapq.heappop(self._events)
            self._pass(time)
            self._happen(kind, at, version, name)
        self.fleet.account(self.now, whole=True)
        return self.measures

    def _counted(self) -> None:
        """Other replicas serve now: so much may be in flight."""
        serving = max(1, self.fleet.serving)
        self.admission.max_sequences = serving * self.design.setup.scheduler.max_num_queued_reqs
        self.admission.max_prompt_tokens = serving * MAX_PROMPT_TOKENS_IN_FLIGHT

    def _first_events(self) -> None:
        design = self.design
        for time, at in design.failures:
            self._push(time, Event.DOWN, at)
        for at in np.flatnonzero(self.fleet.ready).tolist():
            self._wears_out(at)
        if self._scaler is not None:
            self._push(0.0, Event.SCALE)
        self._push(0.0, Event.SAMPLE)

    def _happen(self, kind: int, at: int, version: int, name: str) -> None:
        if kind == Event.STEP:
            if version == self.replicas[at].version:
                self._outputs(at, self.replicas[at].finish())
                self._begin(at)
        elif kind == Event.WAKE:
            if self.replicas[at].until is None:
                self._begin(at)
        elif kind == Event.SAMPLE:
            self._sample()
        elif kind == Event.SCALE:
            self._scale()
        elif kind == Event.DOWN:
            self._down(at, name)
        elif kind == Event.UP:
            self._up(at, version)
        elif kind == Event.READ:
            self._reads[at].pop(0)()
            self._touch(at)
        elif kind == Event.HAND_ON:
            self._hand_on(at, name)
        else:
            self._give_up(name)

    # ------------------------------------------------------------------------------------------------------- requests

    def _arrive(self, ask: SimulatedRequest, name: str) -> None:
        request = ask.request(name, self.design.setup.max_model_len)
        try:
            check_length(len(request.prompt), self.replicas[0].scheduler.tables, self.design.setup.max_model_len)
            self.admission.enter(1, len(request.prompt), request.tenant)
        except (Overloaded, ContextTooLong) as error:
            self.measures.failed(request.tenant, "429" if isinstance(error, Overloaded) else "too long")
            self._on_done()
            return
        self.tracks[name] = track = Track(request, ask.due)
        self._place(track, MigratedRequest(request, [], 0.0))
        if self.design.patience:
            self._push(self.now + self.design.patience, Event.GIVE_UP, name=name)

    def _place(self, track: Track, left: MigratedRequest, ready: Ready | None = None) -> None:
        """Have one of those that are `ready` go on with a request; all may."""
        started = bool(left.made)
        some = suited(self.fleet.ready, self.design.prefill, started) if ready is None else ready
        at = track.place = self.router.place(track.request, some)
        self.fleet.enter(at)
        if self.fleet.runs(at):
            self._submit(at, track, left)
        else:
            self._held[at].append(left)

    def _submit(self, at: int, track: Track, left: MigratedRequest) -> None:
        kept = UnfinishedRequest(track.request)
        kept.emitted = [left.made]
        self.replicas[at].submit(kept.replay_request() if left.made else track.request, track.first, left.last)
        self._touch(at)

    def _outputs(self, at: int, outputs: list[Output]) -> None:
        for out in outputs:
            track = self.tracks.get(out.request_id)
            if track is None or track.place != at or out.timing is None:
                continue
            track.scheduled = track.scheduled or out.timing.scheduled
            track.first = track.first or out.timing.first_token
            if out.finish_reason is not None:
                self._answered(out.request_id, track)
            elif at < self.design.prefill:
                self._push(self.now, Event.HAND_ON, at, out.request_id)

    def _answered(self, name: str, track: Track) -> None:
        asked, extra = track.request, self.design.edge_ms / 1000
        found = AnsweredRequest(track.due, track.scheduled, track.first + extra, self.now + extra,
                      len(asked.prompt), asked.params.max_tokens or 0)  # fmt: skip
        self.last = self.now
        self.measures.ended(asked.tenant, found)
        self.admission.took(self.now - track.due)
        self._leave(name, track)

    def _leave(self, name: str, track: Track) -> None:
        """A request has ended."""
        self._on_done()
        del self.tracks[name]
        self.admission.leave(1, len(track.request.prompt), track.request.tenant)
        self._depart(track.place)

    def _depart(self, at: int) -> None:
        """A request is not there any more."""
        self.router.left(at)
        self.fleet.leave(at)

    def _give_up(self, name: str) -> None:
        """Abort a request whose client does not wait any longer."""
        track = self.tracks.get(name)
        if track is None:
            return
        at = track.place
        self.measures.failed(track.request.tenant, "timeout")
        if self.fleet.runs(at):
            self.replicas[at].abort(name)
            self._touch(at)
        else:
            self._held[at] = [each for each in self._held[at] if each.request.id != name]
        self._leave(name, track)

    def _hand_on(self, at: int, name: str) -> None:
        """Another one decodes what a replica for prompts began, where there is one (`ReplicatedEngine`)."""
        track = self.tracks.get(name)
        ready = self.fleet.ready & (np.arange(len(self.replicas)) >= self.design.prefill)
        if track is None or track.place != at or not ready.any():
            return
        left = self.replicas[at].give(name)
        if left is not None:
            self._touch(at)
            self._depart(at)
            self.moved += 1
            self._place(track, left, ready)

    # ------------------------------------------------------------------------------------------------------- replicas

    def _wears_out(self, at: int) -> None:
        if self.design.mtbf:
            life = str(self._lives[at])  # it may be lost otherwise before
            self._push(self.now + self._rng.expovariate(1 / self.design.mtbf), Event.DOWN, at, life)

    def _down(self, at: int, life: str) -> None:
        """A replica is lost; others go on with what it had, where there are any (`ReplicatedEngine`)."""
        if not self.fleet.runs(at) or life not in ("", str(self._lives[at])):
            return
        self.deaths += 1
        lost = self._start(at)
        self._counted()
        if not self.fleet.ready.any():
            self._held[at] = lost
            return
        for left in lost:
            self._depart(at)
            track = self.tracks[left.request.id]
            track.restarts += 1
            self.moved += 1
            self._place(track, left)

    def _start(self, at: int) -> list[MigratedRequest]:
        """Start a replica anew, whose cache is empty then; returns what it had."""
        lost = self.replicas[at].die()
        self._lives[at] += 1
        self.router.forget(at)
        self.fleet.begin(at)
        self._push(self.now + self.design.start, Event.UP, at)
        return lost

    def _up(self, at: int, version: int) -> None:
        if not self.fleet.starting[at] or version != self.replicas[at].version:
            return
        self.fleet.serve(at)
        self._counted()
        held, self._held[at] = self._held[at], []
        for left in held:
            self._submit(at, self.tracks[left.request.id], left)
        self._wears_out(at)

    def _scale(self) -> None:
        assert self._scaler is not None
        running, waiting, _ = in_flight(self.replicas, self.fleet)
        rule = self._scaler.rule
        waiting += sum(map(len, self._held))
        load = (running + waiting) / self.design.setup.scheduler.max_num_seqs
        coming = self.fleet.coming
        more = self._scaler.wanted(self.now, coming, load if rule.metric == "utilization" else waiting) - coming
        for at in self.fleet.spare(max(0, more)):
            if self.fleet.draining[at]:
                self.fleet.serve(at)
            else:
                self._start(at)
        for at in self.fleet.surplus(max(0, -more)):
            self.fleet.drain(at)
        self._counted()
        self._push(self.now + rule.every, Event.SCALE)

    def _sample(self) -> None:
        idle = self._ends and all(event[1] in (Event.SAMPLE, Event.SCALE) for event in self._events)
        assert not idle, f"{len(self.tracks)} requests wait for what does not come"
        running, waiting, kv = in_flight(self.replicas, self.fleet)
        waiting += sum(map(len, self._held))
        self.measures.sample(ClusterPoint(self.now, self.fleet.serving, running, waiting, kv))
        self._push(self.now + self.design.sample, Event.SAMPLE)
