"""Checkpoints of ternary weights: packed four to a byte, or floats that are made ternary; what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from family_tensors import rewrite
from oracle import BACKENDS, backend, edit_config, logits, relative_error, write
from paged_model import Paged, load, prompt
from quire.core.errors import ModelError
from quire.model.describe import describe

METHOD = {"quant_method": "bitnet", "linear_class": "autobitlinear"}


def scale_of(weight: Tensor) -> float:
    return float(weight.abs().mean())


def codes_of(weight: Tensor) -> Tensor:
    return (weight / scale_of(weight)).round().clamp(-1, 1)


def ternary_model(folder: Path, family: str = "bitnet", **facts: Any) -> torch.nn.Module:
    """A model in `folder` whose linear layers are floats; returned with ternary ones."""
    oracle = write(folder, family, **facts)
    with torch.no_grad():
        for name, module in linears(oracle):
            assert "proj" in name
            module.weight.copy_(codes_of(module.weight) * scale_of(module.weight))
    return oracle


def linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            yield name, module


def pack_weights(codes: Tensor) -> Tensor:
    """As transformers' integration of BitNet: two bits of a byte for each quarter of the rows."""
    quarters = (codes + 1).to(torch.uint8).chunk(4)
    return quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6


def packed(divides: bool) -> Any:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = dict(tensors)
        for name, weight in tensors.items():
            if "_proj.weight" in name:
                scale = torch.tensor([scale_of(weight)])
                made[name] = pack_weights(codes_of(weight))
                made[f"{name}_scale"] = 1 / scale if divides else scale
        return made

    return change


@pytest.mark.parametrize("family", ["bitnet", "llama"])
@pytest.mark.parametrize("form", ["packed", "divided", "online"])
def test_ternary_files_give_the_logits_of_their_numbers(form: str, family: str, tmp_path: Path) -> None:
    oracle = ternary_model(tmp_path, family)
    method = METHOD | {"quantization_mode": "online" if form == "online" else "offline"}
    if form != "online":
        rewrite(tmp_path, packed(form == "divided"))
    if form == "divided":
        method["linear_class"] = "bitlinear"
    edit_config(tmp_path, quantization_config=method)
    tokens = prompt(19, 1)
    want = logits(oracle, tokens)
    for name in BACKENDS:
        model = load(tmp_path, backend(name), activations="int16")
        (got,) = Paged(model, [tokens]).run([[19]])
        assert relative_error(got, want) <= 1e-3, name
    assert model.report["down"][0].startswith("int4")


def test_what_is_no_ternary_file_is_refused(tmp_path: Path) -> None:
    ternary_model(tmp_path)
    rewrite(tmp_path, packed(False))
    for field, value in (("use_rms_norm", True), ("linear_class", "other"), ("quantization_mode", "other")):
        edit_config(tmp_path, quantization_config=METHOD | {field: value})
        with pytest.raises(ModelError, match=field):
            describe(str(tmp_path))
    edit_config(tmp_path, quantization_config=METHOD)

    def damaged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "model.layers.1.mlp.up_proj.weight"
        return tensors | {name: tensors[name] | 3}

    rewrite(tmp_path, damaged)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj.*other than -1, 0 and 1"):
        load(tmp_path, backend("reference"))
