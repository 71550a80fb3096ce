"""Stages of layers in processes of their own: the bits of one rank, whatever is under way, and a stage that dies."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paths
from engine_answers import engine_of as local_engine_of
from engine_answers import killed, make_requests
from engine_answers import run as run_local
from lora_adapters import TARGETS, write_adapter
from model_variants import SHARED_OUT as MODELS
from oracle import backend, write
from paged_model import VARIANTS, Paged, prompt
from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Output, Request
from quire.engine.engine import Engine
from quire.engine.processes.process import ProcessEngine
from quire.engine.start import start_engine
from quire.model.build import Model, load_model
from quire.model.load.pipeline_stages import cut
from quire.model.net.decoder import Decoder
from quire.model.net.pipeline_parallel import PipelineStage
from quire.ops.arrays import to_torch
from quire.ops.native import load_native
from quire.parallel.rank_place import RankPlace
from quire.parallel.shared import SharedComm, comm_bytes, shared_memory
from quire.parallel.topology import Topology
from quire.run.multi_rank import MultiRankExecutor
from turns import turns

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
PYDOC = str(paths.PYDOC)
CLASSES = {
    name: model for name, model in MODELS.items() if name not in ("several streams", "stacks that run in turns")
} | {
    "post-LN": VARIANTS["opt_350m"],
    "learned positions": VARIANTS["opt"],
    "a narrow head": VARIANTS["opt_narrow"],
    "layers with a window and without": VARIANTS["gemma3_full_first"],
    "scaled stream": VARIANTS["granite"],
    "scans of channels": VARIANTS["mamba"],
    "four experts": ("mixtral", {"num_local_experts": 4}),
}


def in_stages(folder: Path, stages: int, **options: Any) -> list[Model]:
    """Every stage of a model, all in this process: what goes between them has room to wait there."""
    file, models = shared_memory(comm_bytes(stages)), []
    config = flat_config(
        model=str(folder), dtype="float32", device="cpu", threads=1, pipeline_parallel_size=stages, **options
    )
    for rank in range(stages):
        place = RankPlace(Topology(pipeline=stages), rank, {"pipeline": SharedComm(file, rank, stages, crowded=True)})
        models.append(load_model(config, backend("cpu"), place=place))
    os.close(file)
    return models


def logits_of(models: list[Model], tokens: list[int], cuts: list[int], adapter: int = -1) -> list[Tensor]:
    """The logits of each step; `models`: the whole, or all stages."""
    paged = [Paged(model, [tokens]) for model in models]
    found = []
    for count in cuts:
        parts: list[Tensor] = []
        for model, own in zip(models, paged, strict=True):
            if model.adapters is not None:
                model.adapters.rows[:] = adapter
            assert isinstance(model.decoder, Decoder)
            model.decoder.ops.begin_step()
            batch, caches = model.decoder.ops.place(own.batch([count])), [own.caches[i] for i in model.own]
            parts.append(to_torch(model.decoder(batch, caches, (batch,) * len(caches))).clone())
        first = models[0].decoder
        if isinstance(first, PipelineStage):
            room = first.ops.zeros((len(parts[-1]), models[0].spec.embed_width))
            h = first.comm.recv(first.ops, room, len(models) - 1)
            parts[-1] = torch.cat((to_torch(first.part(h, batch)), parts[-1]), 1)
        found.append(parts[-1])
    return found


def check_bits(folder: Path, stages: int, adapter: int = -1, **options: Any) -> None:
    tokens, cuts = prompt(23, 1), [9, 13, 1]
    config = flat_config(model=str(folder), dtype="float32", device="cpu", threads=1, **options)
    want = logits_of([load_model(config, backend("cpu"))], tokens, cuts, adapter)
    got = logits_of(in_stages(folder, stages, **options), tokens, cuts, adapter)
    assert all(map(torch.equal, got, want)) and want[-1].isfinite().all()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CLASSES)
def test_stages_give_the_bits_of_the_whole(name: str, tmp_path: Path) -> None:
    family, facts = CLASSES[name]
    write(tmp_path, family, **facts)
    check_bits(tmp_path, 2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grouped queries", {"quantization": "int8"}),
        ("tied head", {"quantization": "int4"}),
        ("tied head", {}),
        ("latents", {"quantization": "nf4"}),
        ("four experts", {"quantization": "int8"}),
    ],
)
def test_three_stages_and_quantized_weights(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    family, facts = CLASSES[name]
    write(tmp_path, family, **facts | {"num_hidden_layers": 4})
    check_bits(tmp_path, 3, **options)


def test_adapters_of_layers_are_where_the_layers_are(tmp_path: Path) -> None:
    oracle = write(tmp_path / "model", "llama")
    folder = write_adapter(tmp_path / "adapter", oracle, TARGETS["llama"], seed=3)
    check_bits(tmp_path / "model", 2, 0, enable_lora=True, lora_modules=(f"a={folder}",))


def test_a_stage_has_its_own_layers_alone(tmp_path: Path) -> None:
    write(tmp_path, "gemma2", head_dim=24, sliding_window=5, query_pre_attn_scalar=20, num_hidden_layers=6)
    first, second = in_stages(tmp_path, 2, pipeline_layers="4,2")
    assert (first.own, second.own) == (range(4), range(4, 6))
    assert first.report["o"][1] == 2 * second.report["o"][1] and first.weight_bytes > second.weight_bytes


def test_ranges_are_even_by_cost() -> None:
    def sizes(*args: Any) -> list[int]:
        return [len(part) for part in cut(*args) or ()]

    every = set(range(16))
    assert sizes([1.0] * 16, (0, 0), 2, every) == [8, 8]
    assert sizes([1.0] * 16, (0, 2.1), 2, every) == [9, 7]
    assert sizes([1.0] * 4 + [3.0] * 4, (0, 0), 2, every) == [5, 3]
    assert sizes([1.0] * 16, (0, 0), 4, {3, 4, 8, 13}) == [4, 4, 5, 3]
    assert cut([1.0] * 3, (0, 0), 4, every) is None and cut([1.0] * 4, (0, 0), 3, {2}) is None


@contextmanager
def engine_of(**options: Any) -> Iterator[Engine]:
    fixed = {"model": PYDOC, "dtype": "float32", "max_model_len": 256, "device": "cpu", "threads": 1}
    with closing(start_engine(flat_config(**fixed | options))) as engine:
        yield engine


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9, "n": 3, "logprobs": 0},
    {"temperature": 0.7, "presence_penalty": 0.5}, {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "stop_token_ids": tuple(range(20, 60))}, {"temperature": 0.5, "min_tokens": 9, "top_k": 7},
]  # fmt: skip


def requests_of(count: int) -> list[Request]:
    """Prompts that repeat themselves, some of which begin alike."""
    rng, made = random.Random(5), []
    stems = [[rng.randrange(3, 90) for _ in range(20)] for _ in range(3)]
    for i in range(count):
        prompt = [*(rng.choice(stems) * 5)[: rng.choice((1, 16, 40, 90))], rng.randrange(3, 90)]
        params = SamplingParams(max_tokens=rng.choice((1, 7, 30)), **WAYS[i % len(WAYS)])
        made.append(Request(id=f"r{i}", prompt=tuple(prompt), params=params, seed=i, arrival=0.0))
    return made


Answers = dict[tuple[str, int], tuple[Any, ...]]


def run(
    engine: Engine, requests: list[Request], each: Callable[[int], object] = lambda turn: None, beside: int = 2
) -> Answers:
    """What every sequence gave, log-probabilities with all their bits; requests trickle in.

    `beside`: steps that are to be under way at some time, beside the one that was just taken.
    """
    rng, waiting, most = random.Random(1), list(requests), 0
    found: dict[tuple[str, int], list[Output]] = {}
    for turn in turns(lambda: waiting or engine.has_work):
        for request in waiting[: rng.randint(0, 6)]:
            engine.submit(request)
            waiting.remove(request)
        each(turn)
        for out in engine.step() if engine.has_work else ():
            found.setdefault((out.request_id, out.index), []).append(out)
        most = max(most, len(engine.step_queue))
    assert engine.pool.num_used == 0 and (engine.config.parallel.ranks == 1 or most >= beside)
    return {key: (
        [t for o in outs for t in o.tokens], [lp for o in outs for lp in o.logprobs],
        [lp for o in outs for lp in o.prompt_logprobs or ()], outs[-1].finish_reason, outs[-1].error,
    ) for key, outs in found.items()}  # fmt: skip


FEATURES: dict[str, dict[str, Any]] = {
    "two stages, looked up": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 64, "speculative_config":
                              '{"method": "ngram", "adaptive": false, "prompt_lookup_min": 1}'},
    "few blocks in three": {"pipeline_parallel_size": 3, "num_blocks": 66, "block_size": 2, "max_model_len": 130},
    "every op by itself": {"pipeline_parallel_size": 2, "enforce_eager": True, "max_num_batched_tokens": 80},
    "trees of look-ups": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 64, "speculative_config":
                          '{"method": "suffix", "adaptive": false, "topk": 3, "num_draft_tokens": 9, '
                          '"num_speculative_tokens": 3, "prompt_lookup_min": 1}'},
    "a draft model": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 64, "speculative_config":
                      f'{{"method": "draft_model", "model": "{PYDOC}"}}'},
    "no chunks": {"pipeline_parallel_size": 2, "enable_chunked_prefill": False},
    "one row a step": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 8, "max_num_seqs": 8},
    "no prefixes": {"pipeline_parallel_size": 2, "enable_prefix_caching": False, "pipeline_micro_batches": 7},
    "most urgent first": {"pipeline_parallel_size": 2, "scheduling_policy": "priority", "target_itl_ms": 5.0},
}  # fmt: skip
FAST = 2


@pytest.mark.parametrize(
    "form", [form if i < FAST else pytest.param(form, marks=pytest.mark.slow) for i, form in enumerate(FEATURES)]
)
def test_an_engine_of_stages_says_what_one_rank_says(form: str) -> None:
    options, requests = FEATURES[form], requests_of(24)
    with engine_of() as one:
        want = run(one, requests)
    with engine_of(**options) as engine:
        assert run(engine, requests) == want and run(engine, requests[:9]).items() <= want.items()
        assert (engine.scheduler.preemptions > 0) == ("num_blocks" in options)
        bubbles = engine.stats().bubbles
        assert len(bubbles) == options["pipeline_parallel_size"] and all(0 <= share < 1 for share in bubbles)
        engine.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept"),
    [("post norms", "int8"), ("layers with a window and without", "fp8"), ("experts", "int8"), ("latents", "bfloat16")],
)
def test_other_models_and_quantized_keys(name: str, kept: str, tmp_path: Path) -> None:
    family, facts = CLASSES[name]
    write(tmp_path, family, **facts | {"max_position_embeddings": 256})
    requests = requests_of(18)
    fixed = {"model": str(tmp_path), "kv_cache_dtype": kept, "num_blocks": 60, "max_num_batched_tokens": 64}
    with engine_of(**fixed) as one:
        want = run(one, requests)
    with engine_of(**fixed, pipeline_parallel_size=2) as engine:
        assert run(engine, requests) == want


@pytest.mark.slow
def test_stages_of_shares_have_the_bits_of_shares() -> None:
    requests = requests_of(18)
    with engine_of(tensor_parallel_size=2) as one:
        want = run_alone(one, requests)
    with engine_of(tensor_parallel_size=2, pipeline_parallel_size=2) as engine:
        assert run(engine, requests) == want


def run_alone(engine: Engine, requests: list[Request]) -> Answers:
    """`run` of an engine that has one step under way."""
    return run(engine, requests, beside=0)


def test_aborted_while_steps_are_under_way() -> None:
    requests = requests_of(12)
    with engine_of() as one:
        want = run(one, requests)
    with engine_of(pipeline_parallel_size=2) as engine:
        dropped = ("r1", "r3", "r5", "r8")
        found = run(engine, requests, lambda turn: engine.abort(dropped[turn // 2 % len(dropped)]), 1)
        assert engine.submit(requests[0]) is None
        kept = {key: answer for key, answer in found.items() if key[0] not in dropped}
        assert kept and kept == {key: want[key] for key in kept}


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stage_that_dies_ends_the_engine(stage: int) -> None:
    with engine_of(pipeline_parallel_size=3) as engine:
        assert isinstance(engine.executor, MultiRankExecutor)
        others = engine.executor.ranks.others
        with pytest.raises(ValueError, match="a rank of the group has ended"):
            run(engine, requests_of(12), lambda turn: os.kill(others[stage - 1].pid, signal.SIGKILL))
    assert all(other.ended() is not None for other in others)


def test_what_stages_cannot_do_is_said(tmp_path: Path) -> None:
    for options, why in (
        ({"speculative_config": '{"method": "self", "quantization": "int4"}'}, "read what other stages have"),
        ({"pipeline_layers": "3"}, "needs a number of layers for each of the 2 stages"),
        ({"pipeline_layers": "0,3"}, "needs a number of layers for each of the 2 stages"),
        ({"pipeline_micro_batches": 65}, r"must lie in \[0, 64\]"),
        ({"pipeline_parallel_size": 16, "tensor_parallel_size": 8}, "are more than 64 ranks"),
        ({"expert_parallel_size": 2}, "experts that are divided over ranks"),
        ({"weight_offload": "disk"}, "weights come while steps run"),
        ({"pipeline_parallel_size": 1, "pipeline_micro_batches": 4}, "of --pipeline-parallel-size 2 or more"),
    ):
        with pytest.raises(ConfigError, match=why):
            flat_config(**({"model": PYDOC, "pipeline_parallel_size": 2} | options))
    write(tmp_path / "llama", "llama")
    write(tmp_path / "t5", "t5")
    for name, asked, why in (
        ("llama", {"pipeline_layers": "3,3"}, "the model has 3 layers, not 6"),
        ("llama", {"pipeline_parallel_size": 4}, "3 layers cannot be cut into so many stages"),
        ("t5", {}, "an encoder's output is read by all layers"),
    ):
        config = flat_config(**{"model": str(tmp_path / name), "device": "cpu", "pipeline_parallel_size": 2, **asked})
        place = RankPlace(Topology(pipeline=config.parallel.pipeline_parallel_size), 0)
        with pytest.raises(ConfigError, match=why):
            load_model(config, backend("cpu"), place=place)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_may_be_killed_and_requests_go_on(rank: int) -> None:
    """SIGKILL of the engine, which is the first stage, or of another one, while steps are under way."""
    requests = [each for each in make_requests(24, 6144, 3) if each.params.n == 1]
    alone = local_engine_of(enable_prefix_caching=False)
    want = {request.id: answer.bits() for request in requests for answer in run_local(alone, [request]).values()}
    config = flat_config(model=PYDOC, device="cpu", threads=1, num_blocks=512, pipeline_parallel_size=3)
    turn, victims = 0, [rank, rank]

    def kill(engine: ProcessEngine) -> None:
        nonlocal turn
        turn += 1
        if turn % 12 or not victims:
            return
        first = engine.channel.process.pid  # type: ignore[attr-defined]
        others = [pid for path in Path(f"/proc/{first}/task").glob("*/children") for pid in path.read_text().split()]
        os.kill([first, *sorted(map(int, others))][victims.pop()], signal.SIGKILL)

    found = killed(requests, lambda: ProcessEngine(config), kill)
    assert not victims and {name: answer.bits() for name, answer in found.items()} == want
