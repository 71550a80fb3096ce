"""The engine with a store behind its KV cache: the same bits as without, after a restart too, and for nobody else."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine_answers import Answer, engine_of, make_requests
from lora_adapters import TARGETS, write_adapter
from model_variants import LATENTS as LATENT
from model_variants import WINDOWED as MODELS
from often import one_of, only_slow
from oracle import BACKENDS, write
from queueing_engine import build
from quire import LLM, LoRARequest, SamplingParams
from quire.cache.tiers import StoreRates
from quire.core.errors import ConfigError
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.engine_options import engine_config
from quire.engine.local import LocalEngine
from quire.engine.processes.channel import LocalChannel
from quire.engine.processes.process import ProcessEngine
from quire.run.multi_rank import MultiRankExecutor
from tiny_model import OPTIONS, write_tiny
from turns import turns
from ways_to_serve import written

SCARCE = 400
"""Tokens that a cache has room for which is far too small."""
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "f32": {"dtype": "float32", "block_size": 4, "num_blocks": 2048},
    "kv_int8": {"kv_cache_dtype": "int8"},
    "kv_fp8": {"kv_cache_dtype": "fp8"},
    "lookups": {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
    "drafts": {"speculative_config": '{"method": "self", "quantization": "int4", "num_speculative_tokens": 3}'},
}
RANKS: dict[str, dict[str, Any]] = {
    "heads": {},
    "int8": {"kv_cache_dtype": "int8", "quantization": "int8"},
    "drafts": FORMATS["drafts"],
    "invariant": {"rank_invariant": True},
}
native = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


@pytest.fixture(autouse=True)
def always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models compute their prompts faster than a file is opened."""
    monkeypatch.setattr(StoreRates, "pays", lambda self, nbytes, tokens: True)


def bits(answers: dict[str, Answer]) -> dict[str, bytes]:
    return {name: answer.bits() for name, answer in answers.items()}


def run(engine: LocalEngine, requests: list[Request], rng: random.Random | None = None) -> dict[str, Answer]:
    """All at once, or trickling in at random steps; the sequences of a request by their numbers."""
    answers = {f"{r.id}/{i}": Answer([], []) for r in requests for i in range(r.params.n)}
    waiting = list(requests)
    for _ in turns(lambda: waiting or engine.engine.has_work):
        count = len(waiting) if rng is None else rng.randint(0, 6)
        for request in waiting[:count]:
            engine.submit(request)
        del waiting[:count]
        report = engine.poll(0)
        for out in report.outputs if report else ():
            assert out.error is None, out.error
            answers[f"{out.request_id}/{out.index}"].tokens += out.tokens
            answers[f"{out.request_id}/{out.index}"].logprobs += out.logprobs
    return answers


def hits(engine: LocalEngine) -> int:
    counts = engine.engine.stats().kv_store
    assert counts is not None and counts.bad == counts.dropped == 0
    return counts.hits


def restarted(options: dict[str, Any], requests: list[Request], store: Path, least: int = 1) -> None:
    """Bits without a store, with one whose pool is far too small, and of two starts later are the same."""
    options = {"enforce_eager": True} | options
    scarce = {"num_blocks": SCARCE // options.get("block_size", 16), "max_num_batched_tokens": 32, "max_num_seqs": 16}
    want = bits(run(engine_of(**options), requests))
    for start in range(3):
        engine = engine_of(**(options | (scarce if start == 0 else {}) | {"kv_store": str(store)}))
        got = bits(run(engine, requests, random.Random(start)))
        assert [name for name in want if got[name] != want[name]] == [], f"start {start}"
        assert not engine.engine.pool.num_used
        if start:
            assert hits(engine) >= least, "found what the engine before kept"
        engine.engine.check()
        engine.close()


@pytest.mark.sampled(5)
@native
@pytest.mark.parametrize("form", one_of(2, FORMATS))
def test_a_store_and_a_restart_change_no_bit(form: str, tmp_path: Path) -> None:
    requests = make_requests(24, 6144)
    requests = [replace(r, params=replace(r.params, n=1 + (i % 4 == 0) * i % 3)) for i, r in enumerate(requests)]
    restarted(FORMATS[form], requests, tmp_path, least=20)


@native
@pytest.mark.parametrize("form", [pytest.param(form, marks=pytest.mark.slow) for form in RANKS])
def test_parts_of_blocks_that_ranks_have_come_back(form: str, tmp_path: Path) -> None:
    restarted(RANKS[form] | {"tensor_parallel_size": 2}, make_requests(12, 6144), tmp_path, least=10)


@native
def test_a_rank_that_has_ended_keeps_no_engine_from_its_end(tmp_path: Path) -> None:
    engine = engine_of(kv_store=str(tmp_path), tensor_parallel_size=2)
    run(engine, make_requests(4, 6144))
    assert isinstance(engine.engine.executor, MultiRankExecutor)
    ranks = engine.engine.executor.ranks
    ranks.others[0].end()
    for _ in turns(lambda: ranks.others[0].ended() is None):
        time.sleep(0.01)
    engine.close()
    again = engine_of(kv_store=str(tmp_path), tensor_parallel_size=2)
    run(again, make_requests(4, 6144))
    again.close()


@native
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mistral"])
def test_layers_with_windows_find_what_they_see(name: str, tmp_path: Path) -> None:
    family, facts = MODELS[name]
    facts = {"sliding_window": 20, "max_position_embeddings": 256} | facts
    write(tmp_path / "model", family, **facts, dtype=torch.bfloat16)
    growing = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=3)
    requests = make_requests(8, 99)
    requests += [replace(requests[i], id=f"grows{i}", prompt=(i + 3,) * 40, params=growing) for i in range(4)]
    options = {"model": str(tmp_path / "model"), "num_blocks": 2048, "block_size": 4, "max_num_seqs": 8}
    want = bits(run(engine_of(**options), requests))
    for start in range(2):
        engine = engine_of(**options, kv_store=str(tmp_path / "kv"))
        assert bits(run(engine, requests)) == want
        assert hits(engine) >= 8 if start else hits(engine) == 0
        engine.close()


@native
def test_latents_come_back(tmp_path: Path) -> None:
    family, facts = LATENT["deepseek_v2"][:2]
    write(tmp_path / "model", family, **facts)
    requests = make_requests(8, 90)
    restarted({"model": str(tmp_path / "model"), "block_size": 4, "num_blocks": 512}, requests, tmp_path / "kv")


@native
def test_states_come_back(tmp_path: Path) -> None:
    folder, requests = written(tmp_path / "model", "states"), make_requests(10, 90)
    options = {"model": str(folder), "block_size": 4, "num_blocks": 1024, "state_interval": 16, "num_state_slots": 60}
    restarted(options, requests, tmp_path / "kv", least=10)


@native
@pytest.mark.slow
def test_parts_of_states_that_ranks_have_come_back(tmp_path: Path) -> None:
    folder, requests = written(tmp_path / "model", "states"), make_requests(10, 90)
    options = {"model": str(folder), "block_size": 4, "num_blocks": 1024, "num_state_slots": 60}
    restarted(options | {"tensor_parallel_size": 2}, requests, tmp_path / "kv", least=10)


@native
def test_a_conversation_goes_on_after_a_restart_with_its_state(tmp_path: Path) -> None:
    folder, prompt = written(tmp_path / "model", "states"), [*range(5, 85)]
    options: dict[str, Any] = {"num_blocks": 64, "kv_store": str(tmp_path / "kv"), "dtype": "float32"}
    said: list[int] = []
    for turn in range(3):
        with LLM(str(folder), **options) as llm:
            (reply,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY)
            (again,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY)
        found = reply.num_cached_tokens or 0
        assert again.outputs[0].token_ids == reply.outputs[0].token_ids
        assert found >= len(said) // 16 * 16 - 16 if turn else found == 0
        said = [*prompt]
        prompt = [*prompt, *reply.outputs[0].token_ids, *range(20 + turn, 40)]


PROMPT: dict[str, Any] = {"prompt_token_ids": [*range(5, 85)]}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def asked(llm: LLM, lora: LoRARequest | None = None) -> tuple[list[int], int]:
    """(tokens, those of the prompt that were found)."""
    (reply,) = llm.generate([PROMPT], GREEDY, lora_request=lora)
    return list(reply.outputs[0].token_ids), int(reply.num_cached_tokens or 0)


@native
def test_adapters_count_by_what_is_in_their_files(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model")
    oracle = write(tmp_path / "model", "llama", vocab_size=260)
    one, two = (write_adapter(tmp_path / f"a{seed}", oracle, TARGETS["llama"], seed) for seed in (1, 2))

    def start() -> LLM:
        options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "num_blocks": 64}
        return LLM(str(tmp_path / "model"), kv_store=str(tmp_path / "kv"), dtype="float32", **options)

    with start() as llm:
        plain, first = asked(llm)[0], asked(llm, LoRARequest("x", 1, str(one)))[0]
        second = asked(llm, LoRARequest("y", 2, str(two)))[0]
        assert first != plain != second != first
    with start() as llm:
        assert asked(llm, LoRARequest("x", 1, str(two))) == (second, 79), "another name, the same files"
        assert asked(llm, LoRARequest("y", 2, str(one))) == (first, 79)
        assert asked(llm) == (plain, 79)
    write_adapter(one, oracle, TARGETS["llama"], 3)
    with start() as llm:
        third, found = asked(llm, LoRARequest("x", 1, str(one)))
        assert found == 0 and third != first, "the same name and folder, other files"


@native
def test_a_second_start_finds_as_much_as_the_first_one_did_at_its_end(tmp_path: Path) -> None:
    requests = make_requests(30, 6144)

    def found(engine: LocalEngine, turn: int) -> float:
        engine.engine.prefix.hits = engine.engine.prefix.queries = 0  # type: ignore[union-attr]
        run(engine, [replace(r, id=f"{r.id}/{turn}") for r in requests])
        return engine.engine.prefix.hits / engine.engine.prefix.queries  # type: ignore[union-attr]

    first = engine_of(kv_store=str(tmp_path))
    found(first, 0)
    at_end = found(first, 1)
    first.close()
    second = engine_of(kv_store=str(tmp_path))
    assert found(second, 0) >= at_end > 0.5
    second.reset_prefix_cache()
    assert found(second, 1) < at_end / 2, "only what these prompts share"
    second.close()
    third = engine_of(kv_store=str(tmp_path))
    third.reset_prefix_cache()
    third.close()
    fourth = engine_of(kv_store=str(tmp_path))
    run(fourth, requests[:1])
    assert hits(fourth) == 0, "a reset outlives the process"
    fourth.close()


OTHERS: dict[str, dict[str, Any]] = {
    "block_size": {"block_size": 8},
    "kv_cache_dtype": {"kv_cache_dtype": "int8"},
    "quantization": {"quantization": "int8"},
    "isa": {"isa": "portable"},
    "ranks": {"tensor_parallel_size": 2},
    "max_model_len": {"max_model_len": 300},
}


@native
@pytest.mark.parametrize("other", one_of(2, OTHERS))
def test_other_options_find_nothing(other: str, tmp_path: Path) -> None:
    for options, found in (({}, 0), (OTHERS[other], 0), ({}, 79)):
        with LLM(num_blocks=64, kv_store=str(tmp_path), enforce_eager=True, tune="off", **options) as llm:
            assert asked(llm)[1] == found


@native
def test_another_model_finds_nothing(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model")
    for seed, found in ((1, 0), (2, 0)):
        write(tmp_path / "model", "llama", seed, vocab_size=260)
        with LLM(str(tmp_path / "model"), num_blocks=64, kv_store=str(tmp_path / "kv")) as llm:
            assert asked(llm)[1] == found
    with LLM(str(tmp_path / "model"), num_blocks=64, kv_store=str(tmp_path / "kv")) as llm:
        assert asked(llm)[1] == 79


@native
def test_tenants_stay_apart(tmp_path: Path) -> None:
    request = Request(id="r", prompt=tuple(range(5, 85)), params=GREEDY, seed=0, arrival=0.0, cache_salt="a")
    for salt, found in (("a", 0), ("b", 0), ("a", 79), ("b", 79)):
        engine = engine_of(kv_store=str(tmp_path))
        engine.submit(replace(request, cache_salt=salt))
        outputs = []
        for _ in turns(lambda engine=engine: engine.engine.has_work):
            report = engine.poll(0)
            outputs += report.outputs if report else []
        assert outputs[-1].cached_tokens == found
        engine.close()


def answer(engine: ProcessEngine, name: str) -> tuple[list[int], int]:
    engine.submit(Request(id=name, prompt=tuple(range(5, 85)), params=GREEDY, seed=0, arrival=0.0))
    tokens: list[int] = []
    end = time.monotonic() + 60
    while time.monotonic() < end:
        report = engine.poll(1)
        for output in report.outputs if report else ():
            assert not output.error
            tokens += output.tokens
            if output.finish_reason:
                return tokens, output.cached_tokens
    raise AssertionError("no end")


@native
@pytest.mark.parametrize("killed", [only_slow(False), True])
def test_an_engine_process_leaves_its_blocks_whether_it_is_ended_or_killed(killed: bool, tmp_path: Path) -> None:
    config = engine_config({"num_blocks": 64, "kv_store": str(tmp_path), "enforce_eager": True, "tune": "off"})
    first = ProcessEngine(config)
    try:
        tokens, found = answer(first, "a")
        assert found == 0
        if killed:  # once it had a moment in which nothing was to be done
            for _ in turns(lambda: len(list(tmp_path.glob("*/??/[0-9a-f]*"))) < 5):
                first.poll(0.05)
            assert isinstance(first.channel, LocalChannel)
            first.channel.process.kill()
            first.channel.process.wait()
    finally:
        first.close()
    second = ProcessEngine(config)
    try:
        assert answer(second, "b") == (tokens, 79)
    finally:
        second.close()


def answers(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        assert engine.submit(request) is None
    found: dict[tuple[str, int], list[int]] = {}
    for _ in turns(lambda: engine.has_work):
        for output in engine.step():
            assert output.error is None
            found.setdefault((output.request_id, output.index), []).extend(output.tokens)
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("eager", ["side", "main"])
def test_a_device_keeps_in_host_memory_what_it_has_no_room_for(
    eager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "tiny")
    requests = [
        replace(r, prompt=r.prompt[:60], params=replace(r.params, logprobs=None, n=1 + i % 2))
        for i, r in enumerate(make_requests(16, 190))
    ]
    want = answers(build(folder, monkeypatch, num_blocks=1024), requests)
    engine = build(folder, monkeypatch, eager, num_blocks=40, kv_offloading_size=0.01)
    assert answers(engine, requests) == want
    assert engine.tiering is not None
    engine.tiering.write_behind()
    assert answers(engine, [replace(r, id=f"again {r.id}") for r in requests]) == {
        (f"again {name}", index): tokens for (name, index), tokens in want.items()
    }
    counts = engine.stats().kv_store
    assert counts is not None and counts.hits > 20 and counts.written > 40 and counts.bad == 0
    engine.check()
    engine.close()


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="made-up weights"):
        LocalEngine(engine_config(OPTIONS | {"model": str(folder), "kv_store": str(tmp_path / "kv")}))
    with pytest.raises(ConfigError, match="in host memory already; raise --kv-cache-memory-bytes"):
        LocalEngine(engine_config(OPTIONS | {"model": str(folder), "kv_offloading_size": 1}))
    if "cpu" in BACKENDS:
        with pytest.raises(ConfigError, match="fewer than 16 fit"):
            engine_of(kv_store=str(tmp_path / "kv"), kv_store_gb=1e-4)
