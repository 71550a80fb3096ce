"""Why a prefix was not found: each kind of miss, and whose prompts may be named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runner import FakeEngine, request
from live_server import LiveServer, live
from quire.core.request import Miss
from quire.engine.engine_options import engine_config
from quire.engine.local import LocalEngine

PROMPT = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 9]  # two blocks of 4 and three tokens


def ask(engine: FakeEngine, prompt: list[int], explain: str = "own", **fields: Any) -> tuple[int, Miss | None]:
    """(tokens found, the miss) of a request that runs alone."""
    made = request(f"r{len(engine.ends)}", prompt, 1, eos=())
    engine.submit(replace(made, explain=explain, **fields))
    outputs = []
    while engine.scheduler.has_work:
        outputs += engine.step()
    return outputs[0].cached_tokens, outputs[0].miss


def test_each_kind_of_miss_is_told() -> None:
    engine = FakeEngine(num_blocks=8)
    assert ask(engine, PROMPT) == (0, Miss(0, "never_seen"))
    assert ask(engine, PROMPT) == (8, Miss(8, "partial_block"))
    assert ask(engine, PROMPT[:8]) == (7, None), "all but the last token, which is computed for its logits"
    assert ask(engine, PROMPT[:4] + [40] * 6) == (4, Miss(4, "never_seen"))
    assert ask(engine, PROMPT, explain="no") == (8, None)
    for other in range(10, 14):
        ask(engine, [other] * 20)
    assert ask(engine, PROMPT) == (0, Miss(0, "evicted"))
    assert ask(engine, PROMPT, adapter="b") == (0, Miss(0, "other_adapter"))
    assert ask(engine, [*PROMPT[:8], 1, 2, 3, 4, 5], adapter="b") == (8, Miss(8, "never_seen"))


def test_another_tenant_is_named_only_where_that_was_asked_for() -> None:
    engine = FakeEngine(num_blocks=8)
    ask(engine, PROMPT, cache_salt="mine")
    assert ask(engine, PROMPT, cache_salt="yours") == (0, Miss(0, "never_seen"))
    assert ask(engine, PROMPT, cache_salt="third", explain="all") == (0, Miss(0, "other_tenant"))
    assert ask(engine, [1, *PROMPT], cache_salt="third", explain="all") == (0, Miss(0, "never_seen"))


def test_a_block_that_only_a_window_needs_counts() -> None:
    engine = FakeEngine(num_blocks=24, windows=(0, 6), max_num_batched_tokens=4)
    prompt = list(range(18))
    ask(engine, prompt)
    pool = engine.pool
    late = [key for key in pool._by_key if len(key) == 17]  # those of the second group
    assert ask(engine, prompt) == (16, Miss(16, "partial_block"))
    pool._evict(pool._by_key[late[2]])  # layers with a window see it from 12 on, and from 16 on too
    assert ask(engine, prompt) == (8, Miss(8, "evicted"))


def test_a_state_that_is_missing_is_told_with_the_nearest_that_is_there() -> None:
    engine, prompt = FakeEngine(num_blocks=64, slots=16, interval=8), list(range(30))
    assert ask(engine, prompt) == (0, Miss(0, "never_seen"))
    assert ask(engine, [*prompt[:23], 40, 41, 42]) == (16, Miss(16, "no_state", 20)), "blocks are there up to 20"
    assert ask(engine, [*prompt[:23], 43, 44, 45]) == (20, Miss(20, "never_seen")), "where two parted there is one now"
    assert ask(engine, prompt) == (28, Miss(28, "partial_block"))
    states = engine.states.slots
    assert states is not None
    states.begin()
    while states.pool.num_cached:
        states.pool.evict(states._values.pop_least(lambda slot: not states.pool.refs[slot]))
    assert ask(engine, prompt) == (0, Miss(0, "evicted", 28))


def test_what_is_remembered_is_bounded() -> None:
    engine = FakeEngine(num_blocks=8)
    engine.pool._remembered = 3
    for other in range(10, 40):
        ask(engine, [other] * 20, cache_salt=str(other))
    assert len(engine.pool._evicted) == 3
    assert engine.prefix is not None and len(engine.prefix._roots) <= 64
    assert ask(engine, [10] * 20, cache_salt="10") == (0, Miss(0, "never_seen")), "it was forgotten"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = engine_config({"model": "", "num_blocks": 64, "max_model_len": 512})
    with live(LocalEngine(config), api_key=("a", "b")) as running:  # type: ignore[arg-type]
        yield running


def cache(server: LiveServer, key: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": text, "max_tokens": 1, "quire": {"cache": True}, **fields}
    reply = server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["quire"]
    assert "timings" not in found
    return dict(found["cache"])


def test_a_reply_explains_its_miss(server: LiveServer) -> None:
    text = "What does itertools.chain do, and what is it good for? " * 3
    first = cache(server, "a", text)
    assert first["hit_tokens"] == 0 and first["first_miss"] == {"position": 0, "kind": "never_seen"}
    again = cache(server, "a", text)
    assert again["hit_tokens"] > 16 and again["prompt_tokens"] > again["hit_tokens"]
    assert again["first_miss"] in ({"position": again["hit_tokens"], "kind": "partial_block"}, None)
    assert cache(server, "b", text)["first_miss"]["kind"] == "never_seen", "whose prompt it was is not told"
    assert cache(server, "a", text, echo=True, logprobs=1)["first_miss"] == {"position": 0, "kind": "not_cached"}
