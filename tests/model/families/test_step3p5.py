"""Step-3.5 as its release has it: lists by layer that go on with layers that predict ahead, and stacked experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attention_variants import GATED
from family_tensors import as_step3p5, rewrite
from oracle import BACKENDS, backend, edit_config, logits, relative_error, write
from paged_model import CUTS, TOLERANCE, Paged, load, prompt
from quire.core.errors import ModelError
from quire.model.describe import describe
from quire.ops.backend import Ops


@pytest.fixture(params=BACKENDS, scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


FACTS = GATED["step3p5"][1]
NEWER = ("rope_parameters", "num_sliding_attention_heads", "per_layer_config", "n_routed_experts",
         "num_key_value_heads", "num_experts_per_tok", "mlp_layer_types", "query_pre_attn_scalar")  # fmt: skip
OLDER: dict[str, Any] = {
    "num_attention_groups": 2,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 8, "head_dim": 16,
                                "num_attention_groups": 2},
    "num_nextn_predict_layers": 1,
    "layer_types": [*FACTS["layer_types"], "sliding_attention"],
    "swiglu_limits": [*FACTS["swiglu_limits"], 0.0],
    "swiglu_limits_shared": [*FACTS["swiglu_limits_shared"], 0.0],
    "rope_theta": [1e5, 1e3, 1e3, 1e5, 1e3],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": None,
    "moe_layers_enum": "1, 2, 3",
    "moe_num_experts": 8,
    "moe_top_k": 3,
}  # fmt: skip


def write_release(folder: Path) -> Any:
    """A checkpoint under the names and with the fields of the release, with a layer that predicts ahead."""
    oracle = write(folder, "step3p5", **FACTS)
    rewrite(folder, lambda tensors: as_step3p5(tensors) | {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)})
    edit_config(folder, NEWER, **OLDER)
    return oracle


def test_the_release_is_read(ops: Ops, tmp_path: Path) -> None:
    oracle = write_release(tmp_path)
    model, sequences = load(tmp_path, ops), [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    assert any("layers 4 (1 tensors) are ignored" in note for note in model.notes)
    for name, cut in CUTS.items():
        for got, tokens in zip(Paged(model, sequences).run(cut), sequences, strict=True):
            assert relative_error(got, logits(oracle, tokens)) <= TOLERANCE, name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["full_attention"]),
        ("moe_layers_enum", "1,x"),
        ("swiglu_limits", ["a"] * 5),
        ("attention_other_setting", {"num_attention_heads": 5}),
        ("attention_other_setting", {"num_attention_groups": 4}),
        ("rope_theta", [1e5, 1e3, 1e4, 1e5, 1e3]),
        ("partial_rotary_factors", [0.5, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_what_does_not_fit_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    write_release(tmp_path)
    edit_config(tmp_path, **{field: value})
    names = {"attention_other_setting": "num_sliding_attention_heads|num_attention_groups"}
    with pytest.raises(ModelError, match=names.get(field, field)):
        describe(str(tmp_path))
