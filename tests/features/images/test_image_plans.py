"""Plans of steps with images: what is encoded when, what is kept, and who waits for what."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from fake_runner import VOCAB as WORDS
from fake_runner import FakeEngine, golden
from fake_runner import request as fake_request
from made_up_tower import Part, Shown, prompt_of
from quire.core.images import pieces
from quire.core.plan import StepPlan
from quire.core.request import Request
from quire.features.images.plan_images import EncoderLimits, EncoderScheduler
from quire.sched.token_budget import decodes
from turns import turns, working


class SeeingEngine(FakeEngine):
    """`FakeEngine` that keeps features as plans say, and fails where a row of an image is computed without."""

    def __init__(self, limits: tuple[int, int, bool], **options: Any) -> None:
        super().__init__(**options)
        config = self.scheduler.config
        self.limits = EncoderLimits(*limits, config.max_num_batched_tokens, config.max_num_seqs)
        self.encoding = EncoderScheduler(self.limits)
        self.scheduler.hooks.add(self.encoding)
        self.kept: dict[bytes, int] = {}
        self.encoded: Counter[bytes] = Counter()

    def submit(self, request: Request) -> None:
        self.encoding.check(request.images)
        super().submit(request)

    def launch(self) -> tuple[StepPlan, Any]:
        waited = {seq for seq in self.scheduler.running if decodes(seq)}
        plan, results = super().launch()
        self.follow(plan, any(chunk.seq in waited for chunk in plan.chunks))
        return plan, results

    def follow(self, plan: StepPlan, decoding: bool) -> None:
        for key in plan.drops:
            del self.kept[key]
        for image in plan.encodes:
            assert image.key not in self.kept
            self.kept[image.key] = image.rows
            self.encoded[image.key] += 1
        assert sum(self.kept.values()) <= self.limits.kept
        if len(plan.encodes) > 1:
            assert not decoding and sum(p.rows for p in plan.encodes) <= self.limits.encoded
        for chunk in plan.chunks:
            end = chunk.start + chunk.count
            for image in chunk.seq.request.images:
                assert image.key in self.kept or not any(pieces(image, chunk.start, end))
                inside = any(start < end < start + count for start, count in image.runs)
                assert not (inside and self.limits.mutual), "a chunk ends within an image whose rows see each other"


def random_request(rng: random.Random, name: str, most: int) -> Request:
    parts: list[Part] = []
    for _ in range(rng.randint(0, 3)):
        parts.append([rng.randrange(WORDS) for _ in range(rng.choice((0, 1, 3, 6)))])
        number = rng.randrange(6)
        parts.append(Shown(number, 1, 1 + (5 * number + 2) % most))
    parts.append([rng.randrange(WORDS) for _ in range(rng.randint(1, 5))])
    tokens, images = prompt_of(parts, WORDS)
    made = fake_request(name, list(tokens), rng.randint(1, 9), n=rng.choice((1, 1, 3)), priority=rng.randrange(3))
    return msgspec.structs.replace(made, images=images)


@pytest.mark.parametrize("mutual", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_plans_encode_what_their_rows_need(seed: int, mutual: bool) -> None:
    rng = random.Random(seed)
    most = rng.choice((3, 8))
    engine = SeeingEngine(
        (rng.choice((1, 6, 20)), rng.choice((most, 2 * most, 40)), mutual),
        num_blocks=rng.choice((20, 30, 90)),
        max_model_len=64,
        windows=rng.choice(((0,), (9,), (0, 9))),
        prefix=rng.random() < 0.7,
        ahead=rng.random() < 0.5,
        late=rng.random() < 0.5,
        max_num_batched_tokens=rng.choice((12, 16, 40)),
        max_num_seqs=rng.choice((2, 4)),
        scheduling_policy=rng.choice(("fcfs", "priority", "fair")),
    )
    if engine.sizes.footprint(48) > engine.pool.num_blocks:
        engine = SeeingEngine((6, 2 * most, mutual), num_blocks=90, max_model_len=64, max_num_batched_tokens=16)
    waiting = [random_request(rng, f"r{i}", most) for i in range(24)]
    sent: list[Request] = []
    aborted: set[str] = set()
    for _ in turns(lambda: waiting or engine.scheduler.has_work):
        for _ in range(min(len(waiting), rng.randint(0, 3))):
            sent.append(waiting.pop())
            engine.submit(sent[-1])
        if rng.random() < 0.05 and sent:
            aborted.add(name := rng.choice(sent).id)
            engine.scheduler.abort(name)
        if engine.scheduler.has_work:
            engine.step()
    assert engine.pool.num_used == 0
    for each in sent:
        for index in range(each.params.n):
            if each.id not in aborted:
                assert engine.outputs[each.id, index] == golden(each, index, 64), each.id


def test_tokens_do_not_wait_behind_ten_images() -> None:
    engine = SeeingEngine((64, 512, False), num_blocks=400, max_model_len=256, max_num_batched_tokens=256,
                          max_num_seqs=16)  # fmt: skip
    engine.submit(fake_request("talks", [1, 2], 30, eos=()))
    engine.step()
    parts: list[Part] = [part for i in range(10) for part in ([i], Shown(i, 1, 12))]
    tokens, images = prompt_of([*parts, [3]], WORDS)
    shows = msgspec.structs.replace(fake_request("shows", list(tokens), 1), images=images)
    engine.submit(shows)
    engine.submit(fake_request("asks", [4, 5, 6], 2, eos=()))
    for step in turns(lambda: ("shows", 0) not in engine.ends):
        before, gave = engine.encoded.total(), len(engine.outputs["talks", 0])
        engine.step()
        assert engine.encoded.total() - before <= 1, "one image in a step beside tokens that are waited for"
        assert len(engine.outputs["talks", 0]) == gave + 1
        assert step > 1 or engine.outputs["asks", 0], "a prompt without images does not wait for those of another"
    assert engine.encoded.total() == 10
    engine.drain()


def test_many_are_encoded_at_once_where_nobody_waits() -> None:
    engine = SeeingEngine((24, 512, False), num_blocks=400, max_model_len=256, max_num_batched_tokens=256)
    parts: list[Part] = [part for i in range(5) for part in ([i], Shown(i, 1, 12))]
    tokens, images = prompt_of([*parts, [3]], WORDS)
    engine.submit(msgspec.structs.replace(fake_request("shows", list(tokens), 1), images=images))
    steps = [engine.encoded.total() for _ in working(engine.scheduler) if engine.step() is not None]
    assert steps == [2, 4, 5]


def test_the_least_recently_needed_makes_room() -> None:
    engine = SeeingEngine((64, 30, False), num_blocks=100, max_model_len=64, max_num_batched_tokens=64)
    for i, number in enumerate((0, 1, 0, 2, 0, 1)):
        tokens, images = prompt_of([[i], Shown(number, 1, 12), [3]], WORDS)
        engine.submit(msgspec.structs.replace(fake_request(f"r{i}", list(tokens), 1), images=images))
        engine.drain()
    assert sorted(engine.encoded.values()) == [1, 1, 2]
    encoding = engine.encoding
    assert (encoding.queries, encoding.hits, encoding.rows) == (6, 2, 24)


def test_rows_that_see_each_other_find_room_beside_drafts_and_prompts() -> None:
    engine = SeeingEngine((64, 64, True), num_blocks=400, max_model_len=200, max_num_batched_tokens=16,
                          max_num_seqs=4, drafts=random.Random(0))  # fmt: skip
    for i in range(3):
        engine.submit(fake_request(f"talks{i}", [i, 2], 60, eos=()))
    engine.step()
    tokens, images = prompt_of([[9], Shown(0, 1, 13), [3]], WORDS)
    engine.submit(msgspec.structs.replace(fake_request("shows", list(tokens), 1), images=images))
    for step in turns(lambda: ("shows", 0) not in engine.ends):
        engine.step()
        assert step < 12, "drafts of others keep an image out"
    engine.drain()
