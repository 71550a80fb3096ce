"""The engine on the native backend: what a decode step is made of, and how much of the cache it wastes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from quire.core.config import flat_config
from quire.core.errors import ConfigError
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.local import LocalEngine
from turns import reports


class Recorder(TorchDispatchMode):
    """Names of the torch operations that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


VIEWS = {"aten.view.default", "aten.slice.Tensor", "aten.detach.default", "aten.select.int", "aten.view.dtype",
         "aten._unsafe_view.default", "aten.alias.default", "aten.as_strided.default"}  # fmt: skip


def submit(engine: LocalEngine, name: str, prompt: int, tokens: int, **params: Any) -> None:
    rng = random.Random(name)
    engine.submit(
        Request(
            id=name,
            prompt=tuple(rng.randrange(5, 6000) for _ in range(prompt)),
            params=SamplingParams(max_tokens=tokens, ignore_eos=True, **params),
            seed=1,
            arrival=0.0,
        )
    )


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_no_torch_arithmetic_in_a_decode_step(quantization: str | None, eager: bool) -> None:
    engine = LocalEngine(flat_config(device="cpu", num_blocks=64, quantization=quantization, enforce_eager=eager))
    for i in range(4):
        submit(engine, f"r{i}", 20, 12, temperature=float(i % 2), top_p=0.9, logprobs=2 if i > 1 else None)
    for _ in range(3):
        engine.poll(0)
    with Recorder() as recorder:
        report = engine.poll(0)
    assert report is not None and sum(len(o.tokens) for o in report.outputs) == 4
    assert recorder.names <= VIEWS


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_waste_is_below_four_percent_under_a_mixed_load(count: int) -> None:
    rng = random.Random(0)
    engine = LocalEngine(flat_config(device="cpu", num_blocks=2048, max_num_seqs=32))
    lengths = [(rng.randint(32, 700), rng.randint(16, 250)) for _ in range(count)]
    for i, (prompt, tokens) in enumerate(lengths):
        submit(engine, f"r{i}", prompt, tokens, temperature=0.0)
    wasted: list[float] = []
    for report in reports(engine):
        if report.stats.running > 8:
            wasted.append(report.stats.waste)
    assert sum(wasted) / len(wasted) < 0.04
    longest = engine.info.max_model_len
    reserved = sum(longest for _ in lengths)
    assert 1 - sum(p + t for p, t in lengths) / reserved > 0.4, "what a reservation of the longest length would waste"


def test_a_cache_that_cannot_hold_what_was_asked_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 512 needs"):
        LocalEngine(flat_config(device="cpu", num_blocks=8, max_model_len=512))
    with pytest.raises(ConfigError, match="without chunked prefill"):
        LocalEngine(flat_config(device="cpu", enable_chunked_prefill=False, max_num_batched_tokens=500))
    with pytest.raises(ConfigError, match="--target-itl-ms: it cuts prompts"):
        LocalEngine(flat_config(device="cpu", enable_chunked_prefill=False, target_itl_ms=50))


@pytest.mark.parametrize("length", [7, 100])
def test_a_longest_sequence_may_end_within_a_block(length: int) -> None:
    """Shorter than a step's tokens, which the first made-up prompt fills."""
    engine = LocalEngine(flat_config(device="cpu", max_model_len=length))
    assert engine.info.max_model_len == length
    submit(engine, "r", 5, 2)
    assert (report := engine.poll(0)) is not None and not report.outputs[0].error


def test_a_request_that_cannot_be_served_is_told_apart_from_a_failure() -> None:
    engine = LocalEngine(flat_config(device="cpu", num_blocks=4, max_model_len=64))
    other = Request(id="none", prompt=(5,) * 9, params=SamplingParams(max_tokens=2), seed=0, arrival=0.0)
    for refused, kind in (
        (replace(other, adapter="missing"), "BadRequest"),
        (replace(other, prompt=(5,) * 64), "ContextTooLong"),
        (other, ""),
        (replace(other, bad_words_ids=((9,),), params=SamplingParams(allowed_token_ids=(9,))), "BadRequest"),
    ):
        engine.submit(refused)
        ends = []
        for report in reports(engine):
            ends += [output for output in report.outputs if output.request_id == "none" and output.finish_reason]
        assert [output.error_kind for output in ends] == [kind], ends
        assert (kind == "") == (ends[0].error is None)
        assert engine.engine.stats().numeric_errors == 0, "the model's numbers are not at fault"
