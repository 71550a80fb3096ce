"""What requests ask for is read by a process that the kernel bounds (`helper`), once for each thing asked."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import BadRequest, Unavailable
from quire.core.structured import StructuredOutputsParams, refusal
from quire.text.bounded import BoundedProcess, Ended, Large, Program, Spent
from quire.text.structured.vocabulary import Vocabulary

SECONDS = 2.0
"""CPU time for one grammar."""
MEMORY = 256 << 20
MAX_BYTES = 64 << 10
"""Longest text of what is asked for."""
KEPT = 256
"""Things asked for whose grammars are kept."""
_PROGRAM = Program(
    "the process that reads grammars", Path(__file__).with_name("helper.py"), ("llguidance", "quire"), (MEMORY,)
)


class Read(msgspec.Struct, frozen=True):
    """A grammar, and tokens that are a short text of it."""

    grammar: str
    completion: tuple[int, ...]


class Reader:
    """One process, started with the first grammar; any thread may call, and one is served at a time."""

    def __init__(self) -> None:
        self._process: BoundedProcess | None = None
        self._lock = threading.Lock()
        self._keeping = threading.Lock()
        self._kept: OrderedDict[tuple[bytes, int], Read | BadRequest] = OrderedDict()

    def read(
        self, asked: StructuredOutputsParams, ends: Iterable[int], vocabulary: Vocabulary, frame: str = ""
    ) -> Read:
        """The grammar of what is `asked`; `BadRequest` naming the field and the place when there is none.

        `ends`: tokens that end a text, and so can be no part of it. `frame`: Lark in which the answer that is asked for
        is `@answer`, "" = it is all.
        """
        kind = asked.kind
        job = {"kind": kind, "value": getattr(asked, kind), "options": _options(asked), "frame": frame}
        try:
            text = json.dumps(job, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise refusal(f"it cannot be written as JSON: {error}", kind) from None
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_BYTES:
            raise refusal(f"{size} bytes are more than the {MAX_BYTES} that a grammar may have", kind)
        ends = frozenset(ends)
        key = (text.encode("utf-8", "surrogatepass"), hash((vocabulary.number, ends)))
        if (known := self._known(key)) is None:
            with self._lock:
                if (known := self._known(key)) is None:
                    known = self._keep(key, self._found(job, ends, vocabulary))
        if isinstance(known, BadRequest):
            raise BadRequest(known.message, param=known.param)
        return known

    def _known(self, key: tuple[bytes, int]) -> Read | BadRequest | None:
        """What was found before, so that whoever asks for nonsense again costs nobody anything."""
        with self._keeping:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: tuple[bytes, int], found: Read | BadRequest) -> Read | BadRequest:
        with self._keeping:
            self._kept[key] = found
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    def _found(self, job: dict[str, Any], ends: frozenset[int], vocabulary: Vocabulary) -> Read | BadRequest:
        try:
            return _spelled(job["kind"], self._ask(job, ends, vocabulary), ends, vocabulary)
        except BadRequest as error:
            return error

    def _ask(self, job: dict[str, Any], ends: frozenset[int], vocabulary: Vocabulary) -> dict[str, Any]:
        kind = job["kind"]
        job = job | {"special": list(vocabulary.special), "usable": sorted(vocabulary.usable(ends))}
        data = json.dumps(job).encode()
        process = self._process or BoundedProcess(_PROGRAM)
        self._process = None
        try:
            reply = dict(process.exchange(data, SECONDS))
        except TimeoutError:
            process.close()
            raise Unavailable("no grammar was read in time; the machine is busy") from None
        except Spent:
            raise refusal(f"it takes more than {SECONDS:g} s of CPU time to read; make it simpler", kind) from None
        except (Ended, Large):
            told = f"it takes more than {MEMORY >> 20} MiB of memory or too deep a stack to read; make it simpler"
            raise refusal(told, kind) from None
        self._process = process
        return reply

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def after_fork(self) -> None:
        """In the child of a fork: start anew, and hold no end of what belongs to the parent."""
        if self._process is not None:
            self._process.forget()
        self.__init__()  # type: ignore[misc]


def _options(asked: StructuredOutputsParams) -> dict[str, Any]:
    names = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "strict")
    return {name: getattr(asked, name) for name in names}


def _spelled(kind: str, reply: dict[str, Any], ends: frozenset[int], vocabulary: Vocabulary) -> Read:
    """The reply with its completion in tokens."""
    if "error" in reply:
        raise refusal(reply["error"], kind)
    if reply["completion"] is None:
        raise refusal("no text of it was found, so it is not known to end; make it simpler", kind)
    tokens = vocabulary.fewest(reply["completion"], ends)
    if tokens is None:
        raise refusal("this model's vocabulary cannot spell it", kind)
    return Read(reply["grammar"], tuple(tokens))


READER = Reader()
"""That of this process."""
atexit.register(READER.close)
os.register_at_fork(after_in_child=READER.after_fork)
