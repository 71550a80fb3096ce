"""Whatever fails of one request's part of a step ends that request alone: same engine, same bits of all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine_answers import Answer
from injected import ERRORS, SITES, Injection, Running, Site, others, raised, running, victim
from often import one_of
from oracle import BACKENDS
from quire.core.request import Output, Request
from turns import turns

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
WHEN = ("first", "middle", "last")
Ended = dict[tuple[str, int], Output]


def serve(run: Running, requests: list[Request]) -> tuple[dict[str, bytes], Ended]:
    """The bits of each request's answer, and the outputs that ended sequences."""
    answers, ends, refused = {r.id: Answer([], []) for r in requests}, Ended(), list[Output]()
    pooled = dict.fromkeys(answers, b"")
    engine = run.engine.engine
    run.forget()
    for request in requests:
        if (output := engine.submit(run.ready(request))) is not None:
            refused.append(output)
    for output in refused:
        ends[output.request_id, output.index] = output
    for _ in turns(lambda: engine.has_work, 2000):
        for output in engine.step():
            answers[output.request_id].tokens += output.tokens
            answers[output.request_id].logprobs += output.logprobs
            pooled[output.request_id] += output.pooled
            if output.finish_reason is not None:
                assert (output.request_id, output.index) not in ends, output
                ends[output.request_id, output.index] = output
    return {name: answer.bits() + pooled[name] for name, answer in answers.items()}, ends


class Beside:
    """Engines by kind, made when first asked for, and what the others give in each when they run alone."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self._home, self._stack = home, stack
        self._runs: dict[str, tuple[Running, dict[str, bytes]]] = {}
        self._calls: dict[Any, int] = {}

    def of(self, kind: str) -> tuple[Running, dict[str, bytes]]:
        """An engine, and the bits of each of `others` alone."""
        if kind not in self._runs:
            run = self._stack.enter_context(running(kind, self._home))
            alone: dict[str, bytes] = {}
            for request in others(kind):
                bits, ends = serve(run, [request])
                assert ends[request.id, 0].error is None
                alone |= bits
            self._runs[kind] = run, alone
        return self._runs[kind]

    def calls(self, site: Site) -> int:
        """How often the work of a victim to which nothing happens goes through `site`."""
        key = site.kind, site.sort, site.owner, site.name
        if key not in self._calls:
            injection = Injection(site)
            self._serve(injection)
            self._calls[key] = injection.calls
        return self._calls[key]

    def _serve(self, injection: Injection) -> tuple[dict[str, bytes], Ended]:
        run, _ = self.of(injection.site.kind)
        asked = others(injection.site.kind)
        with pytest.MonkeyPatch.context() as patched:
            injection.install(patched, run)
            return serve(run, [*asked[:8], victim(injection.site.sort), *asked[8:]])

    def check(self, site: Site, error: type[BaseException], when: str) -> None:
        """Raise `error` in the victim's part: it ends, by name; the others and the engine are as if nothing was."""
        run, alone = self.of(site.kind)
        calls, engine = self.calls(site), run.engine.engine
        assert calls, f"{site.name}: the victim's work does not go through it"
        at = {"first": 1, "middle": (calls + 1) // 2, "last": calls}[when]
        bits, ends = self._serve(Injection(site, raised(error), at))
        failed = [output for (name, _), output in ends.items() if name == "victim" and output.error is not None]
        assert failed, "the victim ends with an error"
        for output in failed:
            assert output.finish_reason == "error" and output.error_kind == "PartFailure"
            assert output.error is not None and output.error.startswith(f"{site.part}: "), output.error
            assert error.__name__ in output.error and "made" not in output.error, "what it says is for the log alone"
        for name, wanted in alone.items():
            assert ends[name, 0].error is None, (name, ends[name, 0].error)
            assert bits[name] == wanted, name
        assert engine is run.engine.engine and not engine.has_work and not engine.pool.num_used
        engine.check()


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    with ExitStack() as stack:
        yield Beside(tmp_path_factory.mktemp("blame"), stack)


WAYS = [
    (site, ERRORS[(i * 3 + j * 5 + k) % len(ERRORS)], when)
    for i, site in enumerate(SITES)
    for j, when in enumerate(WHEN)
    for k in (0, 1)
]


def named(value: Any) -> str:
    """What a case is called."""
    if isinstance(value, Site):
        return f"{value.kind}-{value.sort}-{value.owner.rsplit('.', 1)[-1]}.{value.name}"
    return value if isinstance(value, str) else value.__name__


def test_there_are_200_ways() -> None:
    assert len(WAYS) >= 200 and len({way[0].part for way in WAYS}) == 8


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("site", "error", "when"), one_of(13, WAYS), ids=named)
def test_one_request_fails_alone(beside: Beside, site: Site, error: type[BaseException], when: str) -> None:
    beside.check(site, error, when)
