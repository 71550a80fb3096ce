"""Encoder-decoders on the GPU backend: the reference's tokens, and bits that neither graphs nor neighbours change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oracle import write
from quire.core.config import flat_config
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.start import start_engine
from quire.ops.op import REGISTRY
from triton_ops import TRITON_OPS, needs_triton
from turns import working

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]
MISSING = tuple(f"{name}=reference" for name in sorted(REGISTRY) if name not in TRITON_OPS)
FACTS = {"d_ff": 96, "d_kv": 16, "num_layers": 1, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu",
         "relative_attention_num_buckets": 8, "relative_attention_max_distance": 8}  # fmt: skip
PROMPTS = (tuple(range(3, 12)), (7, 8), tuple(range(40, 51)))
ROOMY = {"max_num_batched_tokens": 16, "max_num_seqs": 3, "num_blocks": 24}
Answers = dict[str, tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t5")
    write(path, "t5", **FACTS)
    return path


def run(folder: Path, prompts: tuple[tuple[int, ...], ...] = PROMPTS, **options: Any) -> tuple[Answers, Engine]:
    """Tokens and their log-probabilities by request."""
    sizes = {"max_model_len": 18, "block_size": 2, "dtype": "float32"}
    engine = start_engine(flat_config(model=str(folder), **(sizes | options)))
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=0)
    for tokens in prompts:
        engine.submit(Request(id=str(tokens[0]), prompt=tokens, params=params, seed=0, arrival=0.0))
    found: Answers = {str(tokens[0]): ([], []) for tokens in prompts}
    for _ in working(engine):
        for output in engine.step():
            assert output.error is None
            found[output.request_id][0].extend(output.tokens)
            found[output.request_id][1].extend(p.logprob for p in output.logprobs)
    return found, engine


NGRAM = '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 2, "adaptive": false}'
GPU: dict[str, Any] = {"device": "cuda", "ops": MISSING}


@pytest.fixture(scope="module")
def graphs(folder: Path) -> Answers:
    return run(folder, **GPU, **ROOMY)[0]


@pytest.mark.slow
def test_an_encoder_decoder_gives_the_reference_s_tokens(folder: Path, graphs: Answers) -> None:
    want, _ = run(folder, device="reference", num_blocks=24)
    for name, (tokens, logprobs) in want.items():
        assert graphs[name][0] == tokens
        assert graphs[name][1] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.slow
def test_neither_preemption_nor_graphs_nor_neighbours_change_bits(folder: Path, graphs: Answers) -> None:
    tight, engine = run(folder, **GPU, **(ROOMY | {"num_blocks": 18}), enforce_eager=True)
    assert engine.scheduler.preemptions > 0
    assert tight == graphs
    alone, _ = run(folder, PROMPTS[2:], **GPU, **ROOMY)
    assert alone == {name: graphs[name] for name in alone}


@pytest.mark.slow
def test_drafts_change_no_bit(folder: Path, graphs: Answers) -> None:
    drafted, engine = run(folder, **GPU, **ROOMY, speculative_config=NGRAM)
    assert engine.stats().draft_tokens > 0
    assert {name: tokens for name, (tokens, _) in drafted.items()} == {name: graphs[name][0] for name in graphs}


@pytest.mark.slow
def test_the_start_computes_a_prompt_and_leaves_no_trace(folder: Path) -> None:
    options = {"max_num_batched_tokens": 4, "max_num_seqs": 2, "enforce_eager": True}
    _, engine = run(folder, (), device="cuda", ops=MISSING, **options)
    step = engine.runner.step
    assert len(step.arrays.tokens) == 18, "a step has room for the longest sequence"
    step.profile(8)
    kept = [cache.keys for cache in step.caches.own]
    assert all(bool(keys[step.caches.pad_block].any()) for keys in kept)
    assert not any(bool(keys[: step.caches.pad_block].any()) for keys in kept)
