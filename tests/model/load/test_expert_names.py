"""Experts as tools write them that do not go back to the release's form: stacked by modules, or taken apart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from model_variants import LATENTS as LATENT
from model_variants import MIXTURES as VARIANTS
from oracle import backend, logits, relative_error, write
from paged_model import TOLERANCE, Paged, load, prompt
from quire.core.errors import ModelError
from quire.model.describe import describe

FAMILIES = dict(reversed([*LATENT.values(), *VARIANTS.values()]))


def rewritten(folder: Path, tensors: dict[str, Tensor], tied: bool) -> None:
    kept = {n: t.contiguous().clone() for n, t in tensors.items() if not (tied and n == "lm_head.weight")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def apart(tensors: dict[str, Tensor], alternating: bool, block: str) -> dict[str, Tensor]:
    """llm-compressor's linear experts: a gate, an up and a down of their own, by the modules' names."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", name)
        if found is None:
            out[re.sub(r"\.mlp\.(?=gate\.|router\.)", f".{block}.", name) if block != "mlp" else name] = tensor
            continue
        prefix, matrix, bias = found.groups()
        for e, one in enumerate(tensor):
            rows = one.t() if alternating and bias is None else one
            half = len(rows) // 2
            gate_up = (rows[0::2], rows[1::2]) if alternating else (rows[:half], rows[half:])
            parts = zip(("gate", "up"), gate_up, strict=True) if matrix == "gate_up" else [("down", rows)]
            for part, values in parts:
                out[f"{prefix}.{block}.experts.{e}.{part}_proj.{'weight' if bias is None else 'bias'}"] = values
    return out


def error_of(folder: Path, oracle: Any) -> float:
    (got,) = Paged(load(folder, backend("reference")), [prompt(9, 1)]).run([[9]])
    return relative_error(got, logits(oracle, prompt(9, 1)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_by_the_names_of_modules(family: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, family, **FAMILIES[family])
    rewritten(tmp_path, oracle.state_dict(), oracle.config.tie_word_embeddings)
    assert error_of(tmp_path, oracle) <= TOLERANCE


@pytest.mark.parametrize(("family", "block"), [("mixtral", "block_sparse_moe"), ("mixtral", "mlp"), ("phimoe", "mlp"),
                                               ("qwen3_moe", "mlp"), ("gpt_oss", "mlp")])  # fmt: skip
def test_experts_taken_apart(family: str, block: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, family, **FAMILIES[family])
    tensors = apart(oracle.state_dict(), family == "gpt_oss", block)
    rewritten(tmp_path, tensors, oracle.config.tie_word_embeddings)
    assert error_of(tmp_path, oracle) <= TOLERANCE


def test_rows_that_cannot_be_parted_are_refused(tmp_path: Path) -> None:
    oracle = write(tmp_path, "qwen3_moe", **FAMILIES["qwen3_moe"])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    rewritten(tmp_path, oracle.state_dict() | {name: oracle.state_dict()[name][:, :-1]}, False)
    with pytest.raises(ModelError, match=r"gate_up_proj has 79 rows, which are not parted by 2"):
        describe(str(tmp_path))


def test_a_head_by_the_name_of_modules(tmp_path: Path) -> None:
    oracle = write(tmp_path, "gpt_neox", tie_word_embeddings=False)
    rewritten(tmp_path, oracle.state_dict(), False)
    assert error_of(tmp_path, oracle) <= TOLERANCE
