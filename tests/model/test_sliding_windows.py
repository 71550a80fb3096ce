"""Layers with a window beside layers without: blocks that slid out are freed, and nothing else changes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine_answers import engine_of, make_requests, replace_id, run
from fake_runner import FakeEngine, request
from model_variants import GEMMA3, WINDOWED, gemma3
from oracle import BACKENDS, write
from quire.cache.groups import LayerGroups, TableSizes, group_layers
from quire.core.config import flat_config
from quire.core.dtypes import BF16
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.model.mixers.mixer import LayerCacheSpec
from quire.ops.layout import KVLayout
from quire.plan.predict import Machine, Planner
from quire.run.kv_budget import shape_kv
from sparse_variants import SPARSE
from speculation_methods import TINY, write_words
from turns import reports

WINDOW = 20
MODELS = WINDOWED | {"dots3_note": (SPARSE["dots3_note"][0], SPARSE["dots3_note"][1] | {"sliding_window": WINDOW})}
native = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    family, facts = MODELS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    facts = {"sliding_window": WINDOW, "max_position_embeddings": 256} | facts
    write(path, family, **facts, dtype=torch.bfloat16)
    return str(path)


def whole(parts: dict[int, LayerCacheSpec], length: int) -> LayerGroups:
    """All layers in one group that frees nothing."""
    return LayerGroups((0,), (tuple(parts),))


def cut(windows: dict[int, int], length: int) -> LayerGroups:
    """Groups of layers that see `windows` and keep them alike."""
    layout = KVLayout(16, 1, 16, BF16)
    return group_layers({layer: LayerCacheSpec((layout,), window) for layer, window in windows.items()}, length)


@pytest.mark.sampled(4)
@native
def test_freeing_changes_no_bit(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    growing = SamplingParams(max_tokens=90, ignore_eos=True, logprobs=3)
    requests = make_requests(16, 99)
    requests += [replace(requests[i], id=f"grows{i}", prompt=(i + 3,) * 16, params=growing) for i in range(8)]
    with monkeypatch.context() as patched:
        patched.setattr("quire.run.kv_budget.group_layers", whole)
        kept = engine_of(model=folder)
        assert kept.engine.kv.sizes.windows == (0,)
        want = {name: answer.bits() for name, answer in run(kept, requests).items()}
    windows = engine_of(model=folder).engine.kv.groups.windows
    scarce = TableSizes(16, 32, windows).footprint(190) + 4 * len(windows)
    variants: list[dict[str, Any]] = [
        {},
        {"enforce_eager": True, "block_size": 4, "num_blocks": 4096},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"num_blocks": scarce, "max_num_batched_tokens": 32, "max_num_seqs": 16},
        {"enable_prefix_caching": False},
    ]
    for options in variants:
        engine = engine_of(model=folder, **options)
        assert engine.engine.kv.groups.windows == windows and any(windows)
        got = run(engine, requests, random.Random(1))
        assert [name for name in want if got[name].bits() != want[name]] == [], options
        preempted = engine.engine.scheduler.preemptions
        assert (preempted > 0) == (options.get("num_blocks") == scarce), f"{preempted} with {options}"
        if not options:
            again = run(engine, [replace_id(r, "again") for r in requests])
            assert [name for name in want if again[f"again-{name}"].bits() != want[name]] == []
            assert engine.engine.stats().prefix_hits > 0
        assert engine.engine.stats().used_blocks == 0


@native
@pytest.mark.parametrize("budget", [16, 512])
def test_a_long_sequence_holds_its_windows_only(folder: str, budget: int) -> None:
    engine = engine_of(model=folder, block_size=4, num_blocks=1024, max_num_batched_tokens=budget, max_num_seqs=2)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.submit(Request(id="long", prompt=tuple(range(3, 93)) * 2, params=params, seed=0, arrival=0.0))
    kv, most = engine.engine.kv, 0
    for report in reports(engine):
        (seq,) = engine.engine.scheduler.running or (None,)
        if seq is not None:
            held = [sum(b >= 0 for b in table) for table in seq.kv.blocks]
            assert held == [
                kv.sizes.kept(seq.computed + 1, window) - (seq.computed % 4 == 0) for window in kv.groups.windows
            ]
            assert report.stats.used_blocks == sum(held)
            most = max(most, report.stats.used_blocks)
    full, local = kv.groups.windows.count(0), sum(abs(w) // 4 + 2 for w in kv.groups.windows if w)
    assert most <= full * 55 + local <= kv.sizes.footprint(220)


def test_a_prefix_is_found_while_every_group_holds_what_it_needs() -> None:
    engine = FakeEngine(num_blocks=128, windows=(0, 8), max_num_batched_tokens=16)
    stem = list(range(100, 132))
    for name, prompt, hit in (
        ("cold", [*stem, 1, 2, 3, 4], 0),
        ("same", [*stem, 1, 2, 3, 4], 35),
        ("stem", [*stem, 5, 6, 7, 8], 32),
        ("half", stem[:16] + [9] * 8, 16),
    ):
        engine.submit(request(name, prompt, 3))
        engine.drain()
        assert engine.ends[name, 0].cached_tokens == hit, name


def test_a_prefix_whose_window_was_evicted_is_cut_to_one_that_is_there() -> None:
    engine = FakeEngine(num_blocks=128, windows=(0, 8), max_num_batched_tokens=16)
    stem = list(range(100, 132))
    engine.submit(request("cold", stem, 1))
    engine.drain()
    pool = engine.pool
    lost = [block for block in range(128) if pool.tokens(block) == tuple(stem[28:32])]
    assert len(lost) == 2, "a block of four tokens in either group"
    windowed = next(b for b in lost if len(pool._key[b] or b"") > 16)
    pool._evict(windowed)
    engine.submit(request("again", [*stem, 1], 1))
    engine.drain()
    assert engine.ends["again", 0].cached_tokens == 28


def test_layers_are_grouped_so_that_the_longest_sequence_holds_least() -> None:
    alternating = {i: 128 if i % 2 == 0 else 0 for i in range(24)}
    assert cut(alternating, 4096).windows == (0, 128)
    assert cut(alternating, 128) == LayerGroups((0,), (tuple(range(24)),)), "a window no sequence exceeds"
    assert cut(dict.fromkeys(range(3), 64), 256) == LayerGroups((64,), ((0, 1, 2),))
    one_of_thirty = {i: 0 if i == 7 else 64 for i in range(30)}
    plan = cut(one_of_thirty, 1 << 17)
    assert len(plan.layers) <= 8 and sorted(i for held in plan.layers for i in held) == list(range(30))
    assert plan.home(7)[0] == plan.windows.index(0)
    sizes = TableSizes(16, 512, (0, 100))
    for blocks in range(1, 400, 7):
        longest = sizes.capacity(blocks, 4000)
        assert sizes.footprint(longest) <= blocks and (longest == 4000 or sizes.footprint(longest + 1) > blocks)


@pytest.mark.parametrize(("size", "share"), [("1b", 0.2), ("4b", 0.2), ("12b", 0.2), ("27b", 0.21)])
def test_memory_of_a_long_context(size: str, share: float) -> None:
    layers, full, kv_heads, head_dim, window = GEMMA3[size]
    windows = {i: 0 if i % 6 == 5 else window for i in range(layers)}
    assert sum(w == 0 for w in windows.values()) == full
    layout = KVLayout(16, kv_heads, head_dim, BF16)
    kv = shape_kv(flat_config(), {i: LayerCacheSpec((layout,), window) for i, window in windows.items()}, 32768)
    before = 32768 * layers * 2 * kv_heads * head_dim * 2
    print(
        f"gemma-3-{size}, 32,768 tokens: {kv.bytes_held(32768) / 2**20:,.0f} MiB, {before / 2**20:,.0f} if all is kept"
    )
    assert kv.bytes_held(32768) < share * before


@pytest.mark.parametrize("size", ["4b", "12b", "27b"])
@pytest.mark.parametrize("drafts", ["gemma-3-1b", "llama-3.2-1b"])
def test_a_draft_model_of_another_layout_leaves_the_windows_alone(size: str, drafts: str) -> None:
    parts = gemma3(size)
    alone, first = shape_kv(flat_config(), parts, 32768).bytes_held(32768), len(parts)
    its = gemma3("1b", first)
    if drafts == "llama-3.2-1b":
        its = dict.fromkeys(range(first, first + 16), LayerCacheSpec((KVLayout(16, 8, 64, BF16),)))
    both = shape_kv(flat_config(), parts | its, 32768)
    least = sum(part.bytes_per_token * min(32768, part.window or 32768) for part in its.values())
    print(
        f"gemma-3-{size}: {alone / 1e6:,.0f} MB, with {drafts} {both.bytes_held(32768) / 1e6:,.0f}, {least / 1e6:,.0f}"
    )
    assert both.bytes_held(32768) <= 1.05 * (alone + least)


@native
@pytest.mark.parametrize("scarce", [False, True])
@pytest.mark.parametrize("target", ["decays of channels", "latents", "windows"])
def test_a_draft_model_with_windows_changes_no_bit(target: str, scarce: bool, tmp_path: Path) -> None:
    """Prompts, of up to 120 tokens in one chunk, slide out of its windows before it has drafted anything."""
    for name, kind in (("target", target), ("draft", "windows")):
        family, facts = TINY[kind]
        write(tmp_path / name, family, **facts | {"max_position_embeddings": 256}, dtype=torch.bfloat16)
        write_words(tmp_path / name, 99)
    requests, model = make_requests(9, 99), str(tmp_path / "target")
    want = {name: answer.bits() for name, answer in run(engine_of(model=model), requests).items()}
    asked = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3, "adaptive": False}
    options: dict[str, Any] = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 4} if scarce else {}
    engine = engine_of(model=model, speculative_config=json.dumps(asked), **options)
    assert WINDOW in engine.engine.kv.groups.windows, "the draft's windows slide"
    got = run(engine, requests)
    assert [name for name in want if got[name].bits() != want[name]] == []
    again = run(engine, [replace_id(r, "again") for r in requests])
    assert [name for name in want if again[f"again-{name}"].bits() != want[name]] == []
    speculator = engine.engine.speculator
    assert speculator is not None and speculator.totals.drafts > (0 if scarce else 50)
    if target == "windows" and not scarce:
        assert speculator.totals.accepted == speculator.totals.tokens, "it is the target's own model, and lacks nothing"
    assert engine.engine.stats().used_blocks == 0


DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "wider": ("llama", {"head_dim": 64, "num_hidden_layers": 2}),
    "narrower": ("llama", {"head_dim": 8, "num_key_value_heads": 1, "num_hidden_layers": 3}),
    "as many bytes": ("llama", {"head_dim": 8, "num_key_value_heads": 4, "num_hidden_layers": 2}),
}
"""Draft models beside layers of 2 key/value heads of 16."""


@pytest.mark.sampled(5)
@native
@pytest.mark.parametrize(
    ("drafts", "kv_cache_dtype"), [*((name, "auto") for name in DRAFTS), ("narrower", "int8"), ("wider", "float16")]
)
def test_drafts_of_another_layout_change_no_bit(drafts: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    family, facts = MODELS["gemma3"]
    sizes = {"max_position_embeddings": 256}
    write(target, family, **sizes | facts | {"sliding_window": WINDOW}, dtype=torch.bfloat16)
    family, facts = DRAFTS[drafts]
    write(draft, family, **sizes | facts, dtype=torch.bfloat16)
    write_words(target, 99), write_words(draft, 99)
    given = {"model": str(target), "kv_cache_dtype": kv_cache_dtype}
    requests = make_requests(5, 99)
    want = {name: answer.bits() for name, answer in run(engine_of(**given), requests).items()}
    asked = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, "adaptive": False}
    for more in ({}, {"topk": 3, "num_draft_tokens": 9}):
        drafting = given | {"speculative_config": json.dumps(asked | more)}
        engine = engine_of(**drafting)
        assert {WINDOW, 0} == set(engine.engine.kv.groups.windows), "the windows slide"
        got = run(engine, requests)
        assert [name for name in want if got[name].bits() != want[name]] == []
        assert engine.engine.stats().used_blocks == 0
        speculator = engine.engine.speculator
        assert speculator is not None and speculator.totals.drafts > 0
    kv, caches = engine.engine.kv, engine.engine.runner.caches
    nbytes = sum(t.nbytes for cache in caches.own for t in (cache.keys, cache.values))
    plan = Planner(flat_config(device="cpu", num_blocks=512, **drafting), Machine())
    assert plan.kv.groups == kv.groups and plan.account.kv == nbytes == kv.blocks * kv.block_bytes
