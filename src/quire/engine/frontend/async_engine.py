"""An `EngineClient` as async streams: one reader thread, one event loop, bounded admission, no request left waiting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial

import msgspec

from quire.core.errors import BadRequest, EngineFailure, Overloaded, QuireError, Unavailable
from quire.core.request import Output, Request
from quire.engine.client import EngineClient, EngineInfo, StepReport
from quire.engine.frontend.admission import AdmissionControl, image_bytes
from quire.engine.frontend.engine_metrics import EngineMetrics
from quire.engine.frontend.streams import AT_ONCE, CallQueue, OutputStream


class AdapterChanges:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def change(self, client: EngineClient, name: str, folder: str) -> None:
        """Ask for a change and wait until it is settled; `BadRequest` while another of this name is under way."""
        if name in self._waiting:
            raise BadRequest(f"lora_name: {name!r} is being changed by another request", param="lora_name")
        done = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            client.change_adapter(name, folder)
            await done
        finally:
            self._waiting.pop(name, None)

    def settle(self, name: str, error: QuireError | None) -> None:
        """Wake who asked for a change of adapter `name`, unless nobody waits any more."""
        done = self._waiting.get(name)
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def fail(self, error: QuireError) -> None:
        """None of them comes to an end any more."""
        for name in self._waiting:
            self.settle(name, error)


logger = logging.getLogger("quire.engine")

POLL_SECONDS = 0.1
MAX_PROMPT_TOKENS_IN_FLIGHT = 4 << 20  # ~150 MB of Python ints at the edge
PORTION = 32
"""Outputs that are handed to their streams at once: some 1 ms."""


class AsyncEngine:
    """Per-request async streams over an `EngineClient`, with admission control and the metrics.

    All methods except `start` and `close` belong to the event loop on which `start` ran.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        max_sequences: int | None = None,
        max_prompt_tokens: int = MAX_PROMPT_TOKENS_IN_FLIGHT,
    ) -> None:
        self._client = client
        self.info: EngineInfo = client.info
        self.metrics = EngineMetrics(self.info)
        fair = self.info.scheduling_policy == "fair"
        self.admission = AdmissionControl(max_sequences or self.info.max_num_queued_reqs, max_prompt_tokens, fair)
        self.turns = CallQueue()
        self._streams: dict[str, OutputStream] = {}
        self._paused: set[str] = set()
        self._progress = time.monotonic()
        self._failure: QuireError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: threading.Thread | None = None
        self._closing = threading.Event()
        self._changes = AdapterChanges()

    @property
    def healthy(self) -> bool:
        """False once the engine has failed or was closed."""
        return self._failure is None and not self._closing.is_set()

    @property
    def ready(self) -> bool:
        """False while the engine is gone, or is started again and requests wait."""
        return self.healthy and self._client.ready

    @property
    def failure(self) -> QuireError | None:
        """Why the engine is dead, if it is."""
        return self._failure

    @property
    def in_flight(self) -> int:
        """Sequences accepted and not finished."""
        return self.admission.sequences

    @property
    def stalled_seconds(self) -> float:
        """Seconds without a report from the engine while it has work; 0 when it has none."""
        return time.monotonic() - self._progress if self._busy else 0.0

    @property
    def _busy(self) -> bool:
        """Whether the engine has work."""
        return len(self._streams) > len(self._paused)

    def start(self) -> None:
        """Start the reader thread; must run on the event loop. `submit` does it if nobody has."""
        if self._reader is None:
            self._loop = asyncio.get_running_loop()
            self._reader = threading.Thread(target=self._read, name="quire-reader", daemon=True)
            self._reader.start()

    def check_room(self) -> None:
        """`Overloaded` where not one sequence more is taken, known before anything of a request is read."""
        if self.admission.full:
            self._admit(1, 0, "")

    @contextlib.contextmanager
    def reserve(self, sequences: int, tenant: str = "", most: int = 0) -> Iterator[None]:
        """Hold places while texts become tokens, so that a full queue is refused before that work is done.

        They are free again at the end: `submit` must follow at once, without an `await` in between. Raises as it does,
        and `Overloaded` where `tenant` would have more than `most` sequences in flight.
        """
        self._admit(sequences, 0, tenant, most)
        try:
            yield
        finally:
            self._leave(sequences, 0, tenant)

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Hand validated requests to the engine, all or none; of many most go in later turns of the loop. Raises
        `Overloaded` when they do not fit beside what is in flight, `BadRequest` when they never could, `Unavailable`
        when the engine is gone."""
        self.start()
        self._admit(sum(r.params.n for r in requests), sum(len(r.prompt) for r in requests), requests[0].tenant)
        self._expect_progress()
        stream = OutputStream(self, requests)
        self._streams |= dict.fromkeys((request.id for request in requests), stream)
        self.admission.image_bytes += sum(map(image_bytes, requests))
        try:
            for request in requests[:AT_ONCE]:
                self._client.submit(request)
        except BaseException:
            stream.close()
            raise
        for request in requests[AT_ONCE:]:
            self.turns.later(partial(stream.begin, request, self._client.submit))
        return stream

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        """The outputs of all `n` sequences of one request, interleaved; leaving the iteration aborts the request."""
        stream = self.submit([request])
        try:
            while outputs := await stream.next():
                for output in outputs:
                    yield output
        finally:
            stream.close()

    async def change_adapter(self, name: str, folder: str) -> None:
        """Load the LoRA adapter in `folder` under `name`, or unload it where `folder` is empty.

        `BadRequest` with the engine's reason when it could not be, `Unavailable` when the engine is gone.
        """
        self.start()
        if not self.healthy:
            raise Unavailable("the engine is not running; the server's log says why")
        await self._changes.change(self._client, name, folder)

    def reset_prefix_cache(self) -> None:
        """Let requests that are submitted from now on find nothing of earlier ones; `Unavailable` without an engine."""
        if not self.healthy:
            raise Unavailable("the engine is not running; the server's log says why")
        with contextlib.suppress(EngineFailure):  # it has just died: the next one's is empty
            self._client.reset_prefix_cache()

    def restart(self) -> None:
        """Start engines anew, one after the other; requests go on. Waits for nothing, not for a lock either."""
        if self.healthy:
            self._client.restart()

    def fail_all(self, error: QuireError) -> None:
        """End every request in flight with `error`."""
        for stream in set(self._streams.values()):
            stream.fail(error)

    def close(self) -> None:
        """Stop the reader and the engine; may be called twice, from any thread but the reader's."""
        self._closing.set()
        if self._reader is not None:
            self._reader.join(timeout=5.0)
        self._client.close()

    def _admit(self, sequences: int, prompt_tokens: int, tenant: str, most: int = 0) -> None:
        if not self.healthy:
            raise Unavailable("the engine is not running; the server's log says why")
        try:
            self.admission.enter(sequences, prompt_tokens, tenant, most)
        except Overloaded:
            self.metrics.rejected("queue_full")
            raise
        self.metrics.steps.in_flight = self.in_flight

    def _leave(self, sequences: int, prompt_tokens: int, tenant: str) -> None:
        self.admission.leave(sequences, prompt_tokens, tenant)
        self.metrics.steps.in_flight = self.in_flight

    def release(self, request: Request, abort: bool) -> None:
        """A request's last sequence ended: give its place back, and `abort` what the engine still does for it."""
        if self._streams.pop(request.id, None) is None:
            return
        self._pausing(request.id, False)
        self._leave(request.params.n, len(request.prompt), request.tenant)
        self.admission.image_bytes -= image_bytes(request)
        self.admission.took(time.monotonic() - request.arrival)
        self.metrics.request_end(request)
        if abort:
            self.abort(request.id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Tell the engine that nobody waits for a request, or for one of its sequences, any more."""
        if self._failure is None:
            with contextlib.suppress(EngineFailure):  # it has just died, which the reader is about to find out
                self._client.abort(request_id, index)

    def pause(self, request_id: str) -> bool:
        """Nobody reads what comes of it: have the engine do nothing for it, where something keeps what came."""
        paused = self.healthy and self._client.pause(request_id)
        if paused:
            self._pausing(request_id, True)
        return paused

    def resume(self, request_id: str) -> None:
        """Somebody reads again."""
        self._expect_progress()
        self._pausing(request_id, False)
        if self.healthy:
            self._client.resume(request_id)

    def _pausing(self, request_id: str, paused: bool) -> None:
        (self._paused.add if paused else self._paused.discard)(request_id)
        self.metrics.steps.paused = len(self._paused)

    def _expect_progress(self) -> None:
        """The engine is about to have work: what it does from now on counts."""
        if not self._busy:
            self._progress = time.monotonic()

    def _read(self) -> None:
        assert self._loop is not None
        while not self._closing.is_set():
            try:
                report = self._client.poll(POLL_SECONDS)
            except QuireError as error:
                self._call(self._die, error)
                return
            except Exception as error:
                logger.exception("the engine's reader failed")
                self._call(self._die, EngineFailure(f"the engine's reader failed: {type(error).__name__}"))
                return
            if report is not None:
                self._call(self._deliver, report)

    def _call(self, function: object, argument: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)  # type: ignore[arg-type]

    def _deliver(self, report: StepReport) -> None:
        now = self._progress = time.monotonic()
        self.metrics.step(report.stats)
        for change in report.changes:
            self.info = msgspec.structs.replace(self.info, adapters=change.adapters)
            self._changes.settle(change.name, BadRequest(change.error, param="lora_name") if change.error else None)
        for at in range(0, len(report.outputs), PORTION):
            self.turns.later(partial(self._put, report.outputs[at : at + PORTION], now))

    def _put(self, outputs: Sequence[Output], now: float) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output, now)

    def _die(self, error: QuireError) -> None:
        self.turns.later(partial(self._end_all, error))  # behind the tokens that came before it

    def _end_all(self, error: QuireError) -> None:
        if self._closing.is_set():
            return
        logger.error("the engine died: %s", error)
        self._failure = error
        self.metrics.steps.healthy = False
        self._changes.fail(Unavailable("the engine failed; the server's log says why"))
        # Clients get no detail: messages of failures can hold paths and addresses.
        self.fail_all(EngineFailure("the engine failed; the server's log says why"))
