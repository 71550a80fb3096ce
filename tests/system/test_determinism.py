"""T24: a request gives the same tokens and the same bits of log-probabilities however it is served, killed engines too.

`test_bit_equality.py`, `test_speculation.py` and `test_replay.py` hold each way by itself, with every format, method
and parameter; here are the ways on top of each other. `QUIRE_DETERMINISM_PROMPTS` sets how many prompts the slow run
serves in each way (1,000 unless told).
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from engine_answers import Answer, engine_of, killed, make_requests, replace_id, run
from quire.core.config import flat_config
from quire.engine.client import EngineKilled, StepReport
from quire.engine.local import LocalEngine
from quire.engine.processes.process import ProcessEngine
from quire.ops.native import load_native

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
MANY = int(os.environ.get("QUIRE_DETERMINISM_PROMPTS", "1000"))
DRAFTS = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'}
SMALL = {"num_blocks": 12, "max_num_batched_tokens": 32, "max_num_seqs": 16}
WAYS: dict[str, dict[str, Any]] = {
    "batch of 2": {"max_num_seqs": 2},
    "batch of 64": {"max_num_seqs": 64},
    "chunks of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "no prefix": {"enable_prefix_caching": False},
    "drafts": DRAFTS,
    "preempted": SMALL,
    "preempted drafts": SMALL | DRAFTS,
    "killed": {},
    "killed, preempted, drafts": SMALL | DRAFTS,
}
QUICK = ("chunks of 7", "drafts", "killed, preempted, drafts")


class Killable(LocalEngine):
    """Ends as if it were killed, after the step that the test has chosen: what that step gave is lost."""

    def __init__(self, rng: random.Random, options: dict[str, Any]) -> None:
        super().__init__(flat_config(device="cpu", **({"num_blocks": 512} | options)))
        self.left = rng.randint(15, 40)

    def poll(self, timeout: float) -> StepReport | None:
        """A step, or the end."""
        report = super().poll(timeout)
        self.left -= report is not None
        if self.left < 0:
            raise EngineKilled("killed by the test")
        return report

    def kill(self) -> None:
        """It does not hang."""

    def cpu_wait(self) -> float:
        """It has no process."""
        return 0.0


def differing(count: int, ways: tuple[str, ...]) -> list[str]:
    """Requests whose bits are not those that they have alone, each with how it was served."""
    engine = engine_of(enable_prefix_caching=False)
    requests, wrong = make_requests(count, engine.info.vocab_size, 24), []
    want = {request.id: run(engine, [request])[request.id].bits() for request in requests}

    def compare(way: str, found: dict[str, Answer]) -> None:
        bad = [name for name, answer in found.items() if answer.bits() != want[name.rpartition("-")[2]]]
        wrong.extend(f"{name} ({way})" for name in bad)

    for way in ways:
        rng = random.Random(way)
        if way.startswith("killed"):
            compare(way, killed(requests, lambda rng=rng, way=way: Killable(rng, WAYS[way]), lambda engine: None))  # type: ignore[misc]
            continue
        engine = engine_of(**WAYS[way])
        compare(way, run(engine, requests, rng))
        compare(f"{way}, again", run(engine, [replace_id(request, "again") for request in requests], rng))
        stats = engine.engine.stats()
        assert (stats.preemptions > 0) >= ("preempted" in way) and (stats.draft_tokens > 0) >= ("drafts" in way)
        assert stats.prefix_hits > 0 or way == "no prefix"
    return wrong


def test_bits_do_not_depend_on_how_a_request_is_served() -> None:
    assert not (wrong := differing(20, QUICK)), wrong


@pytest.mark.slow
def test_bits_of_many_prompts_do_not_depend_on_how_they_are_served() -> None:
    wrong = differing(MANY, tuple(WAYS))
    print(f"\n{MANY} prompts in {len(WAYS)} ways: {len(wrong)} differ")
    assert not wrong, wrong[:20]


@pytest.mark.slow
def test_bits_are_the_same_after_engine_processes_were_killed() -> None:
    """SIGKILL, at any moment of a step."""
    rng, options = random.Random(3), {"num_blocks": 512, "max_num_seqs": 8} | DRAFTS
    requests = make_requests(max(40, MANY // 5), 6144, 25)
    want = run(engine_of(enable_prefix_caching=False), requests)
    left = rng.randint(4, 15)

    def chance(engine: ProcessEngine) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            engine.channel.process.kill()
            left = rng.randint(4, 15)

    found = killed(requests, lambda: ProcessEngine(flat_config(device="cpu", **options)), chance)
    assert all(found[name].bits() == answer.bits() for name, answer in want.items())
