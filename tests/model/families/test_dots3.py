"""dots.note 3, as its release and transformers have its config.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle import edit_config, write
from quire.core.errors import ModelError
from quire.model.describe import describe
from sparse_variants import FULL, LOCAL, SPARSE


@pytest.mark.parametrize("chooses", [True, False])
def test_dots3_is_read_as_its_release_has_it(chooses: bool, tmp_path: Path) -> None:
    """The decoder's fields lie beside those of towers; sizes of layers with windows have names of their own."""
    family, facts = SPARSE["dots3_note"]
    config = write(tmp_path, family, **facts | {"use_dsa": chooses}).config
    want = describe(str(tmp_path)).spec
    ours = config.per_layer_config["sliding_attention"]
    sizes = ("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
             "v_head_dim", "qk_rope_head_dim")  # fmt: skip
    released = {f"swa_{name}": getattr(ours, name) for name in sizes}
    released["swa_head_dim"] = ours.qk_nope_head_dim + ours.qk_rope_head_dim
    kinds = [kind if kind == LOCAL else FULL for kind in config.layer_types]
    gone = (
        "per_layer_config",
        "rope_parameters",
        "mlp_layer_types",
        "sliding_window",
        "shared_experts_intermediate_size",
    )
    edit_config(
        tmp_path, gone, **released, model_type="dots3_note", layer_types=kinds, use_dsa=chooses, rope_theta=8e7,
        swa_rope_theta=5e4, sliding_window_size=5, first_k_dense_replace=1, moe_layer_freq=[1] * len(kinds),
        moe_shared_expert_intermediate_size=32, apply_mla_qkv_lora_rescale=True,
        vision_config={"model_type": "dots3_note_vision_encoder", "hidden_size": 32}, audio_config={"hidden_size": 32},
    )  # fmt: skip
    found = describe(str(tmp_path))
    assert found.spec == want and any(want.windows) and any(want.mla.indexer.own) == chooses
    assert [note for note in found.notes if "only the decoder of 'dots3_note' runs" in note and "audio_config" in note]
    edit_config(tmp_path, apply_mla_qkv_lora_rescale=False)
    assert describe(str(tmp_path)).spec.mla.factor == 1.0 != want.mla.factor


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("q_lora_rank", None),
        ("kv_lora_rank", 24),
        ("mlp_layer_types", ["dense"]),
        ("layer_types", ["indexed_attention"]),
        ("moe_layer_freq", [1]),
    ],
)
def test_what_dots3_cannot_compute_is_refused(field: str, value: object, tmp_path: Path) -> None:
    write(tmp_path, "dots3_note_text", **SPARSE["dots3_note"][1])
    edit_config(tmp_path, **{field: value})
    with pytest.raises(ModelError, match=field):
        describe(str(tmp_path))
