"""Thousands of generated grammars against one server, honest requests beside them: `python tests/grammar_abuse.py`.

Every answer is looked at: an engine that dies, a status of 500 and more, or a request that takes more than `SLOWEST`
fails the run, and so do honest requests that take more than twice as long as beside as many clients who ask for the
same numbers of tokens under small schemas: so much is load, and what is more is abuse.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bombs import pattern, schema
from quire.text.structured.grammar_reader import _has_more_than
from raw_client import Answer, ask, request

CASES, CLIENTS, SLOWEST = 5000, 16, 5.0
HONEST_PAUSE = 0.1
MOST = 100_000
"""Some more than the server takes."""
NAMES = ("name", "age", "unit", "city", "tags", "of", "kind", "total")
CLASSES = (r"\p{L}", r"\p{Han}", r"[^\x00]", ".", "[\u0100-\uffff]", r"\w", r"[a-f]", r"\S")


def nested_repeats(rng: random.Random) -> str:
    """An expression repeated within repetitions."""
    found = rng.choice((*CLASSES, "a", "ab|a", "x?"))
    for _ in range(rng.randrange(1, 5)):
        least, most = rng.choice((0, 1, 2)), rng.choice((3, 20, 100, 1000, 99_999))
        found = f"(?:{found}){{{least},{most}}}"
    return found + rng.choice(("", "b", "$", "(?=c)"))


def lark(rng: random.Random) -> str:
    """A grammar of Lark: deep, ambiguous, of intersections, or of huge terminals."""
    depth = rng.choice((3, 60, 400))
    return rng.choice((
        f"start: X\nX: /{nested_repeats(rng)}/ & /{nested_repeats(rng)}/",
        f"start: X\nX: /{pattern(rng)}/ & ~/{pattern(rng)}/",
        "start: a*\n" + "\n".join(f"a{i or ''}: a{i + 1} | a{i + 1} a{i + 1}" for i in range(depth))
        + f'\na{depth}: "x"',
        f"start: x\nx: {'(' * depth}/{nested_repeats(rng)}/{')' * depth}",
        'start: x\nx: "a" x "b" | x x | ""',
        "start: " + " | ".join(f'"{i}{"y" * rng.randrange(20)}"' for i in range(rng.choice((5, 900, 4000)))),
        f"start: (X Y)*\nX: /{nested_repeats(rng)}/\nY: /{nested_repeats(rng)}/",
    ))  # fmt: skip


def shaped(rng: random.Random) -> Any:
    """A schema of `MOST` values and characters at most."""
    while _has_more_than(MOST, found := _schema(rng)):
        pass
    return found


def _schema(rng: random.Random) -> Any:
    """Of the crafted ones, deep, wide, or of long enums."""
    kind = rng.randrange(5)
    if kind == 0:
        return {"enum": [f"{rng.random()}" for _ in range(rng.choice((3, 500, 3000)))]}
    if kind == 1:
        wide = {f"{rng.choice(NAMES)}{i}": schema(rng, 1) for i in range(rng.choice((2, 40, 600)))}
        return {"type": "object", "properties": wide, "required": list(wide)[: rng.randrange(9)]}
    if kind == 2:
        return {"$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "v": schema(rng, 2)}}},
                "$ref": "#/$defs/n"}  # fmt: skip
    if kind == 3:
        return {"type": "string", "pattern": nested_repeats(rng), "minLength": rng.choice((0, 9, 5000))}
    return schema(rng)


def cases(count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """So many requests, each with the path it goes to; the same for a seed."""
    rng = random.Random(seed)
    for number in range(count):
        tokens, kind = rng.choice((4, 24, 60)), rng.randrange(6)
        body: dict[str, Any] = {"prompt": "x", "max_tokens": tokens, "user": "abuser", "seed": number}
        if kind == 0:
            yield "/v1/completions", body | {"structured_outputs": {"regex": nested_repeats(rng)}}
        elif kind == 1:
            yield "/v1/completions", body | {"structured_outputs": {"regex": pattern(rng)}}
        elif kind == 2:
            yield "/v1/completions", body | {"structured_outputs": {"grammar": lark(rng)}}
        elif kind == 3:
            asked = {"json": shaped(rng), "whitespace_pattern": nested_repeats(rng)}
            yield "/v1/completions", body | {"structured_outputs": asked}
        elif kind == 4:
            grammar = rng.choice(
                ({"type": "regex", "value": nested_repeats(rng)}, {"type": "json", "value": shaped(rng)})
            )
            yield "/generate", {"inputs": "x", "parameters": {"max_new_tokens": tokens, "grammar": grammar}}
        else:
            made = {"name": "a", "schema": shaped(rng)}
            yield "/v1/completions", body | {"response_format": {"type": "json_schema", "json_schema": made}}


def small(count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """As many requests as `cases` gives, of the same numbers of tokens, under small schemas of their own."""
    rng = random.Random(seed)
    for number in range(count):
        path, body = honest(100_000 + number)[1]
        yield path, body | {"max_tokens": rng.choice((24, 60)), "user": "company"}


def honest(number: int) -> list[tuple[str, dict[str, Any]]]:
    """A chat, and a small schema that no request had before."""
    held = {f"{NAMES[number % 8]}_{number}": {"type": "integer"}, "ok": {"type": "boolean"}}
    small = {"type": "object", "properties": held, "required": ["ok"], "additionalProperties": False}
    made = {"type": "json_schema", "json_schema": {"name": "a", "schema": small}}
    return [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"hello {number}"}], "max_tokens": 8}),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 40, "user": "honest", "seed": number, "response_format": made},
        ),
    ]


@dataclass
class Report:
    """What came of a run: seconds of each request, by kind."""

    statuses: Counter[int] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    quiet: dict[str, list[float]] = field(default_factory=dict)
    calm: dict[str, list[float]] = field(default_factory=dict)
    beside: dict[str, list[float]] = field(default_factory=dict)

    def note(self, answer: Answer, seconds: float, path: str, body: dict[str, Any]) -> None:
        """Count an answer to an abuse."""
        self.statuses[answer.status] += 1
        said = f"{path} {json.dumps(body)[:300]}"
        self.slowest = max(self.slowest, (seconds, said))
        if answer.status >= 500 or b'"finish_reason":"error"' in answer.body:
            self.failed.append(f"{answer.status}: {answer.body[:200]!r} to {said}")

    def wrong(self, slowest: float = SLOWEST, times: float = 2.0) -> list[str]:
        """What fails the run."""
        found = [f"{len(self.failed)} failed; {self.failed[0]}"] if self.failed else []
        if self.slowest[0] > slowest:
            found.append(f"{self.slowest[0]:.1f} s: {self.slowest[1]}")
        for path, alone in self.calm.items():
            least, now = statistics.median(alone), statistics.median(self.beside.get(path, [0.0]))
            if now > times * least:
                found.append(f"honest {path}: {now:.3f} s, {least:.3f} s beside honest ones")
        return found


async def _timed(port: int, path: str, body: dict[str, Any]) -> tuple[Answer, float]:
    began = time.monotonic()
    answer = await ask(port, request(body, path))
    return answer, time.monotonic() - began


async def _be_honest(port: int, into: dict[str, list[float]], first: int, count: int | None) -> None:
    """Ask `count` times, or until it is cancelled."""
    number = first
    while count is None or number < first + count:
        for path, body in honest(number):
            answer, seconds = await _timed(port, path, body)
            assert answer.status == 200, (answer.status, answer.body[:300])
            into.setdefault(path, []).append(seconds)
        number += 1
        await asyncio.sleep(HONEST_PAUSE if count is None else 0)


async def abuse(port: int, count: int, seed: int, clients: int = CLIENTS, quiet: int = 20) -> Report:
    """Send `count` cases to the server, `clients` at a time; before that `quiet` times as many honest ones."""
    report, waiting = Report(), cases(count, seed)
    await _be_honest(port, report.quiet, 0, quiet)
    company = small(quiet * clients, seed)

    async def in_company() -> None:
        for path, body in company:
            assert (await _timed(port, path, body))[0].status == 200

    async def client() -> None:
        for path, body in waiting:
            answer, seconds = await _timed(port, path, body)
            report.note(answer, seconds, path, body)
            if (done := sum(report.statuses.values())) % 500 == 0:
                print(f"{done} cases: {dict(report.statuses)}, slowest {report.slowest[0]:.1f} s", flush=True)

    for into, first, work in ((report.calm, 5_000, in_company), (report.beside, 10_000, client)):
        beside = asyncio.create_task(_be_honest(port, into, first, None))
        await asyncio.gather(*(work() for _ in range(clients)))
        beside.cancel()
        await asyncio.wait([beside])
        if not beside.cancelled() and (error := beside.exception()) is not None:
            report.failed.append(f"an honest request: {error}")
    return report


def told(report: Report, deaths: float) -> list[str]:
    """Print a report; what fails the run."""
    print(f"statuses: {dict(sorted(report.statuses.items()))}; deaths of an engine: {deaths:g}")
    print(f"slowest: {report.slowest[0]:.2f} s, {report.slowest[1][:200]}")
    for path in report.quiet:
        for kind, found in (("in quiet", report.quiet), ("in company", report.calm), ("beside", report.beside)):
            now = found.get(path, [0.0])
            print(f"honest {path} {kind}: {statistics.median(now):.3f} s, most {max(now):.3f}, {len(now)} times")
    for line in report.failed[:20]:
        print(line)
    return report.wrong() + ([f"{deaths:g} engines died"] if deaths else [])


def main() -> int:
    """0 where nothing died, failed or waited."""
    from test_server_death import Serving

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    given = parser.parse_args()
    with Serving("pydoc", "--max-engine-deaths", "1000000") as server, server.up() as client:
        port = client.base_url.port
        assert port is not None
        report = asyncio.run(abuse(port, given.cases, given.seed, given.clients))
        deaths = re.search(r"^quire:engine_restarts_total\{.*\} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        assert deaths, "the metric is missing"
        wrong = told(report, float(deaths[1]))
    for line in wrong:
        print(f"FAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
