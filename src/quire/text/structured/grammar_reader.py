"""What requests ask for is read by processes that the kernel bounds (`helper`), once for each thing asked.
See docs/design/structured-output.md."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import BadRequest, Overloaded, QuireError, Unavailable
from quire.core.structured import StructuredOutputsParams, refusal
from quire.text.bounded_process import CpuTimeExceeded, JobProcess, JobResult, ProcessEnded, Program, ReplyTooLarge
from quire.text.structured.grammar_queue import GrammarJob, GrammarJobs
from quire.text.structured.vocabulary import Vocabulary

SECONDS = 2.0
"""CPU time for one grammar."""
FIRST_SECONDS = 0.2
"""CPU time of a first try, where all readers but one are at work on what takes longer. Schemas of a hundred names take
a tenth of it."""
READERS = max(3, min(4, os.cpu_count() or 1))
"""Most processes: one is always for what was not tried yet."""
WALL_SECONDS = 60.0
"""Time for an answer: a reader that is that late hangs, as CPU time is bounded by itself."""
PATIENCE = 4.5
"""Seconds that a request over HTTP waits for its grammar, its turn and the reading."""
IDLE_SECONDS = 60.0
"""Without work, after which a reader ends."""
MEMORY = 256 << 20
MAX_BYTES = 64 << 10
"""Longest text of what is asked for."""
KEPT, KEPT_BYTES = 256, 8 << 20
"""Things asked for whose grammars are kept, and what these hold."""
_PROGRAM = Program(
    "the process that reads grammars", Path(__file__).with_name("grammar_worker.py"), ("llguidance", "quire"), (MEMORY,)
)


class CompiledGrammar(msgspec.Struct, frozen=True):
    """A grammar, and tokens that are a short text of it."""

    grammar: str
    completion: tuple[int, ...]


class GrammarReader:
    """Threads with a process each, begun when there is work for them and ended when there is none; any thread may call.

    Whose turn it is is said by `GrammarJobs`. A job is read at once where a reader may take all of `SECONDS` over it,
    else tried for `FIRST_SECONDS`; if these do not suffice it waits for one that may. So what is read fast waits for
    `FIRST_SECONDS` of a few others, and never for a bomb.
    """

    def __init__(self, readers: int = READERS) -> None:
        self._most = readers
        self._turns = GrammarJobs()
        self._change = threading.Condition()
        self._threads = self._idle = self._whole = 0
        self._closed = False
        self._processes: set[JobProcess] = set()
        self._jobs: dict[tuple[str, tuple[bytes, int]], GrammarJob] = {}
        self._kept: OrderedDict[tuple[bytes, int], CompiledGrammar | BadRequest] = OrderedDict()
        self._kept_bytes = 0

    def read(
        self,
        asked: StructuredOutputsParams,
        ends: Iterable[int],
        vocabulary: Vocabulary,
        frame: str = "",
        tenant: str = "",
    ) -> CompiledGrammar:
        """What `ask` comes to."""
        return self.ask(asked, ends, vocabulary, frame, tenant).result()

    def ask(
        self,
        asked: StructuredOutputsParams,
        ends: Iterable[int],
        vocabulary: Vocabulary,
        frame: str = "",
        tenant: str = "",
    ) -> Future[CompiledGrammar]:
        """The grammar of what is `asked`; `BadRequest` naming the field and the place when there is none.

        `ends`: tokens that end a text, and so can be no part of it. `frame`: Lark in which the answer that is asked for
        is `@answer`, "" = it is all. `tenant`: who asks; `Overloaded` where too many of theirs wait. Whoever cancels
        the future waits no longer; what is being read then is kept all the same.
        """
        kind = asked.kind
        job = {"kind": kind, "value": getattr(asked, kind), "options": _options(asked), "frame": frame}
        text = _text(job, kind)
        ends = frozenset(ends)
        key = (hashlib.blake2b(text, digest_size=32).digest(), hash((vocabulary.number, ends)))
        found: Future[CompiledGrammar] = Future()
        with self._change:
            if (known := self._known(key)) is not None:
                _tell(found, known)
                return found
            waiting = self._jobs.get((tenant, key))
            if waiting is None:
                waiting = GrammarJob(tenant, key, job, ends, vocabulary)
                self._turns.add(waiting, SECONDS)
                self._jobs[tenant, key] = waiting
            waiting.asked.append(found)
            self._call_reader()
        return found

    @property
    def waiting(self) -> int:
        """Grammars that somebody waits for."""
        with self._change:
            return sum(job.wanted for job in self._jobs.values())

    def _known(self, key: tuple[bytes, int]) -> CompiledGrammar | BadRequest | None:
        """What was found before, so that whoever asks for nonsense again costs nobody anything."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def _keep(self, key: tuple[bytes, int], found: CompiledGrammar | BadRequest) -> None:
        if (before := self._kept.pop(key, None)) is not None:
            self._kept_bytes -= _size(before)
        self._kept[key] = found
        self._kept_bytes += _size(found)
        while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= _size(self._kept.popitem(last=False)[1])

    def _call_reader(self) -> None:
        """Have somebody take a job."""
        if self._idle:
            self._change.notify()
        elif self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._work, name="quire-grammars", daemon=True).start()

    # ------------------------------------------------------------------------------------------------------ of a thread

    def _work(self) -> None:
        process: JobProcess | None = None
        while (taken := self._next()) is not None:
            job, whole = taken
            found: CompiledGrammar | QuireError | None
            try:
                process, found = self._serve(process, job, whole)
            except Exception as error:
                found = Unavailable(f"{_PROGRAM.name} fails: {type(error).__name__}: {error}")
            self._finish(job, whole, found)
        self._end(process)

    def _next(self) -> tuple[GrammarJob, bool] | None:
        """A job, and whether it may take all of its time; None: there is nothing to be done any more."""
        end = time.monotonic() + IDLE_SECONDS
        with self._change:
            while not self._closed:
                whole = self._whole < self._most - 1
                if (job := self._turns.take(whole)) is not None:
                    self._whole += whole
                    return job, whole
                self._idle += 1
                late = not self._change.wait(end - time.monotonic()) and time.monotonic() >= end
                self._idle -= 1
                if late:
                    break
            self._threads -= 1
            return None

    def _serve(
        self, process: JobProcess | None, job: GrammarJob, whole: bool
    ) -> tuple[JobProcess | None, CompiledGrammar | QuireError | None]:
        """What is found; None: it takes longer than it may now. And the process for the next one."""
        with self._change:
            known = self._known(job.key)
        if known is not None:
            return process, known
        asked = job.job | {"special": list(job.vocabulary.special), "usable": sorted(job.vocabulary.usable(job.ends))}
        data = json.dumps(asked).encode()
        seconds = SECONDS if whole else FIRST_SECONDS
        for last in (False, True):
            try:
                process = process or self._begin()
                done = process.do(data, seconds, WALL_SECONDS)
                return process, self._found(job, done, whole)
            except Unavailable as error:
                return None, error
            except (ProcessEnded, CpuTimeExceeded, ReplyTooLarge):  # the process itself, by what looks for memory, say
                self._end(process)
                process = None
                if last or self._closed:
                    return None, Unavailable(f"{_PROGRAM.name} was ended by something else; try again")
            except TimeoutError:
                self._end(process)
                return None, Overloaded(
                    "no grammar was read in time; the machine is busy: try again in 5 s", retry_after=5
                )
        raise AssertionError("returned before")

    def _found(self, job: GrammarJob, done: JobResult, whole: bool) -> CompiledGrammar | BadRequest | None:
        kind = job.job["kind"]
        begun = time.thread_time()
        try:
            if done.reply is not None:
                return _spelled(kind, done.reply, job.ends, job.vocabulary)
            if not done.spent:
                told = f"it takes more than {MEMORY >> 20} MiB of memory or too deep a stack to read; make it simpler"
                raise refusal(told, kind)
            if not whole:
                return None
            raise refusal(f"it takes more than {SECONDS:g} s of CPU time to read; make it simpler", kind)
        except BadRequest as error:
            return error
        finally:
            with self._change:
                self._turns.charge(job.tenant, done.cpu + time.thread_time() - begun)

    def _finish(self, job: GrammarJob, whole: bool, found: CompiledGrammar | QuireError | None) -> None:
        with self._change:
            self._whole -= whole
            if found is None:
                self._turns.put_off(job)
            else:
                self._jobs.pop((job.tenant, job.key), None)
                if isinstance(found, (CompiledGrammar, BadRequest)):
                    self._keep(job.key, found)
            self._change.notify()  # another may take all of its time now
        if found is not None:
            for future in job.asked:
                _tell(future, found)

    # -------------------------------------------------------------------------------------------------------- processes

    def _begin(self) -> JobProcess:
        process = JobProcess(_PROGRAM)
        with self._change:
            self._processes.add(process)
        return process

    def _end(self, process: JobProcess | None) -> None:
        if process is not None:
            with self._change:
                self._processes.discard(process)
            process.close()

    def close(self) -> None:
        """End the processes; nothing is read any more."""
        with self._change:
            self._closed = True
            processes = list(self._processes)
            self._change.notify_all()
        for process in processes:
            process.close()

    def after_fork(self) -> None:
        """Start anew in the child of a fork: start anew, and hold no end of what belongs to the parent."""
        for process in self._processes:
            process.forget()
        self.__init__(self._most)  # type: ignore[misc]


def _size(found: CompiledGrammar | BadRequest) -> int:
    """Bytes that are kept of it, about."""
    return len(found.grammar) + 8 * len(found.completion) if isinstance(found, CompiledGrammar) else len(found.message)


def _tell(future: Future[CompiledGrammar], found: CompiledGrammar | QuireError) -> None:
    """Let whoever waits know, if they still do."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(found, CompiledGrammar):
        future.set_result(found)
    elif isinstance(found, BadRequest):
        future.set_exception(BadRequest(found.message, param=found.param))
    elif isinstance(found, Overloaded):
        future.set_exception(Overloaded(found.message, retry_after=found.retry_after))
    else:
        future.set_exception(Unavailable(found.message))


def _text(job: dict[str, Any], kind: str) -> bytes:
    """What identifies a job; `BadRequest` where it is too long, which is known before all of it is written."""
    if _has_more_than(MAX_BYTES, job["value"]):
        raise refusal(f"its bytes are more than the {MAX_BYTES} that a grammar may have", kind)
    try:
        text = json.dumps(job, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal(f"it cannot be written as JSON: {error}", kind) from None
    if len(text) > MAX_BYTES:
        raise refusal(f"{len(text)} bytes are more than the {MAX_BYTES} that a grammar may have", kind)
    return text


def _has_more_than(most: int, value: Any) -> bool:
    """Whether there are more values and characters in `value` than `most`."""
    left, count = [value], 0
    while left and count <= most:
        found = left.pop()
        count += 1
        if isinstance(found, str):
            count += len(found)
        elif isinstance(found, dict):
            count += len(found)
            left += (*found, *found.values()) if count <= most else ()
        elif isinstance(found, list):
            count += len(found)
            left += found if count <= most else ()
    return count > most


def _options(asked: StructuredOutputsParams) -> dict[str, Any]:
    names = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "strict")
    return {name: getattr(asked, name) for name in names}


def _spelled(kind: str, reply: Mapping[str, Any], ends: frozenset[int], vocabulary: Vocabulary) -> CompiledGrammar:
    """The reply with its completion in tokens."""
    if "error" in reply:
        raise refusal(reply["error"], kind)
    if reply["completion"] is None:
        raise refusal("no text of it was found, so it is not known to end; make it simpler", kind)
    tokens = vocabulary.fewest(reply["completion"], ends)
    if tokens is None:
        raise refusal("this model's vocabulary cannot spell it", kind)
    return CompiledGrammar(reply["grammar"], tuple(tokens))


READER = GrammarReader()
"""That of this process."""
atexit.register(READER.close)
os.register_at_fork(after_in_child=READER.after_fork)
