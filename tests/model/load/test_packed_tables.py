"""Tables of tokens that stay packed: rows equal those of the widened table, bit for bit, in every format and model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from op_cases.weights import TABLES, random_weight
from oracle import BACKENDS, backend, write
from over_torch import over_torch
from paged_model import Paged, prompt
from quire.core.config import flat_config
from quire.model.build import Model, load_model
from quire.ops.backend import Ops
from quire.ops.weights import PackedTable, Weight

FORMS: dict[str, dict[str, Any]] = {
    "f32": {}, "bf16": {}, "fp8": {}, "int8": {}, "int4": {}, "table4": {}, "int8 zeros": {"zeros": True},
    "int4 zeros": {"zeros": True, "group": 128}, "int4 mins": {"mins": True},
    "int8 mins wide": {"mins": True, "wide": True}, "int8 narrow": {"group": 16, "wide": True},
    "table4 two digits": {"pair": True}, "int4 order": {"order": True},
}  # fmt: skip


def weight_of(form: str) -> Weight:
    """A matrix [75, 384] of the form."""
    g, facts = torch.Generator().manual_seed(5), FORMS[form]
    kind = form.split()[0]
    made = random_weight(g, kind, 75, 384, facts.get("group", 32), facts.get("zeros", False))
    changes: dict[str, Any] = {}
    if facts.get("wide") and made.scales is not None:
        changes["scales"] = made.scales.float() * 1.001
    if facts.get("mins"):
        changes["mins"] = -changes.get("scales", made.scales) * 3
        changes["codes"] = made.codes + 8 if kind == "int4" else made.codes
    if facts.get("pair"):
        changes["table"] = torch.tensor(TABLES[2], dtype=torch.int16)
    if facts.get("order"):
        changes["order"] = torch.randperm(384, generator=g).to(torch.int32)
    return replace(made, **changes)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_the_widened_table(form: str, rounded: bool) -> None:
    weight, tokens = weight_of(form), torch.tensor([0, 74, 16, 15, 33, 33], dtype=torch.int32)
    table = weight.dequantize()
    table = table.bfloat16() if rounded else table
    for name in BACKENDS:
        ops: Ops = over_torch(backend(name))
        ops.begin_step()
        found = ops.embedding(tokens, PackedTable(ops.pack(weight), rounded))
        assert torch.equal(found, ops.embedding(tokens, table)), name


def test_odd_columns_and_no_rows() -> None:
    g = torch.Generator().manual_seed(1)
    for name in BACKENDS:
        ops = over_torch(backend(name))
        weight = random_weight(g, "bf16", 17, 33)
        table = PackedTable(ops.pack(weight), False)
        ops.begin_step()
        assert torch.equal(
            ops.embedding(torch.tensor([16, 0], dtype=torch.int32), table), weight.codes[[16, 0]].float()
        )
        assert ops.embedding(torch.empty(0, dtype=torch.int32), table).shape == (0, 33)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native was not built")
def test_tokens_outside_the_table_are_refused() -> None:
    ops = over_torch(backend("cpu"))
    table = PackedTable(ops.pack(weight_of("int4")), True)
    for bad in (-1, 75):
        with pytest.raises(ValueError, match="outside the table"):
            ops.embedding(torch.tensor([bad], dtype=torch.int32), table)


def whole(model: Model) -> torch.Tensor:
    tokens = prompt(19, 1)
    return Paged(model, [tokens]).run([[len(tokens)]])[0]


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("tied", [False, True])
def test_only_a_tied_head_shares_the_table(tied: bool, device: str, tmp_path: Path) -> None:
    write(tmp_path, "llama", tie_word_embeddings=tied)

    def load(**options: Any) -> Model:
        return load_model(flat_config(model=str(tmp_path), dtype="bfloat16", **options), backend(device))

    plain, eight = load(), load(quantization="int8")
    assert isinstance(plain.decoder.embed.table, PackedTable) == tied  # type: ignore[attr-defined]
    assert ("embed" in plain.report) == (not tied)
    assert not isinstance(eight.decoder.embed.table, PackedTable), "the table keeps its bits"  # type: ignore[attr-defined]
    assert "embed" in eight.report and "head" in eight.report
