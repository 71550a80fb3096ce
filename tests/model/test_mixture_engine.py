"""Experts and latents behind the engine: recorded decode steps, shared prefixes, copied blocks, preemption."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_answers import engine_of, make_requests, run
from model_variants import EIGHT
from model_variants import LATENT_GROUPS as GROUPS
from model_variants import LATENT_SIZES as SIZES
from oracle import BACKENDS, write
from quire.engine.local import LocalEngine

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", EIGHT | {"head_dim": 16, "sliding_window": 16}),
    "deepseek_v3": ("deepseek_v3", SIZES | GROUPS),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_request_gives_the_same_bits_whatever_runs_beside_it(model: str, tmp_path: Path) -> None:
    family, facts = MODELS[model]
    write(tmp_path, family, **facts | {"max_position_embeddings": 256}, dtype=torch.bfloat16)
    requests = make_requests(24, 99)

    def answers(rng: random.Random | None, some: int, **options: object) -> dict[str, bytes]:
        engine: LocalEngine = engine_of(model=str(tmp_path), **options)
        return {name: answer.bits() for name, answer in run(engine, requests[:some], rng).items()}

    want = answers(None, 24)
    assert answers(random.Random(1), 24) == want
    assert answers(random.Random(2), 24, num_blocks=24, max_num_batched_tokens=32, max_num_seqs=16) == want
    assert answers(None, 24, enable_prefix_caching=False, max_num_batched_tokens=7, max_num_seqs=5) == want
    for i in (0, 3, 5):
        engine = engine_of(model=str(tmp_path), enforce_eager=True)
        assert run(engine, [requests[i]])[f"r{i}"].bits() == want[f"r{i}"]
