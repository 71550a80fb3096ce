"""Sparse attention: models whose layers read the tokens that an indexer chooses, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from family_tensors import rewrite
from lora_adapters import write_adapter
from oracle import BACKENDS, backend, edit_config, logits, relative_error, write
from paged_model import CUTS, TOLERANCE, Paged, load, prompt
from paged_model import ops as ops
from quire.core.errors import ConfigError, ModelError
from quire.model.describe import describe
from quire.ops.backend import Ops
from sparse_variants import BLOCK_SPARSE, DENSE, ENTRIES, POOLED, SPARSE

__all__ = ["ops"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", SPARSE | DENSE | ENTRIES)
def test_logits_equal_transformers_however_cut(variant: str, ops: Ops, tmp_path: Path) -> None:
    family, facts = (SPARSE | DENSE | ENTRIES)[variant]
    oracle = write(tmp_path, family, **facts)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = [logits(oracle, s) for s in sequences]
    for block_size in (1, 16):
        model = load(tmp_path, ops, block_size=block_size)
        for name, cut in CUTS.items():
            for got, expected in zip(Paged(model, sequences).run(cut), want, strict=True):
                assert relative_error(got, expected) <= TOLERANCE, (block_size, name)


@pytest.mark.parametrize("variant", BLOCK_SPARSE)
def test_logits_of_chosen_blocks_equal_transformers_however_cut(variant: str, ops: Ops, tmp_path: Path) -> None:
    family, facts = BLOCK_SPARSE[variant]
    oracle = write(tmp_path, family, **facts)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = [logits(oracle, s) for s in sequences]
    for block_size in (1, 4):
        model = load(tmp_path, ops, block_size=block_size)
        for name, cut in CUTS.items():
            for got, expected in zip(Paged(model, sequences).run(cut), want, strict=True):
                assert relative_error(got, expected) <= TOLERANCE, (block_size, name)
    edit_config(tmp_path, index_topk_blocks=16)
    (other, *_) = Paged(load(tmp_path, ops, block_size=4), sequences).run(CUTS["whole"])
    assert relative_error(other, want[0]) > 1e-3, "more blocks were there to read"
    with pytest.raises(ConfigError, match="must be whole blocks of the cache"):
        load(tmp_path, ops, block_size=16)


@pytest.mark.parametrize("variant", POOLED)
def test_logits_of_blocks_with_a_key_each_equal_transformers_however_cut(
    variant: str, ops: Ops, tmp_path: Path
) -> None:
    family, facts = POOLED[variant]
    oracle = write(tmp_path, family, **facts)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    sequences[0][4], sequences[0][11], sequences[1][5] = 2, 5, 2  # ends, which n-grams do not reach beyond
    want = [logits(oracle, s) for s in sequences]
    for block_size in (1, facts["indexer_compress_ratio"]):
        model = load(tmp_path, ops, block_size=block_size)
        for name, cut in CUTS.items():
            for got, expected in zip(Paged(model, sequences).run(cut), want, strict=True):
                assert relative_error(got, expected) <= TOLERANCE, (block_size, name)
    edit_config(tmp_path, indexer_budget=64)
    (other, *_) = Paged(load(tmp_path, ops, block_size=2), sequences).run(CUTS["whole"])
    assert relative_error(other, want[0]) > 1e-3, "more blocks were there to read"
    with pytest.raises(ConfigError, match="must be whole blocks of the cache"):
        load(tmp_path, ops, block_size=16)


@pytest.mark.parametrize("variant", SPARSE | BLOCK_SPARSE | POOLED | ENTRIES)
def test_all_parameters_are_known(variant: str, tmp_path: Path) -> None:
    family, facts = (SPARSE | BLOCK_SPARSE | POOLED | ENTRIES)[variant]
    oracle = write(tmp_path, family, **facts)
    numbers = sum(
        p.numel() for name, p in oracle.state_dict().items() if p.is_floating_point() or name.endswith("tid2eid")
    )
    tied = oracle.lm_head.weight.numel() if facts.get("tie_word_embeddings") else 0
    assert describe(str(tmp_path)).parameters == numbers - tied


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("q_lora_rank", None),
        ("index_head_dim", 4),
        ("indexer_types", ["full"]),
        ("indexer_types", ["shared", "full", "full"]),
        ("mlp_layer_types", ["dense", "sparse", "other"]),
    ],
)
def test_what_cannot_be_computed_is_refused(field: str, value: object, tmp_path: Path) -> None:
    write(tmp_path, "glm_moe_dsa", **SPARSE["glm_moe_dsa"][1])
    edit_config(tmp_path, **{field: value})
    with pytest.raises(ModelError, match=field):
        describe(str(tmp_path))


def test_modules_that_predict_ahead_are_left_out(tmp_path: Path) -> None:
    """Hy4's files have them beside the layers, and transformers reads none of them."""
    write(tmp_path, "hy_v4", **SPARSE["hy_v4"][1])
    rewrite(tmp_path, lambda tensors: tensors | {"model.mtp_layers.0.eh_proj.weight": torch.zeros(64, 128)})
    assert any("(1 tensors) are left out" in note for note in describe(str(tmp_path)).notes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rotary_dim", 6),
        ("index_n_heads", 4),
        ("index_block_size", 5),
        ("index_local_blocks", 3),
        ("layer_types", ["minimax_m3_sparse"]),
    ],
)
def test_blocks_that_cannot_be_chosen_are_refused(field: str, value: object, tmp_path: Path) -> None:
    write(tmp_path, "minimax_m3_vl_text", **BLOCK_SPARSE["minimax_m3"][1])
    edit_config(tmp_path, **{field: value})
    with pytest.raises(ModelError, match=field):
        describe(str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ple_layer_ids", [1, 2]),
        ("ple_layer_ids", [3]),
        ("ple_embed_dim", 30),
        ("ple_conv_kernel_size", 7),
        ("eos_token_id", None),
        ("indexer_kv_heads", 2),
        ("indexer_compress_ratio", 3),
        ("indexer_budget", 6),
        ("indexer_head_dim", 12),
        ("output_gate_type", "relu"),
        ("hc_count", 1),
    ],
)
def test_ngrams_and_keys_of_blocks_that_cannot_be_are_refused(field: str, value: object, tmp_path: Path) -> None:
    write(tmp_path, "qwen4_exp_text", **POOLED["qwen4_exp"][1])
    edit_config(tmp_path, **{field: value})
    with pytest.raises(ModelError, match=field):
        describe(str(tmp_path))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
@pytest.mark.parametrize("pieces", [1, 4])
def test_rows_of_ngrams_are_read_out_of_the_file(pieces: int, tmp_path: Path) -> None:
    write(tmp_path, "qwen4_exp_text", **POOLED["qwen4_exp"][1] | {"split_ngram_parts": pieces})
    found = load(tmp_path, backend("cpu"), block_size=4)
    assert found.report["ngram_table"] == ("float32 in the file", 0)


def test_other_places_of_ngrams_than_those_of_the_files_are_refused(tmp_path: Path, ops: Ops) -> None:
    write(tmp_path, "qwen4_exp_text", **POOLED["qwen4_exp"][1])
    edit_config(tmp_path, seed=5)
    with pytest.raises(ModelError, match="layer_multipliers is not what follows"):
        load(tmp_path, ops, block_size=4)


def test_adapters_of_matrices_beside_entries_are_refused(ops: Ops, tmp_path: Path) -> None:
    family, facts = ENTRIES["deepseek_v4"]
    oracle = write(tmp_path / "model", family, **facts)
    adapter = write_adapter(tmp_path / "adapter", oracle, ("q_b_proj", "o_b_proj"), 1)
    with pytest.raises(ModelError, match=r"o_b_proj: no matrix of that name can be adapted|q_b_proj: no matrix of"):
        load(tmp_path / "model", ops, enable_lora=True, lora_modules=(f"one={adapter}",))
