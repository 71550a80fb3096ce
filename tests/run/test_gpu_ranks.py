"""Ranks on GPUs: the same kernels under Triton's interpreter, each rank a process, gloo in the place of NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from group import each_over_gloo as on_each
from oracle import write
from queueing_engine import MISSING, SMALL, request
from quire.core.config import DeviceConfig, flat_config
from quire.core.errors import ConfigError
from quire.core.request import Request
from quire.engine.start import start_engine
from quire.ops.backend import open_backend
from quire.ops.triton import gpu
from quire.run.rank_group import of_a_rank
from triton_ops import needs_triton
from turns import working

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]
GPU: dict[str, Any] = {"device": "cuda", "ops": MISSING, "max_model_len": 64, "enforce_eager": True} | SMALL


def found(options: dict[str, Any], asked: list[Request]) -> tuple[dict[str, list[int]], list[float]]:
    """Tokens of each request, and their log-probabilities in order of the requests."""
    engine = start_engine(flat_config(**options))
    for each in asked:
        engine.submit(each)
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[float]] = {}
    for _ in working(engine):
        for out in engine.step():
            assert out.error is None, out.error
            tokens.setdefault(out.request_id, []).extend(out.tokens)
            scores.setdefault(out.request_id, []).extend(each.logprob for each in out.logprobs)
    engine.check()
    engine.close()
    return tokens, [score for name in sorted(scores) for score in scores[name]]


def asked() -> list[Request]:
    return [request(i, prompt, logprobs=1) for i, prompt in enumerate(((5, 6, 7), (9,) * 20, (8, 4)))]


@pytest.mark.parametrize("more", [pytest.param({"num_blocks": 32}, marks=pytest.mark.slow),
                                  pytest.param({}, marks=pytest.mark.slow),
                                  pytest.param({"enable_sequence_parallel": True}, marks=pytest.mark.slow)],
                         ids=["blocks", "what is left", "rows"])  # fmt: skip
def test_two_ranks_give_the_tokens_of_one(more: dict[str, Any], tmp_path: Path) -> None:
    """Without a number of blocks both run the largest step to see what is left."""
    write(tmp_path / "model", "llama", dtype=torch.float32)
    options = GPU | {"model": str(tmp_path / "model")}
    want, scores = found(options | {"num_blocks": 32}, asked())
    got, others = found(options | {"tensor_parallel_size": 2} | more, asked())
    assert got == want and others == pytest.approx(scores, abs=1e-4)


@pytest.mark.slow
def test_a_checkpoint_in_16_bits_is_summed_in_f32(tmp_path: Path) -> None:
    write(tmp_path / "model", "llama", dtype=torch.float16)
    options = GPU | {"model": str(tmp_path / "model"), "num_blocks": 32}
    _, scores = found(options, asked()[:1])
    _, others = found(options | {"tensor_parallel_size": 2}, asked()[:1])
    assert others == pytest.approx(scores, abs=3e-2)


def test_sums_of_rounded_numbers_are_made_in_f32() -> None:
    ops = open_backend(DeviceConfig(device="reference"))
    for dtype in (torch.bfloat16, torch.float16):
        unit = 1.0 if dtype == torch.bfloat16 else 0.125
        parts = [torch.full((2, 3), value * unit, dtype=dtype) for value in (256.0, 1.0, 1.0)]
        for got in on_each(3, lambda comm, parts=parts: comm.all_reduce(ops, parts[comm.rank].clone())):  # type: ignore[misc]
            assert got.dtype == dtype and got.tolist() == [[258.0 * unit] * 3] * 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pipeline_parallel_size": 2}, "on GPUs ranks share matrices"),
        ({"context_parallel_size": 2}, "on GPUs ranks share matrices"),
        ({"data_parallel_size": 2}, "CUDA_VISIBLE_DEVICES"),
        ({"rank_invariant": True}, "not made in runs"),
        ({"speculative_config": '{"method": "self", "quantization": "int4"}'}, "use ngram or suffix"),
        ({"kv_store": "folder"}, "are not gathered"),
        ({"cpu_offload_gb": 1.0}, "keep their weights"),
        ({"async_scheduling": True}, "only the first GPU knows"),
    ],
)
def test_what_ranks_on_gpus_cannot_do_is_refused(more: dict[str, Any], message: str) -> None:
    alone = {"pipeline_parallel_size", "context_parallel_size"} & more.keys()
    ranks: dict[str, Any] = {} if alone else {"tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=message):
        of_a_rank(flat_config(**GPU | ranks | more))


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = flat_config(**GPU, tensor_parallel_size=2)
    made = of_a_rank(config)
    assert made.device.enforce_eager and made.scheduler.async_scheduling is False
    monkeypatch.setattr(gpu, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="each rank needs a GPU, and 1 is there"):
        of_a_rank(replace(config))
    monkeypatch.undo()
    assert gpu.interpreting()
