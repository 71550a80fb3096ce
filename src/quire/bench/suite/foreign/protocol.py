"""What a measured process is asked, a JSON object a line on standard input, and how it answers on standard output.

The first answer says that the model is loaded, and what runs. Then `{"do": NAME, ...}` calls a method of the engine;
a number it returns is a rate in tokens/s. `load` puts requests on an engine that takes one step at a time, and notes
when every token came, by the process's own clock from the first moment on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TextIO


class Item(NamedTuple):
    """A request: its tokens, how many are to follow, and the second at which it is due."""

    prompt: list[int]
    output: int
    due: float


class Stepping(Protocol):
    """An engine whose steps are called one by one."""

    def submit(self, number: int, prompt: list[int], output: int) -> None:
        """Queue request `number`, answered greedily to exactly `output` tokens."""

    def step(self) -> Sequence[tuple[int, int, bool]]:
        """Run one step: (request, tokens that came, whether it is done) for those that got any."""


class Record(NamedTuple):
    """Times of one request: when it was due, sent, and when how many tokens came."""

    due: float
    sent: float
    times: list[float]
    tokens: list[int]


def run_load(engine: Stepping, items: Sequence[Item], most: int) -> dict[str, Any]:
    """Send requests when they are due, at most `most` in flight (0: no bound), until all are answered.

    `records` in the order of `items`; `decode`: tokens and seconds of steps in which no request waited for its first.
    """
    records = [Record(item.due, 0.0, [], []) for item in items]
    left = sorted(range(len(items)), key=lambda i: items[i].due)[::-1]
    flying: set[int] = set()
    begun: set[int] = set()
    decoded, decoding = 0, 0.0
    started = time.perf_counter()
    while left or flying:
        now = time.perf_counter() - started
        while left and items[left[-1]].due <= now and (not most or len(flying) < most):
            number = left.pop()
            records[number] = records[number]._replace(sent=now)
            engine.submit(number, items[number].prompt, items[number].output)
            flying.add(number)
        if not flying:
            time.sleep(max(0.0, items[left[-1]].due - now))
            continue
        steady, before = flying <= begun, time.perf_counter()
        came = engine.step()
        after = time.perf_counter()
        for number, tokens, done in came:
            records[number].times.append(after - started)
            records[number].tokens.append(tokens)
            begun.add(number)
            if done:
                flying.remove(number)
        if steady:
            decoded += sum(tokens for _, tokens, _ in came)
            decoding += after - before
    return {"records": records, "decode": [decoded, decoding], "seconds": time.perf_counter() - started}


def serve(engine: Any, answers: TextIO = sys.stdout) -> None:
    """Say that `engine` is ready and what runs, then obey until the end of input; an error is an answer, too."""
    print(json.dumps({"ready": True} | engine.facts()), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            found = getattr(engine, command.pop("do"))(**command)
        except Exception as error:  # whatever a peer raises is what came of this command
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found if isinstance(found, dict) else {"rate": found}), file=answers, flush=True)
