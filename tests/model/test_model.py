"""Logits equal transformers' for every family and variant, through the paged cache, however the tokens are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from often import one_of
from oracle import BACKENDS, backend, logits, random_model, relative_error, write
from paged_model import (
    CUTS,
    LLAMA3,
    LONGROPE,
    TOLERANCE,
    VARIANTS,
    YARN,
    Paged,
    assert_left_out,
    load,
    prompt,
)
from paged_model import ops as ops
from quire.model.describe import describe
from quire.model.families.find import read_spec
from quire.model.families.rope import LinearScaling
from quire.model.load.roles import ROLES
from quire.ops.backend import Ops


@pytest.mark.sampled(10)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_however_cut(variant: str, ops: Ops, tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    oracle = write(tmp_path, family, **facts)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = [logits(oracle, s) for s in sequences]
    for block_size in (1, 16):
        model = load(tmp_path, ops, block_size=block_size)
        for name, cut in CUTS.items():
            for got, expected in zip(Paged(model, sequences).run(cut), want, strict=True):
                assert relative_error(got, expected) <= TOLERANCE, (block_size, name)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize(("length", "max_model_len"), [(19, 64), (16, 16)])
def test_longrope_takes_one_factor_set_by_the_longest_sequence_served(
    length: int, max_model_len: int, family: str, tmp_path: Path
) -> None:
    oracle = write(tmp_path, family, rope_parameters=LONGROPE, original_max_position_embeddings=16)
    model = load(tmp_path, backend("reference"), max_model_len=max_model_len)
    tokens = prompt(length, 1)
    (got,) = Paged(model, [tokens]).run([[length]])
    assert relative_error(got, logits(oracle, tokens)) <= TOLERANCE


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", one_of(3, VARIANTS))
def test_rows_that_want_no_logits_are_left_out(variant: str, ops: Ops, tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    write(tmp_path, family, **facts)
    run = Paged(load(tmp_path, ops), [prompt(9, 1)])
    full = run.step([9])[0]
    assert_left_out(run, full, exact=ops.name == "cpu")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("variant", one_of(3, VARIANTS))
def test_dummy_weights_and_reports_fit_every_family(variant: str, tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    write(tmp_path, family, **facts)
    found = describe(str(tmp_path))
    made = describe(str(tmp_path), load_format="dummy")
    assert made.parameters == found.parameters and made.tensors == found.tensors
    numbers = [ROLES[role].numbers(found.spec) for role in found.roles]
    tied = found.spec.tied_head * found.spec.vocab_size * found.spec.embed_width
    assert 0.9 * found.parameters <= sum(numbers) - tied <= found.parameters
    model = load(tmp_path, backend("reference"))
    in_file = 4 * ROLES["input_table"].numbers(found.spec)
    read = model.weight_bytes - model.report["rope"][1] + in_file
    assert read == found.bytes_on_disk
    (got,) = Paged(load(tmp_path, backend("reference"), load_format="dummy"), [prompt(9, 1)]).run([[9]])
    assert bool(torch.isfinite(got).all())


@pytest.mark.sampled(3)
@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int4"}])
@pytest.mark.parametrize("variant", ["qwen3", "gemma2", "gpt2", "bloom", "olmo2", "cohere_qk_norm", "lfm2"])
def test_native_logits_are_bit_equal_however_cut(variant: str, options: dict[str, Any], tmp_path: Path) -> None:
    family, facts = VARIANTS[variant]
    write(tmp_path, family, **facts, dtype=torch.bfloat16)
    model = load(tmp_path, backend("cpu"), **options)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = Paged(model, sequences).run(CUTS["whole"])
    for seed, cut in enumerate(CUTS.values()):
        for got, expected in zip(Paged(model, sequences, seed).run(cut), want, strict=True):
            assert torch.equal(got, expected)
    (alone,) = Paged(model, sequences[:1]).run([[19]])
    assert torch.equal(alone, want[0])


LONG = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 131072, "num_hidden_layers": 1}
LONG_ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 8192, "factor": 32.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "yarn": YARN | {"original_max_position_embeddings": 32768, "rope_theta": 1e6},
    "longrope": LONGROPE | {"original_max_position_embeddings": 4096, "factor": 32.0,
                            "short_factor": [1.1] * 32, "long_factor": [1.5 + i for i in range(32)]},
}  # fmt: skip


@pytest.mark.parametrize("kind", LONG_ROPES)
def test_rope_tables_equal_transformers_up_to_131072_positions(kind: str) -> None:
    oracle = random_model("llama", rope_parameters=LONG_ROPES[kind], **LONG)
    spec, _, _ = read_spec(json.loads(oracle.config.to_json_string()), "config.json")
    positions = torch.cat((torch.arange(0, 131072, 97), torch.tensor([131071])))
    cos, sin = oracle.model.rotary_emb(torch.zeros(1), positions[None])
    table = torch.from_numpy(spec.rope[0].table(131072))[positions]
    want = torch.stack((cos[0, :, :32], sin[0, :, :32]), 1)
    assert float((table - want).abs().max()) <= 2e-7


def test_keys_on_disk_have_an_earlier_name_of_linear_scaling() -> None:
    assert repr(LinearScaling(8.0)) == "Linear(factor=8.0, attention_factor=1.0)"
