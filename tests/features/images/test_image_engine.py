"""Images in the engine: rows that are given equal transformers', whatever runs beside them and however they come."""

from __future__ import annotations

import random
import time
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

from engine_answers import Answer, run
from made_up_tower import SIGHTS, VOCAB, WINDOW, Part, Shown, image_request, oracle_logits, sighted, write_text
from oracle import BACKENDS, backend
from quire.core.config import flat_config
from quire.core.errors import BadRequest, ConfigError, EngineFailure
from quire.core.images import PromptImage
from quire.core.request import Output, Request
from quire.engine.client import EngineInfo
from quire.engine.local import LocalEngine
from quire.engine.processes.watchdog import Watchdog
from quire.engine.record.recording import without_content
from quire.engine.stats import Stats
from quire.model.net.multimodal import EmbeddedRows, axes, divided, put, turned
from quire.model.spec import Sight
from quire.ops.arrays import to_torch
from stub_engine import WatchedEngine
from turns import reports
from vision_prompts import write_made

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
    found = [image_request(name, parts, seed=i) for i, (name, parts) in enumerate(PROMPTS.items())]
    found += [
        image_request(f"{name}-sampled", parts, seed=9 + i, temperature=1.0)
        for i, (name, parts) in enumerate(PROMPTS.items())
    ]
    cut = PROMPTS["late"][:2]
    found.append(image_request("cut", [*cut, text(5, 11)], seed=31))
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
    requests = [image_request(key, PROMPTS[key], max_tokens=2) for key in ("one", "three")]
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


@pytest.mark.sampled(5)
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
        assert stats.used_blocks == 0 and stats.image_queries >= stats.image_hits
        if way == "preempted":
            assert stats.preemptions > 0
        if way == "together":
            before = len(tower.encoded)
            assert before == 5, "each of the five images is encoded once"
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
def test_siblings_share_the_images_of_their_prompt(made: Made) -> None:
    name, folder, _ = made
    with sighted(folder, SIGHTS[name][2]) as (engine, tower):
        for i, parts in enumerate((PROMPTS["one"], [text(5, 2), Shown(1, 3, 4)])):  # the last token may be an image's
            engine.submit(image_request(f"both{i}", parts, n=3, temperature=1.0, seed=5))
            rows: dict[int, list[int]] = {}
            for report in reports(engine):
                for out in report.outputs:
                    assert out.error is None
                    rows.setdefault(out.index, []).extend(out.tokens)
            assert len({tuple(row) for row in rows.values()}) > 1 and len(rows) == 3
        assert len(tower.encoded) == 1


@native
def test_a_prefix_hit_within_an_image(made: Made) -> None:
    name, folder, _ = made
    parts: list[Part] = [text(6, 1), Shown(6, 5, 5), text(3, 2)]
    request = image_request("first", parts)
    later = {request.prompt[i : i + 4] for i in range(16, 34, 4)}
    with sighted(folder, SIGHTS[name][2], encoder_cache_tokens=25) as (engine, tower):
        want = run(engine, [request])["first"]
        other = image_request("other", [text(9, 3), Shown(7, 5, 5), text(4, 4)])
        run(engine, [other])  # takes the room of its features
        pool = engine.engine.pool
        for block in [block for block in pool._by_key.values() if pool.tokens(block) in later]:
            pool._evict(block)
        engine.submit(image_request("again", parts))
        answer, cached = Answer([], []), 0
        for out in (out for report in reports(engine) for out in report.outputs):
            answer.tokens += out.tokens
            answer.logprobs += out.logprobs
            cached = max(cached, out.cached_tokens)
        assert cached == 16, "the middle of the image"
        assert answer.bits() == want.bits() and len(tower.encoded) == 3


@native
def test_what_was_told_is_gone_on_from(made: Made, alone: tuple[list[Request], dict[str, Answer]]) -> None:
    name, folder, _ = made
    requests, want = alone
    told = [replace(r, emitted=(tuple(want[r.id].tokens[: i % 6]),)) for i, r in enumerate(requests)]
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
def test_edits_of_logits_know_no_rows_of_images(made: Made) -> None:
    name, folder, _ = made
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "temperature": 0.8, "max_tokens": 12}
    with sighted(folder, SIGHTS[name][2]) as (engine, _):
        request = replace(image_request("edited", PROMPTS["one"], **params), bad_words_ids=((5,), (7, 9)))
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
def test_vectors_of_prompts_with_images(made: Made) -> None:
    name, folder, _ = made
    with sighted(folder, SIGHTS[name][2]) as (engine, _):
        found = []
        for size, kind in ((512, "last"), (24, "last"), (512, "mean")):
            request = replace(image_request(f"{kind}{size}", PROMPTS["one"], logprobs=None), pooling=kind)
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
    one = image_request("one", PROMPTS["one"])
    (image,) = one.images
    moved = msgspec.structs.replace(image, runs=((4, 12),))
    with sighted(tmp_path, SIGHTS["mutual"][2], encoder_cache_tokens=20) as (engine, _):
        assert engine.info.takes_images and engine.info.image_limits.kept == 20
        assert "--encoder-cache-tokens" in (refused(engine, image_request("big", [Shown(1, 3, 7), [5]])).error or "")
        asks = replace(one, params=replace(one.params, prompt_logprobs=1))
        assert "prompt_logprobs" in (refused(engine, asks).error or "")
        assert "rows" in (refused(engine, replace(one, images=(moved,))).error or "")
        assert "rows" in (refused(engine, replace(one, images=(image, image))).error or "")
    options = {"max_num_batched_tokens": 14, "max_num_seqs": 4}
    with sighted(tmp_path, SIGHTS["mutual"][2], **options) as (engine, _):
        assert engine.info.image_limits.step == 14 - 4 + 1
        assert "--max-num-batched-tokens" in (refused(engine, one).error or "")
    with sighted(tmp_path, SIGHTS["mutual"][2], language_model_only=True) as (engine, _):
        assert not engine.info.takes_images
        assert "takes no images" in (refused(engine, one).error or "")
        assert run(engine, [image_request("none", PROMPTS["none"])])["none"].tokens
    write_made("qwen3_vl", real := tmp_path / "real")
    with pytest.raises(ConfigError, match="language-model-only"):
        LocalEngine(flat_config(model=str(real), device="cpu", num_blocks=32, pipeline_parallel_size=2, threads=1))


def test_axes_of_sections() -> None:
    assert axes(Sight(sections=(2, 1, 3))).tolist() == [0, 0, 1, 2, 2, 2]
    assert axes(Sight(sections=(6, 3, 3), interleaved=True)).tolist() == [0, 1, 2] * 3 + [0] * 3
    assert axes(Sight(sections=(4, 3, 1), interleaved=True)).tolist() == [0, 1, 2, 0, 1, 0, 0, 1]


def test_every_backend_is_given_the_same_numbers() -> None:
    g = torch.Generator().manual_seed(0)
    base, x, values = (torch.randn(*size, generator=g) for size in ((30, 2, 6), (9, 5), (3, 5)))
    rows, grid = np.array([2, 3, 7]), np.array([[4, 4, 4], [4, 5, 9], [4, 5, 6]])
    axis, found = axes(Sight(sections=(2, 1, 3))), []
    for ops in map(backend, BACKENDS):
        given, positions = EmbeddedRows(rows, values, grid), ops.put(torch.arange(9, dtype=torch.int32) + 11)
        set_, added = ops.put(x.clone()), ops.put(x.clone())
        put(ops, set_, rows, values)
        put(ops, added, rows, values, add=True)
        found.append(
            [to_torch(ops.host(each)) for each in (turned(ops.put(base), positions, given, axis), set_, added)]
        )
    for each in found:
        assert all(torch.equal(*pair) for pair in zip(each, found[0], strict=True))
    table, set_, added = found[0]
    assert (
        torch.equal(table[0], base[11]) and torch.equal(set_[7], values[2]) and torch.equal(added[2], x[2] + values[0])
    )
    assert torch.equal(table[7, :, :2], base[4, :, :2]) and torch.equal(table[7, :, 2], base[9, :, 2])
    assert torch.equal(table[7, :, 3:], base[6, :, 3:])


def test_rows_are_given_in_the_dtype_of_the_stream() -> None:
    x, values = torch.ones(4, 3, dtype=torch.bfloat16), torch.tensor([[1 / 3] * 3])
    put(backend("reference"), x, np.array([2]), values.numpy())
    put(backend("reference"), x, np.array([1]), values, add=True)
    assert torch.equal(x[2], values[0].bfloat16()) and torch.equal(x[1], 1 + values[0].bfloat16())


def test_rows_that_see_each_other_are_sequences_of_their_own() -> None:
    cu_q, context = np.array([0, 5, 6], np.int32), np.array([9, 4], np.int32)
    rows, places, ends = np.array([1, 2]), np.array([5, 6]), np.array([7, 7])
    found = divided(cu_q, context, rows, places, ends)
    assert found.cu_q.tolist() == [0, 1, 2, 3, 5, 6]
    assert found.context.tolist() == [5, 7, 7, 9, 4]
    assert found.owners.tolist() == [0, 0, 0, 0, 1] and found.parts.tolist() == [1, 2]
    assert found.farther(16) == []
    assert [(seen, which.tolist()) for seen, which in found.farther(4)] == [(5, [0])]


def test_an_engine_that_encodes_an_image_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr("quire.engine.processes.watchdog.time", SimpleNamespace(monotonic=lambda: now))
    watchdog, engine = Watchdog(1.0, 1), WatchedEngine()
    watchdog.learn(Stats(step_seconds=0.001, step_tokens=1))
    for seconds, hangs in ((40.0, False), (60.0, True)):
        watchdog._heard = now - seconds
        with pytest.raises(EngineFailure) if hangs else nullcontext():
            watchdog.check(True, False, engine, lambda: 100)
        assert engine.killed == hangs


def test_recordings_without_prompts_have_no_pixels() -> None:
    assert without_content(image_request("one", PROMPTS["one"])).images == ()


def test_an_image_is_whole_in_a_request_over_the_wire() -> None:
    request = image_request("one", PROMPTS["one"])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)
    assert again == request and isinstance(again.images[0], PromptImage)
    assert "pictures" in msgspec.to_builtins(request), "recordings that were made before have this name"
    assert {"pictures", "picture_limits"} < {field.encode_name for field in msgspec.structs.fields(EngineInfo)}
    assert flat_config(max_num_encoder_tokens=3).scheduler.encoder_rows == (3, 16384)
    with pytest.raises(ConfigError, match="encoder-cache-tokens"):
        flat_config(encoder_cache_tokens=-1)
    assert WINDOW < 13
