"""float16 on the CPU: weights and caches keep their bits in two bytes, and products are f32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_answers import engine_of, make_requests, run
from model_variants import EIGHT
from model_variants import LATENT_GROUPS as GROUPS
from model_variants import LATENT_SIZES as SIZES
from oracle import BACKENDS, backend, logits, relative_error, write
from paged_model import CUTS, Paged, load, prompt
from quire.core.config import flat_config
from quire.core.dtypes import F16, F32
from quire.plan.predict import Machine, Planner
from speculation_methods import write_words

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "positions": ("opt", {}),
    "experts": ("mixtral", EIGHT),
    "latents": ("deepseek_v3", SIZES | GROUPS | {"v_head_dim": 16, "qk_nope_head_dim": 16}),
}
"""Tables of tokens apart and tied, learned positions, matrices of experts, and latents, which are kept in f32."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_in_float16_keeps_its_bits(family: str, tmp_path: Path) -> None:
    model_type, facts = FAMILIES[family]
    oracle = write(tmp_path, model_type, **facts, dtype=torch.float16)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = [logits(oracle, tokens) for tokens in sequences]
    model = load(tmp_path, backend("cpu"), kv_cache_dtype="float32")
    rounded = load(tmp_path, backend("cpu"), kv_cache_dtype="float32", dtype="bfloat16")
    assert (model.dtype, rounded.dtype) == ("float16", "bfloat16")
    whole = Paged(model, sequences).run(CUTS["whole"])
    assert max(map(relative_error, whole, want)) <= 3e-5
    assert max(map(relative_error, Paged(rounded, sequences).run(CUTS["whole"]), want)) > 1e-3
    for seed, cut in enumerate(CUTS.values()):
        for got, expected in zip(Paged(model, sequences, seed).run(cut), whole, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("family", ["llama", "tied", "latents"])
def test_an_engine_in_float16_is_as_large_as_planned(family: str, tmp_path: Path) -> None:
    model_type, facts = FAMILIES[family]
    write(tmp_path, model_type, **facts, dtype=torch.bfloat16)
    write_words(tmp_path, 99)
    given = {"model": str(tmp_path), "dtype": "float16", "num_blocks": 256}
    engine = engine_of(**given)
    plan = Planner(flat_config(device="cpu", **given), Machine())
    tensors = [t for cache in engine.engine.runner.caches.own for t in (cache.keys, cache.values)]
    assert plan.account.weights == engine.info.weight_bytes and plan.account.kv == sum(t.nbytes for t in tensors)
    kept = {cache.layout.dtype for cache in engine.engine.runner.caches.own}
    assert kept == {F32 if family == "latents" else F16}
    requests = make_requests(4, 99)
    together = {name: answer.bits() for name, answer in run(engine, requests).items()}
    for request in requests[:2]:
        assert run(engine_of(**given), [request])[request.id].bits() == together[request.id]
