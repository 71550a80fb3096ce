"""An `EngineClient` without a model: the next token is a hash of the prefix, speed and failures are set by the test."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from quire.core.errors import EngineFailure
from quire.core.request import Output, Request, Timing, TokenLogprob
from quire.engine.client import EngineInfo, StepReport
from quire.engine.stats import Stats


def stub_info(**changes: object) -> EngineInfo:
    """Facts of a small model that does not exist."""
    facts: dict[str, object] = {
        "model": "stub/hash",
        "served_name": "stub",
        "folder": "",
        "vocab_size": 6144,
        "max_model_len": 256,
        "eos_token_ids": (4,),
        "block_size": 16,
        "num_blocks": 64,
        "kv_bytes_per_token": 64,
        "weight_bytes": 1000,
        "max_num_queued_reqs": 200,
        "load_seconds": 0.25,
        "backend": "stub",
        "isa": "none",
        "threads": 1,
        "dtype": "float32",
        "quantization": "none",
        "kv_cache_dtype": "float32",
    }
    return EngineInfo(**(facts | changes))  # type: ignore[arg-type]


def next_token(prefix: Sequence[int], seed: int, index: int) -> int:
    """An ordinary token (8 .. 263) that depends on everything before it, the seed and the sequence."""
    data = ",".join(map(str, prefix)) + f"#{seed}#{index}"
    return 8 + hashlib.blake2b(data.encode(), digest_size=1).digest()[0]


def expected(request: Request, index: int = 0) -> list[int]:
    """The tokens the stub gives to sequence `index` of a request that is not cut short."""
    tokens = list(request.prompt)
    for _ in range(request.params.max_tokens or 16):
        tokens.append(next_token(tokens, request.seed, index))
        if tokens[-1] in request.params.stop_token_ids:
            break
    return tokens[len(request.prompt) :]


class WatchedEngine:
    """What a watchdog looks at: it notes that it was killed, and waited for a processor as long as a test says."""

    def __init__(self) -> None:
        self.killed, self.waited = False, 0.0

    def kill(self) -> None:
        """Note it."""
        self.killed = True

    def cpu_wait(self) -> float:
        """Seconds that the test says."""
        return self.waited


class _Row:
    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.tokens = [*request.prompt, *((request.emitted[index] or ()) if request.emitted else ())]
        self.started = time.monotonic()
        self.first = 0.0


class StubEngine:
    """Gives every running sequence one token per step.

    `step_seconds`: length of a step. `paused`: no steps while set. `dead`: `poll` raises. `poison`: requests fail with
    an error of `poison_kind` after this many tokens. `script`: these tokens instead of hashes, then the end token.
    """

    def __init__(self, info: EngineInfo | None = None, step_seconds: float = 0.0) -> None:
        self.info = info or stub_info()
        self.step_seconds = step_seconds
        self.paused = False
        self.dead = False
        self.poison: int | None = None
        self.poison_kind = "NumericError"
        self.script: list[int] | None = None
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.closed = self.resets = self.restarts = 0
        self._inbox: deque[Request] = deque()
        self._rows: list[_Row] = []
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._stats = Stats(total_blocks=self.info.num_blocks)

    @property
    def ready(self) -> bool:
        """Always."""
        return True

    def pause(self, request_id: str) -> bool:
        """Never: nothing here keeps what came of a request."""
        return False

    def resume(self, request_id: str) -> None:
        """Nothing was paused."""

    def change_adapter(self, name: str, folder: str) -> None:
        """There are none."""

    def reset_prefix_cache(self) -> None:
        """Count calls."""
        self.resets += 1

    def restart(self) -> None:
        """Count calls."""
        self.restarts += 1

    def kill(self) -> None:
        """Die."""
        self.dead = True

    def cpu_wait(self) -> float:
        """None."""
        return 0.0

    def submit(self, request: Request) -> None:
        """Start all `n` sequences at once. The request is encoded, as it would be on its way to an engine process."""
        request = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)
        with self._lock:
            self.submitted.append(request)
            live = [i for i in range(request.params.n) if not request.emitted or request.emitted[i] is not None]
            self._rows += [_Row(request, i) for i in live]
        self._work.set()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop the sequences of a request, or one of them."""
        with self._lock:
            self.aborted.append(request_id)
            self._rows = [r for r in self._rows if r.request.id != request_id or index not in (None, r.index)]

    @property
    def running(self) -> int:
        """Sequences that still get tokens."""
        return len(self._rows)

    def poll(self, timeout: float) -> StepReport | None:
        """One step of every sequence."""
        if self.dead:
            raise EngineFailure("the stub was told to die")
        if self.paused or not self._rows:
            self._work.wait(min(timeout, 0.005))
            self._work.clear()
            return None
        if self.step_seconds:
            time.sleep(self.step_seconds)
        with self._lock:
            rows = list(self._rows)
        outputs = [self._step(row) for row in rows]  # of thousands that takes long, and nobody waits for it
        with self._lock:
            ended = {(o.request_id, o.index) for o in outputs if o.finish_reason is not None}
            self._rows = [r for r in self._rows if (r.request.id, r.index) not in ended]
        old = self._stats
        prompts = sum(len(r.request.prompt) for r in self._rows if len(r.tokens) == len(r.request.prompt) + 1)
        self._stats = Stats(
            running=len(self._rows),
            used_blocks=len(self._rows),
            total_blocks=self.info.num_blocks,
            steps=old.steps + 1,
            step_tokens=len(outputs),
            prompt_tokens=old.prompt_tokens + prompts,
            generation_tokens=old.generation_tokens + sum(len(o.tokens) for o in outputs),
        )
        return StepReport(outputs, self._stats)

    def close(self) -> None:
        """Count calls."""
        self.closed += 1

    def _step(self, row: _Row) -> Output:
        request, params = row.request, row.request.params
        made = len(row.tokens) - len(request.prompt)
        cached = 0 if row.index == 0 and "cold" in request.cache_salt else min(16, len(request.prompt) - 1)
        out = Output(request_id=request.id, index=row.index, cached_tokens=cached)
        if self.poison is not None and made >= self.poison:
            out.finish_reason, out.error, out.error_kind = "error", "numerics: NaN in the logits", self.poison_kind
            return out
        token = self._token(row, made)
        row.tokens.append(token)
        out.tokens = [token]
        now = time.monotonic()
        if made == 0:
            row.first = now
            out.timing = Timing(arrival=request.arrival, scheduled=row.started, first_token=now, last_token=now)
            if params.prompt_logprobs is not None:
                scored = request.prompt[1:] if row.index == 0 else ()
                out.prompt_logprobs = [_logprob(t, params.prompt_logprobs) for t in scored]
        if params.logprobs is not None:
            out.logprobs = [_logprob(token, params.logprobs)]
        if token in params.stop_token_ids:
            out.finish_reason, out.stop_token = "stop", token
        elif token in request.eos_token_ids and not params.ignore_eos:
            out.finish_reason = "stop"
        elif made + 1 == params.max_tokens:
            out.finish_reason = "length"
        if out.finish_reason is not None:
            out.timing = Timing(arrival=request.arrival, scheduled=row.started, first_token=row.first, last_token=now)
        return out

    def _token(self, row: _Row, made: int) -> int:
        if self.script is not None:
            return self.script[made] if made < len(self.script) else self.info.eos_token_ids[0]
        return next_token(row.tokens, row.request.seed, row.index)


def _logprob(token: int, count: int) -> TokenLogprob:
    """The token at rank 1, then its neighbours."""
    top = tuple((token + i, -0.5 - i) for i in range(count))
    return TokenLogprob(token=token, logprob=-0.5, rank=1, top=top)
