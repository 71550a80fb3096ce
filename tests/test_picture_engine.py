"""Pictures in the engine: rows that are given equal transformers', whatever runs beside them and however they come."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from fake_runner import VOCAB as WORDS
from fake_runner import FakeEngine, golden
from fake_runner import request as fake_request
from made_up_tower import SIGHTS, VOCAB, WINDOW, Part, Shown, oracle_logits, pictured, prompt_of, sighted, write_text
from oracle import BACKENDS
from quire.core.config import flat_config
from quire.core.errors import BadRequest, ConfigError, EngineFailure
from quire.core.pictures import Picture, pieces
from quire.core.plan import StepPlan
from quire.core.request import Output, Request
from quire.engine.client import Stats
from quire.engine.life.watchdog import Watchdog
from quire.engine.local import LocalEngine
from quire.engine.record.recording import without_content
from quire.model.net.mutual import divided, put
from quire.model.net.seeing import Given, axes, turned
from quire.model.spec import Sight
from quire.sched.pictures import Encoding, Limits
from quire.sched.shares import decodes
from test_bit_equality import Answer, run
from turns import reports, turns, working

native = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
Made = tuple[str, Path, PreTrainedModel]


def text(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


PROMPTS: dict[str, list[Part]] = {
    "none": [text(19, 1)],
    "one": [text(5, 2), Shown(1, 3, 4), text(6, 3)],
    "three": [text(3, 4), Shown(1, 3, 4), text(1, 5), Shown(2, 2, 2), text(1, 12), Shown(3, 1, 5), text(9, 6)],
    "first": [Shown(4, 2, 5), text(4, 7)],
    "late": [text(21, 8), Shown(1, 3, 4), text(12, 9), Shown(5, 4, 4), text(2, 10)],
}


def asked(**params: Any) -> list[Request]:
    """All prompts twice, and further ones that begin like them; half of them sampled."""
    found = [pictured(name, parts, seed=i) for i, (name, parts) in enumerate(PROMPTS.items())]
    found += [
        pictured(f"{name}-sampled", parts, seed=9 + i, temperature=1.0)
        for i, (name, parts) in enumerate(PROMPTS.items())
    ]
    cut = PROMPTS["late"][:2]
    found.append(pictured("cut", [*cut, text(5, 11)], seed=31))
    return [replace(each, params=replace(each.params, **({"max_tokens": 20} | params))) for each in found]


@pytest.fixture(scope="module", params=SIGHTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, write_text(folder, request.param)


def assert_equals_oracle(made: Made, requests: list[Request], answers: dict[str, Answer]) -> None:
    """Log-probabilities of every token are transformers' within 1e-4."""
    name, _, oracle = made
    for each in requests:
        answer = answers[each.id]
        logits = oracle_logits(oracle, name, each, answer.tokens)[len(each.prompt) - 1 : -1]
        want = logits.double().log_softmax(-1)
        for row, found in zip(want, answer.logprobs, strict=True):
            got = torch.tensor([p for _, p in found.top], dtype=torch.float64)
            assert (got - row[[token for token, _ in found.top]]).abs().max() <= 1e-4, each.id
            assert abs(found.logprob - float(row[found.token])) <= 1e-4, each.id
            if each.params.temperature == 0:
                assert float(row.max() - row[found.token]) <= 1e-4, each.id


@pytest.fixture(scope="module")
def alone(made: Made) -> tuple[list[Request], dict[str, Answer]]:
    """Each request alone, its prompt in one chunk, nothing found again."""
    name, folder, _ = made
    requests, answers = asked(), dict[str, Answer]()
    with sighted(folder, SIGHTS[name][2], enable_prefix_caching=False) as (engine, _):
        for each in requests:
            answers |= run(engine, [each])
    return requests, answers


@native
def test_rows_that_are_given_equal_transformers(made: Made, alone: tuple[list[Request], dict[str, Answer]]) -> None:
    assert_equals_oracle(made, *alone)


@native
def test_on_the_reference_backend_too(made: Made) -> None:
    name, folder, _ = made
    requests = [pictured(key, PROMPTS[key], max_tokens=2) for key in ("one", "three")]
    with sighted(folder, SIGHTS[name][2], device="reference") as (engine, _):
        assert_equals_oracle(made, requests, run(engine, requests))


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 7},
    "no_prefix": {"enable_prefix_caching": False, "enforce_eager": True},
    "preempted": {"max_num_batched_tokens": 32, "max_num_seqs": 16},
    "small_cache": {"encoder_cache_tokens": 16, "max_num_encoder_tokens": 4},
    "drafts": {"speculative_config": '{"method": "ngram", "prompt_lookup_min": 1, "adaptive": false}'},
    "trees": {"speculative_config": '{"method": "suffix", "topk": 2, "adaptive": false}'},
}


BLOCKS = {"mutual": 44}
"""Of a cache in which sequences are preempted, where layers with windows have blocks of their own; else 24."""


@native
@pytest.mark.parametrize("way", WAYS)
def test_same_bits_whatever_runs_beside(way: str, made: Made, alone: tuple[list[Request], dict[str, Answer]]) -> None:
    name, folder, _ = made
    requests, want = alone
    options = WAYS[way] | ({"num_blocks": BLOCKS.get(name, 24)} if way == "preempted" else {})
    with sighted(folder, SIGHTS[name][2], **options) as (engine, tower):
        got = run(engine, requests, random.Random(way))
        assert [r.id for r in requests if got[r.id].bits() != want[r.id].bits()] == []
        stats = engine.engine.stats()
        assert stats.used_blocks == 0 and stats.picture_queries >= stats.picture_hits
        if way == "preempted":
            assert stats.preemptions > 0
        if way == "together":
            before = len(tower.encoded)
            assert before == 5, "each of the five pictures is encoded once"
            again = run(engine, [replace(r, id=f"again-{r.id}") for r in requests])
            assert [r.id for r in requests if again[f"again-{r.id}"].bits() != want[r.id].bits()] == []
            assert len(tower.encoded) == before
        if way == "drafts":
            assert stats.draft_tokens > 0


@native
def test_one_row_at_a_time(tmp_path: Path) -> None:
    for name in ("llama", "deep"):
        write_text(tmp_path / name, name)
        requests = asked()
        with sighted(tmp_path / name, SIGHTS[name][2]) as (engine, _):
            want = run(engine, requests)
        with sighted(tmp_path / name, SIGHTS[name][2], max_num_batched_tokens=1, max_num_seqs=1) as (engine, tower):
            got = run(engine, requests)
            assert [r.id for r in requests if got[r.id].bits() != want[r.id].bits()] == []
            assert len(tower.encoded) == 5


@native
def test_siblings_share_the_pictures_of_their_prompt(made: Made) -> None:
    name, folder, _ = made
    with sighted(folder, SIGHTS[name][2]) as (engine, tower):
        for i, parts in enumerate((PROMPTS["one"], [text(5, 2), Shown(1, 3, 4)])):  # the last token may be a picture's
            engine.submit(pictured(f"both{i}", parts, n=3, temperature=1.0, seed=5))
            rows: dict[int, list[int]] = {}
            for report in reports(engine):
                for out in report.outputs:
                    assert out.error is None
                    rows.setdefault(out.index, []).extend(out.tokens)
            assert len({tuple(row) for row in rows.values()}) > 1 and len(rows) == 3
        assert len(tower.encoded) == 1


@native
def test_a_prefix_hit_within_a_picture(made: Made) -> None:
    name, folder, _ = made
    parts: list[Part] = [text(6, 1), Shown(6, 5, 5), text(3, 2)]
    request = pictured("first", parts)
    later = {request.prompt[i : i + 4] for i in range(16, 34, 4)}
    with sighted(folder, SIGHTS[name][2], encoder_cache_tokens=25) as (engine, tower):
        want = run(engine, [request])["first"]
        run(engine, [pictured("other", [text(9, 3), Shown(7, 5, 5), text(4, 4)])])  # takes the room of its features
        pool = engine.engine.pool
        for block in [block for block in pool._by_key.values() if tuple(pool._tokens[block]) in later]:
            pool._forget(block)
        engine.submit(pictured("again", parts))
        answer, cached = Answer([], []), 0
        for out in (out for report in reports(engine) for out in report.outputs):
            answer.tokens += out.tokens
            answer.logprobs += out.logprobs
            cached = max(cached, out.cached_tokens)
        assert cached == 16, "the middle of the picture"
        assert answer.bits() == want.bits() and len(tower.encoded) == 3


@native
def test_what_was_told_is_gone_on_from(made: Made, alone: tuple[list[Request], dict[str, Answer]]) -> None:
    name, folder, _ = made
    requests, want = alone
    told = [replace(r, told=(tuple(want[r.id].tokens[: i % 6]),)) for i, r in enumerate(requests)]
    with sighted(folder, SIGHTS[name][2]) as (engine, _):
        got = run(engine, told, random.Random(3))
    for i, each in enumerate(requests):
        assert got[each.id].tokens == want[each.id].tokens[i % 6 :], each.id


@native
@pytest.mark.parametrize("options", [
    {"quantization": "int8"}, {"kv_cache_dtype": "fp8"},
    *(pytest.param(rare, marks=pytest.mark.slow)
      for rare in ({"quantization": "int4"}, {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"})),
], ids=str)  # fmt: skip
def test_formats_give_the_same_bits_under_any_load(options: dict[str, Any], made: Made) -> None:
    name, folder, _ = made
    requests, sight = asked(max_tokens=3), SIGHTS[name][2]
    want: dict[str, Answer] = {}
    with sighted(folder, sight, enable_prefix_caching=False, **options) as (engine, _):
        for each in requests:
            want |= run(engine, [each])
    with sighted(folder, sight, max_num_batched_tokens=24, max_num_seqs=7, **options) as (engine, _):
        got = run(engine, requests, random.Random(1))
    assert [r.id for r in requests if got[r.id].bits() != want[r.id].bits()] == []


@native
def test_edits_of_logits_know_no_rows_of_pictures(made: Made) -> None:
    name, folder, _ = made
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "temperature": 0.8, "max_tokens": 12}
    with sighted(folder, SIGHTS[name][2]) as (engine, _):
        request = replace(pictured("edited", PROMPTS["one"], **params), bad_words_ids=((5,), (7, 9)))
        got = run(engine, [request])["edited"]
        assert len(got.tokens) == 12 and all(token < VOCAB for token in got.tokens)


@native
def test_aborts_leave_nothing(made: Made) -> None:
    name, folder, _ = made
    with sighted(folder, SIGHTS[name][2], max_num_batched_tokens=24, max_num_seqs=8) as (engine, _):
        rng = random.Random(4)
        for each in asked():
            engine.submit(each)
            engine.poll(0)
            if rng.random() < 0.6:
                engine.abort(each.id)
        for _ in reports(engine):
            pass
        engine.engine.check()


@native
def test_vectors_of_prompts_with_pictures(made: Made) -> None:
    name, folder, _ = made
    with sighted(folder, SIGHTS[name][2]) as (engine, _):
        found = []
        for size, kind in ((512, "last"), (24, "last"), (512, "mean")):
            request = replace(pictured(f"{kind}{size}", PROMPTS["one"], logprobs=None), pooling=kind)
            engine.submit(request)
            outputs = [out for report in reports(engine) for out in report.outputs]
            assert outputs[-1].error is None and outputs[-1].pooled
            found.append(outputs[-1].pooled)
        assert found[0] == found[1] != found[2]


def refused(engine: LocalEngine, request: Request) -> Output:
    engine.submit(request)
    (output,) = [out for report in reports(engine) for out in report.outputs]
    assert output.finish_reason == "error" and output.error_kind == BadRequest.__name__
    return output


@native
def test_what_is_refused_says_why(tmp_path: Path) -> None:
    oracle_family = "mutual"
    write_text(tmp_path, oracle_family)
    one = pictured("one", PROMPTS["one"])
    (picture,) = one.pictures
    moved = msgspec.structs.replace(picture, runs=((4, 12),))
    with sighted(tmp_path, SIGHTS["mutual"][2], encoder_cache_tokens=20) as (engine, _):
        assert engine.info.pictures
        assert "--encoder-cache-tokens" in (refused(engine, pictured("big", [Shown(1, 3, 7), [5]])).error or "")
        asks = replace(one, params=replace(one.params, prompt_logprobs=1))
        assert "prompt_logprobs" in (refused(engine, asks).error or "")
        assert "rows" in (refused(engine, replace(one, pictures=(moved,))).error or "")
        assert "rows" in (refused(engine, replace(one, pictures=(picture, picture))).error or "")
    options = {"max_num_batched_tokens": 14, "max_num_seqs": 4}
    with sighted(tmp_path, SIGHTS["mutual"][2], **options) as (engine, _):
        assert "--max-num-batched-tokens" in (refused(engine, one).error or "")
    with sighted(tmp_path, SIGHTS["mutual"][2], language_model_only=True) as (engine, _):
        assert not engine.info.pictures
        assert "takes no pictures" in (refused(engine, one).error or "")
        assert run(engine, [pictured("none", PROMPTS["none"])])["none"].tokens
    with (
        pytest.raises(ConfigError, match="language-model-only"),
        sighted(
            tmp_path, SIGHTS["mutual"][2], speculative_config=f'{{"method": "draft_model", "model": "{tmp_path}"}}'
        ),
    ):
        pass


def test_axes_of_sections() -> None:
    assert axes(Sight(sections=(2, 1, 3))).tolist() == [0, 0, 1, 2, 2, 2]
    assert axes(Sight(sections=(6, 3, 3), interleaved=True)).tolist() == [0, 1, 2] * 3 + [0] * 3
    assert axes(Sight(sections=(4, 3, 1), interleaved=True)).tolist() == [0, 1, 2, 0, 1, 0, 0, 1]


def test_a_device_is_given_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    base, x, values = (torch.randn(*size, generator=g) for size in ((30, 2, 6), (9, 5), (3, 5)))
    rows, grid = np.array([2, 3, 7]), np.array([[4, 4, 4], [4, 5, 9], [4, 5, 6]])
    given, positions = Given(rows, values, grid), torch.arange(9, dtype=torch.int32) + 11
    axis, found = axes(Sight(sections=(2, 1, 3))), []
    for host in (True, False):
        monkeypatch.setattr("quire.model.net.mutual.on_host", lambda x, host=host: host)
        monkeypatch.setattr("quire.model.net.seeing.on_host", lambda x, host=host: host)
        set_, added = x.clone(), x.clone()
        put(set_, rows, values)
        put(added, rows, values, add=True)
        found.append((turned(base, positions, given, axis), set_, added))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    table, set_, added = found[0]
    assert (
        torch.equal(table[0], base[11]) and torch.equal(set_[7], values[2]) and torch.equal(added[2], x[2] + values[0])
    )
    assert torch.equal(table[7, :, :2], base[4, :, :2]) and torch.equal(table[7, :, 2], base[9, :, 2])
    assert torch.equal(table[7, :, 3:], base[6, :, 3:])


def test_rows_that_see_each_other_are_sequences_of_their_own() -> None:
    cu_q, context = np.array([0, 5, 6], np.int32), np.array([9, 4], np.int32)
    rows, places, ends = np.array([1, 2]), np.array([5, 6]), np.array([7, 7])
    found = divided(cu_q, context, rows, places, ends)
    assert found.cu_q.tolist() == [0, 1, 2, 3, 5, 6]
    assert found.context.tolist() == [5, 7, 7, 9, 4]
    assert found.owners.tolist() == [0, 0, 0, 0, 1] and found.parts.tolist() == [1, 2]
    assert found.farther(16) == []
    assert [(seen, which.tolist()) for seen, which in found.farther(4)] == [(5, [0])]


# ------------------------------------------------------------------------------------------------------- the scheduler


class SeeingEngine(FakeEngine):
    """`FakeEngine` that keeps features as plans say, and fails where a row of a picture is computed without."""

    def __init__(self, limits: tuple[int, int, bool], **options: Any) -> None:
        super().__init__(**options)
        config = self.scheduler.config
        self.limits = Limits(*limits, config.max_num_batched_tokens, config.max_num_seqs)
        self.scheduler.encoding = Encoding(self.limits)
        self.kept: dict[bytes, int] = {}
        self.encoded: Counter[bytes] = Counter()

    def submit(self, request: Request) -> None:
        assert self.scheduler.encoding is not None
        self.scheduler.encoding.check(request.pictures)
        super().submit(request)

    def launch(self) -> tuple[StepPlan, Any]:
        waited = {seq for seq in self.scheduler.running if decodes(seq)}
        plan, results = super().launch()
        self.follow(plan, any(chunk.seq in waited for chunk in plan.chunks))
        return plan, results

    def follow(self, plan: StepPlan, decoding: bool) -> None:
        for key in plan.drops:
            del self.kept[key]
        for picture in plan.encodes:
            assert picture.key not in self.kept
            self.kept[picture.key] = picture.rows
            self.encoded[picture.key] += 1
        assert sum(self.kept.values()) <= self.limits.kept
        if len(plan.encodes) > 1:
            assert not decoding and sum(p.rows for p in plan.encodes) <= self.limits.encoded
        for chunk in plan.chunks:
            end = chunk.start + chunk.count
            for picture in chunk.seq.pictures:
                assert picture.key in self.kept or not any(pieces(picture, chunk.start, end))
                inside = any(start < end < start + count for start, count in picture.runs)
                assert not (inside and self.limits.mutual), "a chunk ends within a picture whose rows see each other"


def random_request(rng: random.Random, name: str, most: int) -> Request:
    parts: list[Part] = []
    for _ in range(rng.randint(0, 3)):
        parts.append([rng.randrange(WORDS) for _ in range(rng.choice((0, 1, 3, 6)))])
        number = rng.randrange(6)
        parts.append(Shown(number, 1, 1 + (5 * number + 2) % most))
    parts.append([rng.randrange(WORDS) for _ in range(rng.randint(1, 5))])
    tokens, pictures = prompt_of(parts, WORDS)
    made = fake_request(name, list(tokens), rng.randint(1, 9), n=rng.choice((1, 1, 3)), priority=rng.randrange(3))
    return msgspec.structs.replace(made, pictures=pictures)


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


def test_tokens_do_not_wait_behind_ten_pictures() -> None:
    engine = SeeingEngine((64, 512, False), num_blocks=400, max_model_len=256, max_num_batched_tokens=256,
                          max_num_seqs=16)  # fmt: skip
    engine.submit(fake_request("talks", [1, 2], 30, eos=()))
    engine.step()
    parts: list[Part] = [part for i in range(10) for part in ([i], Shown(i, 1, 12))]
    tokens, pictures = prompt_of([*parts, [3]], WORDS)
    shows = msgspec.structs.replace(fake_request("shows", list(tokens), 1), pictures=pictures)
    engine.submit(shows)
    engine.submit(fake_request("asks", [4, 5, 6], 2, eos=()))
    for step in turns(lambda: ("shows", 0) not in engine.ends):
        before, gave = engine.encoded.total(), len(engine.outputs["talks", 0])
        engine.step()
        assert engine.encoded.total() - before <= 1, "one picture in a step beside tokens that are waited for"
        assert len(engine.outputs["talks", 0]) == gave + 1
        assert step > 1 or engine.outputs["asks", 0], "a prompt without pictures does not wait for those of another"
    assert engine.encoded.total() == 10
    engine.drain()


def test_many_are_encoded_at_once_where_nobody_waits() -> None:
    engine = SeeingEngine((24, 512, False), num_blocks=400, max_model_len=256, max_num_batched_tokens=256)
    parts: list[Part] = [part for i in range(5) for part in ([i], Shown(i, 1, 12))]
    tokens, pictures = prompt_of([*parts, [3]], WORDS)
    engine.submit(msgspec.structs.replace(fake_request("shows", list(tokens), 1), pictures=pictures))
    steps = [engine.encoded.total() for _ in working(engine.scheduler) if engine.step() is not None]
    assert steps == [2, 4, 5]


def test_the_least_recently_needed_makes_room() -> None:
    engine = SeeingEngine((64, 30, False), num_blocks=100, max_model_len=64, max_num_batched_tokens=64)
    for i, number in enumerate((0, 1, 0, 2, 0, 1)):
        tokens, pictures = prompt_of([[i], Shown(number, 1, 12), [3]], WORDS)
        engine.submit(msgspec.structs.replace(fake_request(f"r{i}", list(tokens), 1), pictures=pictures))
        engine.drain()
    assert sorted(engine.encoded.values()) == [1, 1, 2]
    encoding = engine.scheduler.encoding
    assert encoding is not None and (encoding.queries, encoding.hits, len(encoding)) == (6, 2, 24)


def test_rows_that_see_each_other_find_room_beside_drafts_and_prompts() -> None:
    engine = SeeingEngine((64, 64, True), num_blocks=400, max_model_len=200, max_num_batched_tokens=16,
                          max_num_seqs=4, drafts=random.Random(0))  # fmt: skip
    for i in range(3):
        engine.submit(fake_request(f"talks{i}", [i, 2], 60, eos=()))
    engine.step()
    tokens, pictures = prompt_of([[9], Shown(0, 1, 13), [3]], WORDS)
    engine.submit(msgspec.structs.replace(fake_request("shows", list(tokens), 1), pictures=pictures))
    for step in turns(lambda: ("shows", 0) not in engine.ends):
        engine.step()
        assert step < 12, "drafts of others keep a picture out"
    engine.drain()


def test_an_engine_that_encodes_a_picture_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr("quire.engine.life.watchdog.time", SimpleNamespace(monotonic=lambda: now))
    watchdog, killed = Watchdog(1.0, 1), list[bool]()
    watchdog.learn(Stats(step_seconds=0.001, step_tokens=1))
    for seconds, hangs in ((40.0, False), (60.0, True)):
        watchdog._heard = now - seconds
        with pytest.raises(EngineFailure) if hangs else nullcontext():
            watchdog.check(True, False, lambda: killed.append(True), lambda: 100)
        assert bool(killed) == hangs


def test_recordings_without_prompts_have_no_pixels() -> None:
    assert without_content(pictured("one", PROMPTS["one"])).pictures == ()


def test_a_picture_is_whole_in_a_request_over_the_wire() -> None:
    request = pictured("one", PROMPTS["one"])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)
    assert again == request and isinstance(again.pictures[0], Picture)
    assert flat_config(max_num_encoder_tokens=3).scheduler.encoder_rows == (3, 16384)
    with pytest.raises(ConfigError, match="encoder-cache-tokens"):
        flat_config(encoder_cache_tokens=-1)
    assert WINDOW < 13
