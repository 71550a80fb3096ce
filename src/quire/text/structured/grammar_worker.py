"""The process that reads grammars, which come with requests and are trusted with nothing.

Whoever asks for a grammar may write one that takes for ever or all memory. So each is first compiled here, in a fork
under the kernel's bounds of CPU time and address space (`quire.text.fork_server`; `quire.text.bounded_process` says
how the process is started), and brought to an end once: what passes costs the engine no more. `grammar_worker.py
FOLDERS MEMORY`: bytes that a fork may have beside those of the process at rest.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from quire.text.fork_server import serve
from quire.text.structured.completion_search import FIRST, LIMITS, byte_tokenizer, hints_of, shortest
from quire.text.structured.grammar_source import NotOffered, explained, grammar_of, within

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
    rest = {"options": {}, "frame": "", "special": [], "usable": list(range(256))}
    read({"kind": "json_object", "value": True, **rest})  # loads what the first job would
    serve(lambda data: read(json.loads(data)), memory)


if __name__ == "__main__":
    import sys

    main(int(sys.argv[3]))
