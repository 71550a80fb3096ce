"""Templates, schemas, patterns and grammars that mean harm, beside streams that nobody may notice them in."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bombs import constrained, pattern, schema, template
from live_server import LiveServer, live, wait_until
from quire.core.errors import BadRequest, ModelError
from quire.server.api import shapes
from quire.text import template_renderer
from quire.text.structured import grammar_reader
from quire.text.template import ChatTemplate
from shaped import PERSON
from stub_engine import StubEngine
from test_text_render import BROKEN, FAILING, LARGE, LONG
from test_text_template import BOMBS, make

SECONDS = 6.0
"""Within which each is refused. A template has 1.25 s of CPU time when its process is new; the streams, the server and
its clients want the cores too."""
STREAMED = {"max_tokens": 64, "seed": 5, "temperature": 1.0, "ignore_eos": True}
OUTCOMES = {200, 400, 413}


class Chosen:
    """Renders the template whose number the message is."""

    def __init__(self, templates: list[ChatTemplate]) -> None:
        self._templates = templates

    def marked(self, messages: list[dict[str, Any]], *args: Any, **options: Any) -> str:
        """As of `ChatTemplate`."""
        return self._templates[int(messages[0]["content"])].marked(messages, *args, **options)


def answer(server: LiveServer, prompt: str) -> str:
    """What a stream for `prompt` says."""
    events, done = server.events("/v1/completions", {"prompt": prompt, **STREAMED})
    assert done
    return "".join(event["choices"][0]["text"] for event in events)


@contextlib.contextmanager
def streams(server: LiveServer, count: int) -> Iterator[None]:
    """`count` streams at any time, each again and again with the text that it has alone."""
    prompts = [f"stream {i}" for i in range(count)]
    alone = {prompt: answer(server, prompt) for prompt in prompts}
    stop, done = threading.Event(), [0] * count

    def go(i: int) -> None:
        while not stop.is_set():
            assert answer(server, prompts[i]) == alone[prompts[i]]
            done[i] += 1

    with ThreadPoolExecutor(count) as threads:
        running = [threads.submit(go, i) for i in range(count)]
        try:
            yield
        finally:
            stop.set()
        for each in running:
            each.result()
    assert all(done)


def refused(url: str, path: str, body: dict[str, Any]) -> int:
    """The status of the answer, which comes in time and shows no path; who is told to come back does."""
    for _ in range(3):
        begin = time.monotonic()
        reply = httpx.post(f"{url}{path}", json=body, timeout=30)
        took = time.monotonic() - begin
        if reply.status_code != 429:
            break
    assert reply.status_code in OUTCOMES, f"{reply.status_code} {reply.text[:300]} to {body!r:.500}"
    assert took < SECONDS, f"{took:.1f} s for {body!r:.500}"
    assert reply.status_code == 200 or ("Traceback" not in reply.text and ".py" not in reply.text)
    return reply.status_code


def bombard(server: LiveServer, sources: list[str], fields: list[dict[str, Any]]) -> None:
    """Send all of both, some at once: the templates that a folder could hold, and fields of requests."""
    templates = []
    for source in sources:
        with contextlib.suppress(ModelError):
            templates.append(make(source))
    server.service.template = Chosen(templates)  # type: ignore[assignment]
    user = [[{"role": "user", "content": str(i)}] for i in range(len(templates))]
    chats = [{"messages": messages, "max_tokens": 1} for messages in user]
    asked = [("/v1/chat/completions", body) for body in chats]
    shaped = [("/v1/completions", {"prompt": "a", "max_tokens": 1} | each) for each in fields]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda one: refused(server.url, *one), asked))
        answers = set(threads.map(lambda one: refused(server.url, *one), shaped))
        assert answers <= {200, 400, 413}, "some have an answer of one token"
        assert 400 in answers
    assert not templates or 400 in found
    server.service.template = server.template
    assert server.chat("well", max_tokens=1)["choices"]
    assert server.engine.in_flight == 0 or server.stub.running <= 64


def generated(count: int, seed: int) -> tuple[list[str], list[dict[str, Any]]]:
    """`count` templates and as many fields."""
    rng = random.Random(seed)
    sources = [template(rng) for _ in range(count)]
    fields = [{"guided_regex": pattern(rng)} if rng.random() < 0.5 else {"guided_json": schema(rng)} for _ in sources]
    return sources, fields


@pytest.mark.slow
def test_bombs_are_refused_in_time_beside_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "RENDER_SECONDS", 0.05)
    monkeypatch.setattr(template_renderer, "COMPILE_SECONDS", 0.3)
    sources, fields = generated(12, 0)
    with live(StubEngine(step_seconds=0.004)) as server, streams(server, 3):
        bombard(server, sources, fields + constrained()[::4])


def shaped_reply(server: LiveServer, user: str, order: list[str], **shape: Any) -> httpx.Response:
    """What a tenant's request for a shape gets; `order`: whose came before."""
    body = {"prompt": "a", "max_tokens": 40, "user": user, "structured_outputs": shape}
    found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    order.append(user)
    return found


def test_twenty_bombs_of_a_tenant_are_not_before_a_schema_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_reader, "SECONDS", 0.2)
    monkeypatch.setattr(grammar_reader, "FIRST_SECONDS", 0.05, raising=False)
    monkeypatch.setattr(shapes, "PATIENCE", 120.0, raising=False)
    order: list[str] = []
    slow = [f"(.{{0,300}}x){{{300 + i}}}" for i in range(20)]
    with live() as server, ThreadPoolExecutor(20) as clients:
        bombs = [clients.submit(shaped_reply, server, "bomber", order, regex=each) for each in slow]
        wait_until(lambda: len(order) >= 1, seconds=60)
        before = len(order)
        honest = shaped_reply(server, "honest", order, json=PERSON)
        between = order[before:].index("honest")
        statuses = [each.result().status_code for each in bombs]
    assert honest.status_code == 200, honest.text
    assert between <= 6, f"{between} bombs were read before the schema"
    assert set(statuses) == {400}, "not busy: read, and found to take too long"


@pytest.mark.slow
def test_many_bombs_are_refused_in_time_beside_streams() -> None:
    """Some ten minutes: crafted ones, 2,500 made-up templates and as many schemas and patterns."""
    crafted = [*LONG.values(), *LARGE.values(), *BROKEN.values(), *FAILING.values(), *BOMBS]
    assert len(crafted) + len(constrained()) > 190
    with live(StubEngine(step_seconds=0.004)) as server, streams(server, 20):
        bombard(server, crafted, constrained())
        for seed in range(10):
            bombard(server, *generated(250, seed))


def test_made_up_templates_are_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator makes some of each end: it would test little otherwise."""
    monkeypatch.setattr(template_renderer, "RENDER_SECONDS", 0.03)
    ends = set()
    for source in generated(24, 7)[0]:
        try:
            make(source).render([{"role": "user", "content": "x"}])
            ends.add("text")
        except ModelError:
            ends.add("not compiled")
        except BadRequest as error:
            ends.add("stopped" if "stopped" in str(error) else "failed")
    assert ends == {"text", "not compiled", "stopped", "failed"}
