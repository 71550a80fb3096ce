"""Sequences spread over ranks: the bits of one rank, whatever the model, the format of its cache and the load."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_variants import AFMOE, PLAIN_KINDS
from lora_adapters import TARGETS, write_adapter
from oracle import BACKENDS, write
from quire.cache.groups import Lanes
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.parallel import SPLIT
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.run.context_parallel import FEW_ROWS, PagedSequences, VisibleSplits, divide
from quire.run.multi_rank import MultiRankExecutor

native = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
LONG = {"max_position_embeddings": 2048}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 600}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", LONG),
    "windows": ("gemma3_text", LONG | {"sliding_window": 700, "head_dim": 24}),
    "sinks": ("gpt_oss", LONG | GPT_OSS),
    "slopes": ("bloom", LONG),
    "gates": ("afmoe", LONG | AFMOE | {"sliding_window": 700, "num_hidden_layers": 4}),
    "gates of heads": (
        "lfm3",
        LONG
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "head_dim": 16,
            "num_hidden_layers": 2,
            "sliding_window": 700,
            "rope_parameters": PLAIN_KINDS,
        },
    ),
}
BRANCHING = '{"method": "ngram", "topk": 2}'


@contextmanager
def engine_of(folder: Path, ranks: int, **options: Any) -> Iterator[Engine]:
    given = {"max_model_len": 2048, "threads": 1, "device": "cpu", "cache_packed": "off"} | options
    with closing(start_engine(flat_config(model=str(folder), context_parallel_size=ranks, **given))) as engine:
        yield engine


def requests_of(adapter: str = "") -> list[Request]:
    """Prompts of one split and of several, two that begin alike, one that is asked for its own tokens' numbers."""
    rng = random.Random(5)
    base = [rng.randrange(3, 99) for _ in range(1300)]
    prompts = [base, base[:1100] + [7] * 40, base[:20], [5, 6, 7] * 230, base[40:700]]
    params: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3}, {"temperature": 0.8, "n": 2, "logprobs": 1},
        {"temperature": 0.9, "presence_penalty": 0.5}, {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1},
    ]  # fmt: skip
    return [
        Request(id=str(i), prompt=tuple(prompt), params=SamplingParams(max_tokens=12, ignore_eos=True, **asked), seed=i,
                arrival=0.0, adapter=adapter if i % 2 else "")
        for i, (prompt, asked) in enumerate(zip(prompts, params, strict=True))
    ]  # fmt: skip


def run(engine: Engine, requests: list[Request], step: Callable[[], object] = lambda: None) -> dict[Any, Any]:
    """Tokens and all numbers of the requests; two come first, the others while these run."""
    found: dict[Any, tuple[list[str], list[str], list[str]]] = {}
    waiting = list(requests)
    for request in waiting[:2]:
        assert engine.submit(request) is None
    waiting = waiting[2:]
    while engine.has_work or waiting:
        step()
        if waiting:
            assert engine.submit(waiting.pop(0)) is None
        for output in engine.step():
            assert output.error is None, output.error
            parts = found.setdefault((output.request_id, output.index), ([], [], []))
            for part, more in zip(parts, (output.tokens, output.logprobs, output.prompt_logprobs), strict=True):
                part += map(repr, more or ())
        engine.check()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            write(made[name], MODELS[name][0], **MODELS[name][1])
        return made[name]

    return folder_of


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "few blocks, short steps": (
        "dense",
        {"num_blocks": 450, "block_size": 4, "max_model_len": 1400, "max_num_batched_tokens": 200},
    ),
    "three ranks": ("dense", {"context_parallel_size": 3}),
    "tensors split, too": ("dense", {"tensor_parallel_size": 2}),
    "large blocks, every op by itself": ("dense", {"block_size": 64, "enforce_eager": True}),
    "windows": ("windows", {"max_num_batched_tokens": 300}),
    "windows, int8": ("windows", {"kv_cache_dtype": "int8"}),
    "sinks": ("sinks", {"max_num_batched_tokens": 700}),
    "slopes": ("slopes", {}),
    "gates": ("gates", {"max_num_batched_tokens": 300}),
    "gates of heads": ("gates of heads", {}),
    "fp8": ("dense", {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 128}),
    "looked up": ("dense", {"speculative_config": '{"method": "ngram", "adaptive": false}'}),
}


@native
@pytest.mark.parametrize(
    "form", ["few blocks, short steps", *(pytest.param(form, marks=pytest.mark.slow) for form in [*FORMS][1:])]
)
def test_ranks_give_the_bits_of_one(form: str, folder: Callable[[str], Path]) -> None:
    name, options = FORMS[form]
    options = {"dtype": "bfloat16"} | options
    ranks, requests = options.pop("context_parallel_size", 2), requests_of()
    if "tensor_parallel_size" in options:
        alone: dict[str, Any] = options
    else:
        alone = {k: v for k, v in options.items() if k in ("dtype", "kv_cache_dtype", "block_size")}
    with engine_of(folder(name), 1, **alone) as one:
        want = run(one, requests)
    with engine_of(folder(name), ranks, **options) as some:
        assert some.pool.num_blocks // ranks == some.runner.caches.blocks
        assert run(some, requests) == want
        turns, scheduler = count(1), some.scheduler

        def preempt() -> None:
            if scheduler.running and scheduler.preemptions < 6 and next(turns) % 4 == 0:
                scheduler._preempt(scheduler.running[-1])

        assert run(some, requests, preempt) == want and scheduler.preemptions > 2
        assert some.prefix is not None and some.prefix.hits > 0


@native
@pytest.mark.slow
def test_rows_with_adapters_are_divided_with_them(folder: Callable[[str], Path], tmp_path: Path) -> None:
    oracle = write(tmp_path / "model", *MODELS["dense"][:1], **MODELS["dense"][1])
    adapter = write_adapter(tmp_path / "adapter", oracle, TARGETS["llama"], seed=3)
    options = {"enable_lora": True, "lora_modules": (f"a={adapter}",), "dtype": "float32"}
    with engine_of(tmp_path / "model", 1, **options) as one:
        want = run(one, requests_of("a"))
        assert want != run(one, requests_of())
    with engine_of(tmp_path / "model", 2, max_num_batched_tokens=150, **options) as two:
        assert run(two, requests_of("a")) == want


@native
@pytest.mark.parametrize("force", ["PassQueries", "PassKeys"])
def test_either_way_to_see_keys_is_taken(force: str) -> None:
    """By what is less to pass: few rows of a long context pass themselves, many see to it that keys are passed."""
    from quire.run.context_parallel import ContextRank, GroupKeys

    lanes, rows = Lanes(2, 16), {"PassQueries": 40, "PassKeys": 1500}[force]
    paged = PagedSequences(np.array([0, rows]), np.array([6000]))
    tables = np.arange(400, dtype=np.int32)[None]
    tables = tables // 32 % 2 + tables % 32 * 2 + tables // 64 * 64
    part = ContextRank(0, lanes)
    way = part.way(divide(paged, 2), np.arange(rows), tables, GroupKeys(0, 512, 528, 16 * 2 * 2 * 64 * 2))
    assert type(way).__name__ == force


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("counts", [(1, 1, 1), (40, 1, 0, 700), (1500,), (0, 33)])
def test_every_row_is_on_one_rank_or_on_all(ranks: int, counts: tuple[int, ...]) -> None:
    cu_q = np.cumsum([0, *counts])
    context = np.array([count + 600 * (i + 1) for i, count in enumerate(counts)])
    rows = divide(PagedSequences(cu_q, context), ranks)
    assert rows.divided == (cu_q[-1] > FEW_ROWS) and sorted(rows.index) == list(range(cu_q[-1]))
    ends = np.concatenate([np.arange(c - n, c) + 1 for n, c in zip(counts, context, strict=True)])
    assert list(rows.ends) == list(ends[rows.index])
    own = [rows.index[rows.own(rank)] for rank in range(ranks)]
    if rows.divided:
        assert sorted(np.concatenate(own)) == list(range(cu_q[-1])) and max(map(len, own)) - min(map(len, own)) <= 2
    seen = VisibleSplits.of(rows, 0, Lanes(ranks, 16))
    for at, end in enumerate(rows.ends):
        splits = range(-(-end // SPLIT))
        assert list(seen.owner[seen.starts[at] : seen.starts[at + 1]]) == [split % ranks for split in splits]


def test_what_cannot_be_spread_is_refused_with_the_reason() -> None:
    for options, why in (
        ({"speculative_config": '{"method": "self", "quantization": "int4"}'}, "keeps all keys on one rank"),
        ({"speculative_config": BRANCHING}, "drafts that branch"),
        ({"context_parallel_size": 65}, "must lie in"),
    ):
        with pytest.raises(ConfigError, match=why):
            flat_config(**({"model": "x", "context_parallel_size": 2} | options))


@native
def test_a_rank_that_dies_ends_the_engine_which_ends_the_others(folder: Callable[[str], Path]) -> None:
    with engine_of(folder("dense"), 2) as engine:
        assert isinstance(engine.executor, MultiRankExecutor)
        others = engine.executor.ranks.others
        with pytest.raises(ValueError, match="a rank of the group has ended"):
            run(engine, requests_of(), lambda: os.kill(others[0].pid, signal.SIGKILL))
    assert all(other.ended() is not None for other in others)
