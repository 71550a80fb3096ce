"""What surrounds the GPU's kernels, without a GPU: copies that overlap steps, padding to graphs, the memory budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fake_gpu import FakeRuntime
from oracle import write
from quire.core.config import flat_config
from quire.core.dtypes import F16
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.llm import LLM
from quire.engine.start import start_engine
from quire.ops.choice import OPS
from quire.ops.op import REGISTRY
from quire.ops.triton.backend import GpuOps
from quire.ops.triton.gpu import INTERPRETER, Gpu
from quire.run.device_arrays import DeviceArrays
from quire.run.gpu_step import warm_device
from quire.run.kv_budget import gpu_cache_bytes
from quire.run.step_sizes import MAX_GRAPH_ROWS, Sizes, fitting, graph_sizes
from tiny_model import OPTIONS, write_tiny
from triton_ops import TRITON_OPS, needs_triton
from turns import working

MISSING = tuple(f"{name}=reference" for name in sorted(REGISTRY) if name not in TRITON_OPS)


def ops_on(runtime: FakeRuntime, device: str = "cpu") -> GpuOps:
    """The definitions on a device that pretends."""
    gpu = Gpu(torch.device(device), INTERPRETER, True, runtime)
    return GpuOps(gpu, tuple(f"{name}=reference" for name in OPS))


def arrays_of(sizes: Sizes, runtime: FakeRuntime, own: dict[str, torch.Tensor] | None = None) -> DeviceArrays:
    return DeviceArrays(sizes, ops_on(runtime), own or {})


@pytest.mark.parametrize("eager", ["side", "main"])
def test_a_step_reads_its_own_arrays_whenever_copies_happen(eager: str) -> None:
    runtime = FakeRuntime(eager)
    arrays = arrays_of(Sizes(8, 4, 6, groups=2), runtime)
    seen: list[tuple[list[int], list[list[list[int]]]]] = []
    expected = []
    for step in range(7):
        arrays.begin()
        arrays.tokens[:] = np.arange(8) + 100 * step
        arrays.block_tables[0, : 1 + step % 4, :] = step
        arrays.block_tables[1, : 1 + step % 4, :] = 50 + step
        seqs, blocks = 1 + step % 4, 2 + step % 3
        arrays.send(seqs, blocks)
        batches = arrays.batches(8, seqs, 1)
        runtime.queue(
            lambda both=batches, n=blocks: seen.append(  # type: ignore[misc]
                (both[0].tokens.tolist(), [b.block_tables[:, :n].tolist() for b in both])
            )
        )
        tables = [[[which + step] * blocks] * seqs for which in (0, 50)]
        expected.append(([100 * step + i for i in range(8)], tables))
    runtime.fetch([])()
    assert seen == expected
    assert 0 < runtime.waits <= 6, "the host runs one step ahead, and no further"


@pytest.mark.parametrize("eager", ["side", "main"])
def test_rows_see_their_encoder_s_part_whenever_copies_happen(eager: str) -> None:
    runtime = FakeRuntime(eager)
    arrays = arrays_of(Sizes(8, 4, 6, cross=True), runtime)
    seen, expected = list[tuple[list[int], list[int], list[int]]](), []
    for step in range(5):
        seqs, tokens = 1 + step % 4, 2 + step
        arrays.begin()
        arrays.encoded[:seqs] = 10 * step + np.arange(seqs)
        arrays.block_tables[1, :seqs, :3] = 100 * step + np.arange(seqs)[:, None]
        arrays.cu_q[: seqs + 1] = [*range(seqs), tokens]
        arrays.send(seqs, 3)
        cross = arrays.batches(tokens, seqs, 1)[0].cross
        assert cross is not None
        runtime.queue(lambda n=tokens: arrays.complete(n))  # type: ignore[misc]
        runtime.queue(
            lambda c=cross: seen.append((c.cu_q.tolist(), c.context.tolist(), c.block_tables[:, 2].tolist()))  # type: ignore[misc]
        )
        owners = [*range(seqs - 1), *[seqs - 1] * (tokens - seqs + 1)]
        expected.append((list(range(tokens + 1)), [10 * step + s for s in owners], [100 * step + s for s in owners]))
    runtime.fetch([])()
    assert seen == expected


@pytest.mark.parametrize("eager", ["side", "main"])
def test_tokens_that_were_drawn_in_pieces_are_found_by_their_places(eager: str) -> None:
    runtime = FakeRuntime(eager)
    arrays = arrays_of(Sizes(8, 4, 6), runtime)
    arrays.keep_drawn([np.array([50, 60], np.int32), np.array([70], np.int32)])
    arrays.begin()
    arrays.tokens[:4] = -1, 9, -3, -2
    arrays.send(4, 1)
    seen = list[int]()
    runtime.queue(lambda: arrays.complete(4))
    runtime.queue(lambda: seen.extend(arrays.batches(4, 4, 4)[0].tokens.tolist()))
    runtime.fetch([])()
    assert seen == [50, 9, 70, 60]


def test_arrays_stay_where_graphs_read_them() -> None:
    arrays = arrays_of(Sizes(8, 4, 6), FakeRuntime())
    places = []
    for _ in range(3):
        arrays.begin()
        arrays.send(4, 6)
        batch = arrays.batches(4, 4, 4)[0]
        there = [getattr(batch, name) for name in batch.__slots__]
        places.append([array.data_ptr() for array in there if array is not None])
    assert places[0] == places[1] == places[2]


def test_adapters_rows_arrive_where_the_decoder_reads_them() -> None:
    rows = torch.full((8,), -1, dtype=torch.int32)
    runtime = FakeRuntime()
    arrays = arrays_of(Sizes(8, 4, 6), runtime, {"adapters": rows})
    arrays.begin()
    arrays.adapters[:] = np.arange(8)
    arrays.send(1, 1)
    runtime.fetch([])()
    assert rows.tolist() == list(range(8))


@pytest.mark.parametrize("eager", ["side", "main"])
def test_bytes_of_blocks_are_those_once_what_is_queued_is_done(eager: str) -> None:
    runtime = FakeRuntime(eager)
    ops, tail = ops_on(runtime), np.array([7, 8], np.uint8)
    parts = [torch.zeros(4, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)]
    runtime.queue(lambda: parts[0].fill_(5))
    found = ops.gather(parts, tail)
    ops.scatter(parts, np.arange(11, 18, dtype=np.uint8))
    tail[:] = 0
    assert found().tolist() == [5, 5, 5, 5, 1, 1, 1, 7, 8]
    runtime.fetch([])()
    assert torch.cat(parts).tolist() == [*range(11, 18)]


def test_sizes_of_graphs_hold_every_small_step_and_pad_little() -> None:
    sizes = graph_sizes(8192, 200)
    assert sizes[0] == 1 and sizes[-1] == MAX_GRAPH_ROWS and 200 in sizes
    for tokens in range(1, MAX_GRAPH_ROWS + 1):
        size, _ = fitting(sizes, tokens, tokens, tokens, exact=False)
        assert tokens <= size and (size - tokens <= max(7, tokens / 4)), tokens
    assert fitting(sizes, MAX_GRAPH_ROWS + 1, 1, 1, exact=False) == (0, 0)
    assert fitting(sizes, 100, 3, 3, exact=False) == (112, 112), "chunks of prompts may be in it"
    assert max(graph_sizes(16, 64)) == 16, "no graph is larger than a step"
    assert fitting((), 5, 5, 5, exact=True) == (5, 5) and fitting((), 5, 4, 4, exact=True) == (0, 0)
    assert fitting((), 5, 1, 5, exact=True) == (5, 1), "a draft's rows are replayed, too"


def test_the_cache_gets_what_the_model_and_a_step_leave() -> None:
    steps: list[int] = []
    assert gpu_cache_bytes(FakeRuntime(free=700, total=1000, needed=150), 0.9, lambda: steps.append(1)) == 450
    assert steps == [1]
    with pytest.raises(ConfigError, match=r"of 1,000 bytes, 600 are taken .* a step needs 350: nothing is left"):
        gpu_cache_bytes(FakeRuntime(free=400, total=1000, needed=350), 0.9, lambda: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


PROMPTS = ["abcdefghijklmnopqrstuv", "q", "hello"]
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=2)
SMALL = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
"""Few graphs: each is run once per layer and op, as Python."""
STEPS = {"graphs": SMALL, "eager": SMALL | {"enforce_eager": True},
         "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 3}}  # fmt: skip


@needs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("steps", ["graphs", *(pytest.param(s, marks=pytest.mark.slow) for s in ("eager", "chunks"))])
def test_the_engine_on_the_gpu_backend_gives_the_reference_s_tokens(folder: Path, steps: str) -> None:
    found = []
    for options in ({"device": "reference"}, {"device": "cuda", "ops": MISSING} | STEPS[steps]):
        with LLM(folder, **(OPTIONS | options)) as llm:
            found.append([o.outputs[0] for o in llm.generate(PROMPTS, GREEDY)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert ours.token_ids == theirs.token_ids
        mine, other = ([p[t].logprob for p, t in zip(o.logprobs, o.token_ids, strict=True)] for o in (ours, theirs))
        assert mine == pytest.approx(other, abs=1e-4)


@needs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_fp16_checkpoints_stay_fp16_on_the_gpu_backend(tmp_path: Path) -> None:
    folder = tmp_path / "half"
    write(folder, "llama", dtype=torch.float16)
    found, numbers = [], []
    for options in ({"device": "reference", "dtype": "float32"}, {"device": "cuda", "ops": MISSING} | SMALL):
        engine = start_engine(flat_config(model=str(folder), num_blocks=64, enforce_eager=True, **options))
        found.append(engine.model)
        engine.submit(request(0, (5, 6, 7, 8, 9), logprobs=3))
        tops = []
        for _ in working(engine):
            tops += [value for out in engine.step() for lp in out.logprobs for _, value in lp.top]
        numbers.append(tops)
    half, matrix = found[1], found[1].decoder.layers[0].o.weight  # type: ignore[attr-defined]
    assert half.dtype == "float16" and not half.notes
    assert {t.dtype for t in (half.decoder.embed.table, matrix.buffers[0])} == {torch.float16}  # type: ignore[attr-defined]
    assert half.layouts[0][0].dtype == F16, "as its keys and values"
    assert numbers[1] == pytest.approx(numbers[0], abs=2e-2) and len(numbers[0]) == 12


@needs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.slow
def test_padding_changes_no_bit_and_touches_no_block(folder: Path) -> None:
    answers = []
    for more in ({}, {"enforce_eager": True}):
        options = OPTIONS | {"device": "cuda", "ops": MISSING, "model": str(folder)} | SMALL | more
        engine = start_engine(flat_config(**options))
        assert (engine.runner.step.graph_sizes == ()) == bool(more)
        for i, prompt in enumerate(((5, 6, 7), (9,) * 20, (8, 4))):
            engine.submit(request(i, prompt))
        tokens: dict[str, list[int]] = {}
        for _ in working(engine):
            for out in engine.step():
                tokens.setdefault(out.request_id, []).extend(out.tokens)
        answers.append(tokens)
        spare = engine.runner.caches.of_layer[0][0].keys[engine.pool.num_blocks]
        assert bool(spare.any()) == (not more), "only rows that pad are written there"
    assert answers[0] == answers[1]


@needs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.slow
def test_logits_of_prompts_in_pieces_change_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the next step, sent ahead, names by its place a token that is drawn in the last piece."""
    found = []
    for rows in (256, 1):
        monkeypatch.setattr("quire.run.step.LOGITS_AT_ONCE", rows)
        options = OPTIONS | {"device": "cuda", "ops": MISSING, "model": str(folder)} | SMALL | {"enforce_eager": True}
        engine = start_engine(flat_config(**options))
        assert engine.ahead and engine.runner.step.most_logits == (16 if rows > 16 else 4)
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
        engine.submit(request(0, (9, 8)))
        engine.submit(Request(id="scored", prompt=tuple(range(5, 16)), params=params, seed=0, arrival=0.0))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        found.append([(out.request_id, out.tokens, out.prompt_logprobs) for out in outputs])
    assert found[0] == found[1] and sum(len(scores or ()) for _, _, scores in found[0]) == 10


@needs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_the_start_runs_every_kernel_and_touches_no_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"device": "cuda", "ops": MISSING, "max_num_batched_tokens": 5, "max_num_seqs": 2, "enforce_eager": True}
    step = start_engine(flat_config(model=str(folder), **(OPTIONS | options))).runner.step
    called: list[str] = []

    def watched(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: (called.append(name), fn(*args, **named))[1]

    for name in sorted(REGISTRY):
        monkeypatch.setattr(step.ops, name, watched(name, getattr(step.ops, name)))
    warm_device(step, trees=True)
    assert {"attention", "sample", "top_logprobs", "penalize", "copy_blocks", "zero_blocks"} <= set(called)
    assert "move_slots" in called
    assert called.count("embedding") == 2 * len((1, 2, 4, 5)), "steps of one sequence and of many"
    assert not any(bool(cache.keys[: step.caches.pad_block].any()) for cache in step.caches.own)


def request(index: int, prompt: tuple[int, ...], logprobs: int | None = None) -> Request:
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=logprobs)
    return Request(id=f"r{index}", prompt=prompt, params=params, seed=0, arrival=0.0)


def test_a_decoder_moves_with_all_its_tensors(folder: Path) -> None:
    engine = start_engine(flat_config(**(OPTIONS | {"model": str(folder), "enable_lora": True})))
    decoder = engine.model.decoder
    moved = ops_on(FakeRuntime(), "meta").place(decoder)

    def tensors(value: object, seen: set[int]) -> list[Any]:
        if id(value) in seen:
            return []
        seen.add(id(value))
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return [value]
        if isinstance(value, (tuple, list)):
            return [t for v in value for t in tensors(v, seen)]
        return [t for v in vars(value).values() for t in tensors(v, seen)] if hasattr(value, "__dict__") else []

    before = [*tensors(decoder.layers, set()), decoder.embed.table]
    after = [*tensors(moved.layers, set()), moved.embed.table]
    assert len(after) == len(before) > 10, "what was one tensor stays one"
    assert all(t.device.type == "meta" for t in after)
    there = ops_on(FakeRuntime()).place(decoder)
    assert ops_on(FakeRuntime()).place(there) is there
