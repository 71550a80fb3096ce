"""T12: a quarter of the blocks that are wanted, and sequences as long as all of them: none lost, stuck or changed.

`QUIRE_PRESSURE_REQUESTS` sets how many requests the slow run makes (1,000 unless told).
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from engine_answers import Answer
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from quire.ops.native import load_native
from tiny_model import OPTIONS, write_tiny
from turns import reports

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
BLOCK, BLOCKS, SEQS, BUDGET = 8, 16, 4, 32
LONGEST = BLOCK * BLOCKS
"""Tokens of a sequence at most: all that the pool holds. A batch of such sequences wants four times as many."""
MANY = int(os.environ.get("QUIRE_PRESSURE_REQUESTS", "1000"))


def asked(count: int) -> list[Request]:
    """Prompts and answers that end a block before the bound of the pool, beside it, at it, and a block behind it."""
    rng, found = random.Random(12), []
    for i in range(count):
        end = LONGEST + (-BLOCK, -1, 0, 1, BLOCK)[i % 5]
        long = (LONGEST - BLOCK, LONGEST - BLOCK - 1, LONGEST - 1)
        prompt = min(rng.choice((1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK) if i % 6 else long), end - 1)
        params = SamplingParams(
            max_tokens=end - prompt, temperature=0.8 * (i % 2), logprobs=1, ignore_eos=True, n=2 if i % 7 == 6 else 1
        )
        tokens = tuple(rng.randrange(4, 250) for _ in range(prompt))
        found.append(Request(id=f"r{i}", prompt=tokens, params=params, seed=i, arrival=0.0))
    return found


class Served:
    """What a run gave, the most steps between two tokens of anybody, and the seconds of these."""

    def __init__(self, engine: LocalEngine, requests: list[Request]) -> None:
        self.answers = {(r.id, i): Answer([], []) for r in requests for i in range(r.params.n)}
        self.steps, self.seconds = 0, 0.0
        for request in requests:
            engine.submit(request)
        since, began = 0, time.monotonic()
        for report in reports(engine, 500 * len(requests)):
            since += 1
            for out in report.outputs:
                answer = self.answers[out.request_id, out.index]
                assert answer.reason is None and out.error is None, out
                answer.tokens += out.tokens
                answer.logprobs += out.logprobs
                answer.reason = out.finish_reason
                self.steps, self.seconds = max(self.steps, since), max(self.seconds, time.monotonic() - began)
                since, began = 0, time.monotonic()
        engine.engine.check()


def press(folder: Path, count: int) -> tuple[Served, int]:
    """Serve `count` requests at once and each alone; preemptions."""
    shape = OPTIONS | {"model": str(folder), "num_blocks": BLOCKS, "block_size": BLOCK, "max_num_seqs": SEQS}
    engine = LocalEngine(flat_config(**shape, max_num_batched_tokens=BUDGET))
    assert engine.info.max_model_len == LONGEST
    alone = LocalEngine(flat_config(**shape, max_num_batched_tokens=LONGEST, enable_prefix_caching=False))
    requests = asked(count)
    served = Served(engine, requests)
    for request in requests:
        for key, want in Served(alone, [request]).answers.items():
            got = served.answers[key]
            assert got.reason == want.reason == "length", key
            assert len(got.tokens) == min(request.params.max_tokens or 0, LONGEST - len(request.prompt)), key
            assert got.bits() == want.bits(), key
    assert alone.engine.scheduler.preemptions <= sum(request.params.n > 1 for request in requests)
    return served, engine.engine.scheduler.preemptions


def test_a_quarter_of_the_wanted_blocks_loses_nothing(tmp_path: Path) -> None:
    served, preemptions = press(write_tiny(tmp_path), 20)
    assert preemptions >= 10
    assert served.steps <= 2 * LONGEST // BUDGET + 1, "a prompt's chunks, and what was computed before it was preempted"


@pytest.mark.slow
def test_a_quarter_of_the_wanted_blocks_loses_nothing_of_many(tmp_path: Path) -> None:
    served, preemptions = press(write_tiny(tmp_path), MANY)
    print(
        f"\n{MANY} requests: {preemptions} preemptions, at most {served.steps} steps and {served.seconds:.3f} s apart"
    )
    assert preemptions >= MANY // 2
    assert served.steps <= 2 * LONGEST // BUDGET + 1 and served.seconds < 1
