"""The process that reads grammars, which come with requests and are trusted with nothing.

Whoever asks for a grammar may write one that takes for ever or all memory. So each is first compiled here, under the
kernel's bounds of CPU time and address space (`quire.text.bounded` says how it is started), and brought to an end once:
what passes costs the engine no more. `helper.py FOLDERS MEMORY`: bytes beyond those of the process at rest.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from quire.text.structured.search import FIRST, LIMITS, byte_tokenizer, hints_of, shortest
from quire.text.structured.spec import NotOffered, explained, grammar_of, within

HEAD = struct.Struct("!Id")
MESSAGE = 400
"""Characters of an error that are told."""


def read(job: dict[str, Any]) -> dict[str, Any]:
    """{"grammar", "completion"}: what "kind" and "value" ask for, and byte tokens that are a short text of it (None:
    none was found). Or {"error"}."""
    special = job["special"]
    try:
        grammar = within(job["frame"], grammar_of(job["kind"], job["value"], job["options"], special))
        matcher = LLMatcher(byte_tokenizer(special), grammar, log_level=0, limits=LIMITS)
    except (NotOffered, ValueError, RecursionError) as error:
        return {"error": str(error)[:MESSAGE] or type(error).__name__}
    if matcher.is_error():
        return {"error": explained(job, matcher.get_error())[:MESSAGE]}
    completion = shortest(matcher, 256 + len(special), FIRST, frozenset(job["usable"]), hints_of(grammar))
    return {"grammar": grammar, "completion": completion}


def main(memory: int) -> None:
    """Answer jobs until the socket ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    rest = {"options": {}, "frame": "", "special": [], "usable": list(range(256))}
    read({"kind": "json_object", "value": True, **rest})
    at_rest = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for name, most in (
        ("RLIMIT_AS", at_rest + memory), ("RLIMIT_NOFILE", 0), ("RLIMIT_NPROC", 0), ("RLIMIT_FSIZE", 0),
        ("RLIMIT_CORE", 0),
    ):  # fmt: skip
        resource.setrlimit(getattr(resource, name), (most, most))
    _write({})
    while True:
        size, seconds = HEAD.unpack(_take(HEAD.size))
        job = json.loads(_take(size))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            reply = read(job)
        except MemoryError:
            reply = {"error": f"it takes more than {memory >> 20} MiB of memory"}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        _write(reply)


def _take(size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(0, min(size - len(parts), 1 << 20))
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


def _write(reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode()
    rest = memoryview(len(data).to_bytes(4, "big") + data)
    while rest:
        rest = rest[os.write(0, rest) :]


if __name__ == "__main__":
    import sys

    main(int(sys.argv[3]))
