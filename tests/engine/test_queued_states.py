"""Hybrids on a device that queues steps: forks, ends, and states kept in host memory change no token."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from oracle import write
from queueing_engine import build
from quire.cache.tiers import StoreRates
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.ops.arrays import Array
from quire.ops.triton.backend import GpuOps
from quire.ops.triton.gpu import INTERPRETER, Gpu
from quire.ops.triton.runtime import Immediate
from speculation_methods import TINY, write_words
from triton_ops import needs_triton
from turns import turns

LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
ROOMY = {"num_blocks": 400, "num_state_slots": 60}
SCARCE = {"num_blocks": 30, "num_state_slots": 10, "kv_offloading_size": 0.01}


def written(folder: Path) -> Path:
    family, facts = TINY["states"]
    write(folder, family, **facts | LAYERS | {"max_position_embeddings": 128, "vocab_size": 260}, dtype=torch.float32)
    return write_words(folder, 260)


def requests_of(count: int) -> list[Request]:
    """Prompts of four beginnings; each may end at any token, while the next step is under way, and some fork."""
    rng, made = random.Random(1), []
    stems = [[rng.randrange(4, 190) for _ in range(16)] for _ in range(4)]
    for i in range(count):
        prompt = stems[i % 4][: 16 if i % 3 else 9] + [rng.randrange(4, 190) for _ in range(1 + i % 8)]
        params, ends = SamplingParams(max_tokens=14, temperature=float(i % 2), n=1 + (i % 3 == 0)), range(4, 260)
        made.append(
            Request(
                id=f"r{i}", prompt=tuple(prompt), params=params, seed=i, arrival=0.0,
                eos_token_ids=tuple(rng.sample(ends, 30)),
            )
        )  # fmt: skip
    return made


def answers(engine: Engine, requests: Iterable[Request]) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        assert engine.submit(request) is None
    found: dict[tuple[str, int], list[int]] = {}
    for _ in turns(lambda: engine.has_work):
        for output in engine.step():
            assert output.error is None, output.error
            found.setdefault((output.request_id, output.index), []).extend(output.tokens)
    return found


@pytest.mark.parametrize("eager", ["side", "main"])
def test_steps_that_are_queued_change_no_token_of_hybrids(
    eager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, requests, limits = written(tmp_path / "model"), requests_of(14), {"state_interval": 8, "max_num_seqs": 4}
    plain: dict[str, Any] = ROOMY | {"enable_prefix_caching": False}
    want = answers(build(folder, monkeypatch, **limits | plain), requests)
    assert answers(build(folder, monkeypatch, eager, **limits | ROOMY), requests) == want
    engine = build(folder, monkeypatch, eager, **limits | SCARCE)
    monkeypatch.setattr(StoreRates, "pays", lambda self, nbytes, tokens: True)
    for turn in range(2):
        found = answers(engine, [replace(each, id=f"{turn} {each.id}") for each in requests])
        assert [(name, i) for (name, i), tokens in want.items() if found[f"{turn} {name}", i] != tokens] == []
    counts = engine.stats().kv_store
    assert counts is not None and counts.hits > 20 and counts.written > 40 and counts.bad == 0
    engine.check()
    engine.close()


@needs_triton
def test_a_copy_is_of_what_was_there_when_it_was_asked_for() -> None:
    ops = GpuOps(Gpu(torch.device("cpu"), INTERPRETER, True, Immediate()), ())
    part: Array = torch.arange(8, dtype=torch.uint8)
    held = ops.gather([part], np.array([9], np.uint8))
    ops.scatter([part], np.zeros(8, np.uint8))
    assert held().tolist() == [*range(8), 9] and not part.any()
