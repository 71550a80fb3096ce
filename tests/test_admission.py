"""What is let in beside what is in flight, at the edge and by the scheduler."""

from __future__ import annotations

import pytest

from fake_runner import FakeEngine, request
from quire.core.errors import BadRequest, Overloaded
from quire.engine.frontend.admission import MAX_RETRY_AFTER, AdmissionControl
from test_scheduler import assert_golden
from turns import working


def test_a_queue_has_places_and_room_for_tokens() -> None:
    queue = AdmissionControl(max_sequences=4, max_prompt_tokens=100)
    queue.enter(1, 1000)  # alone it is taken, however long
    for sequences, tokens in ((1, 1), (4, 0)):
        with pytest.raises(Overloaded, match="1 sequences with 1000 prompt tokens"):
            queue.enter(sequences, tokens)
    queue.leave(1, 1000)
    queue.enter(3, 60)
    queue.enter(1, 40)
    with pytest.raises(Overloaded):
        queue.enter(1, 0)
    queue.leave(3, 60)
    queue.enter(3, 60)
    assert (queue.sequences, queue.prompt_tokens) == (4, 100)
    with pytest.raises(BadRequest, match="asks for 5 sequences, this server queues 4"):
        queue.enter(5, 0)


def test_whoever_is_refused_is_told_to_wait_as_long_as_requests_take() -> None:
    queue = AdmissionControl(max_sequences=1, max_prompt_tokens=100)
    queue.enter(1, 1)

    def told() -> int:
        with pytest.raises(Overloaded) as refused:
            queue.enter(1, 1)
        return refused.value.retry_after

    assert told() == 1
    for _ in range(60):
        queue.took(20.0)
    assert told() == 20
    for _ in range(60):
        queue.took(1e6)
    assert told() == MAX_RETRY_AFTER
    for _ in range(300):
        queue.took(0.0)
    assert told() == 1


def preempted(blocks: int, *lengths: int, tokens: int = 4, **limits: int) -> int:
    """Preemptions while prompts of such lengths are served that came at once, each of its own tokens."""
    engine = FakeEngine(blocks, 4, 48, max_num_seqs=8, **limits)
    requests = [request(f"r{i}", [i] * length, tokens, eos=()) for i, length in enumerate(lengths)]
    for each in requests:
        engine.submit(each)
    for _ in working(engine.scheduler, 2000):
        engine.step()
    assert_golden(engine, requests)
    return engine.scheduler.preemptions


def test_nobody_is_admitted_whose_blocks_running_prompts_still_need() -> None:
    assert preempted(16, 40, 40, max_num_batched_tokens=8) == 0


def test_each_that_runs_keeps_a_block_to_grow_into() -> None:
    assert preempted(8, 14, 14, tokens=6, max_num_batched_tokens=64) == 0
