"""Folders of sentence-transformers: what their modules say is done in their order, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from encoder_models import write_encoder, write_tokenizer
from oracle import edit_config
from quire import LLM, PoolingParams
from quire.core.errors import ModelError
from quire.core.pooling import Pooling
from quire.model.describe import open_model
from quire.text.tokenizer import Tokenizer

MEAN = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
DENSE = {"in_features": 64, "out_features": 24, "bias": True,
         "activation_function": "torch.nn.modules.activation.GELU"}  # fmt: skip
PLAIN = ("Transformer", "Pooling")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    write_encoder(folder, "bert")
    return folder


def with_modules(encoder: Path, folder: Path, kinds: Sequence[str], pooling: Any = MEAN, dense: Any = DENSE) -> Path:
    """The encoder with modules of these kinds, each in a folder of its kind's name."""
    for path in encoder.iterdir():
        (folder / path.name).symlink_to(path)
    said = [{"idx": i, "path": "" if kind == "Transformer" else kind, "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(said))
    for kind, settings in (("Pooling", pooling), ("Dense", dense)):
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps(settings))
    save_file({"linear.weight": np.zeros((24, 64), np.float32)}, folder / "Dense" / "model.safetensors")
    return folder


def pooling_of(folder: Path) -> Pooling:
    return open_model(str(folder)).pooling


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode": ["cls"]}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"embedding_dimension": 64}, "mean"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}, "mean"),
        ({"pooling_mode": "cls", "include_prompt": False}, "cls"),
    ],
)
def test_how_rows_become_a_vector(encoder: Path, tmp_path: Path, settings: dict[str, Any], kind: str) -> None:
    found = pooling_of(with_modules(encoder, tmp_path, PLAIN, settings))
    assert (found.kind, found.refused) == (kind, "")


@pytest.mark.parametrize("mode", ["cls", "mean"])
def test_prompts_that_vectors_leave_out_are_refused(encoder: Path, tmp_path: Path, mode: str) -> None:
    folder = with_modules(encoder, tmp_path, PLAIN, {"pooling_mode": mode, "include_prompt": False})
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))
    assert "leaves out the prompt's tokens" in pooling_of(folder).refused


def test_several_ways_at_once_are_refused(encoder: Path, tmp_path: Path) -> None:
    found = pooling_of(with_modules(encoder, tmp_path, PLAIN, {"pooling_mode": ["cls", "mean"]}))
    assert found.refused.startswith("its pooling is cls, mean")


@pytest.mark.parametrize(
    ("kinds", "refused"),
    [
        ((*PLAIN, "Dense", "Normalize"), ""),
        ((*PLAIN, "Dropout", "Normalize"), ""),
        ((*PLAIN, "Normalize", "Dense"), "'Dense' behind a 'Normalize'"),
        (("Transformer", "Dense", "Pooling"), "'Pooling' behind a 'Dense'"),
        ((*PLAIN, "LayerNorm"), "'LayerNorm' behind the transformer"),
    ],
)
def test_the_order_of_modules(encoder: Path, tmp_path: Path, kinds: Sequence[str], refused: str) -> None:
    found = pooling_of(with_modules(encoder, tmp_path, kinds))
    assert refused in found.refused and bool(refused) == bool(found.refused)


def test_a_dense_layer_that_names_no_activation_has_tanh(encoder: Path, tmp_path: Path) -> None:
    silent = {name: value for name, value in DENSE.items() if name != "activation_function"}
    found = pooling_of(with_modules(encoder, tmp_path, (*PLAIN, "Dense"), dense=silent))
    assert [each.activation for each in found.dense] == ["tanh"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"use_residual": True}, "use_residual"),
        ({"module_input_name": "token_embeddings"}, "rows of tokens"),
        ({"module_output_name": "token_embeddings"}, "rows of tokens"),
        ({"activation_function": "my_code.GELU"}, "activation_function"),
    ],
)
def test_dense_layers_that_are_not_built(encoder: Path, tmp_path: Path, more: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        pooling_of(with_modules(encoder, tmp_path, (*PLAIN, "Dense"), dense=DENSE | more))


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_lengths_and_small_letters(encoder: Path, tmp_path: Path, name: str) -> None:
    folder = with_modules(encoder, tmp_path, PLAIN)
    write_tokenizer(folder)
    made = json.loads((folder / "tokenizer.json").read_text())
    made["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(made))
    small, large = (Tokenizer.from_folder(folder).encode(text) for text in ("the cat", "THE Cat"))
    assert small != large
    (folder / name).write_text(json.dumps({"max_seq_length": 50, "do_lower_case": True}))
    assert Tokenizer.from_folder(folder).encode("THE Cat") == small
    assert pooling_of(folder).longest == 50


def test_vectors_are_as_long_as_the_files_say(encoder: Path, tmp_path: Path) -> None:
    """`truncate_dim` of sentence-transformers: requests may still ask for another length."""
    folder = with_modules(encoder, tmp_path, (*PLAIN, "Normalize"))
    write_tokenizer(folder)
    with LLM(folder, device="cpu", num_blocks=512) as llm:
        whole = [np.array(each.outputs.embedding) for each in llm.embed(["a cat", "berlin"])]
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 16}))
    with LLM(folder, device="cpu", num_blocks=512) as llm:
        assert (llm.info.pooling.cut, llm.info.pooling.width) == (16, 64)
        cut = [each[:16] / np.linalg.norm(each[:16]) for each in whole]
        for want, each in zip(cut, llm.embed(["a cat", "berlin"]), strict=True):
            np.testing.assert_allclose(each.outputs.embedding, want, atol=1e-6)
        score = llm.score("a cat", "berlin")[0].outputs.score
        assert score == pytest.approx(float(cut[0] @ cut[1]), abs=1e-6)
        asked = llm.embed("a cat", pooling_params=PoolingParams(dimensions=64))[0].outputs.embedding
        np.testing.assert_allclose(asked, whole[0], atol=1e-6)
    for cut_at, kept in ((1000, 64), (None, 0)):
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": cut_at}))
        assert pooling_of(folder).cut == kept
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 0}))
    with pytest.raises(ModelError, match="truncate_dim must be"):
        pooling_of(folder)


IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("files", "config", "raw"),
    [
        ({}, {}, False),
        ({}, {"sentence_transformers": {"activation_fn": IDENTITY}}, True),
        ({}, {"sentence_transformers": {"version": "4"}, "sbert_ce_default_activation_function": IDENTITY}, True),
        ({"modules.json": [], "config_sentence_transformers.json": {"activation_fn": IDENTITY}}, {}, True),
        ({"config_sentence_transformers.json": {"activation_fn": IDENTITY}}, {}, False),
    ],
)
def test_scores_of_pairs(files: dict[str, Any], config: dict[str, Any], raw: bool, tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    edit_config(tmp_path, **config)
    for name, said in files.items():
        (tmp_path / name).write_text(json.dumps(said))
    found = pooling_of(tmp_path)
    assert (found.raw, found.refused) == (raw, "")


def test_scores_through_another_function_are_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    edit_config(tmp_path, sentence_transformers={"activation_fn": "torch.nn.modules.activation.Tanh"})
    assert "'Tanh'" in pooling_of(tmp_path).refused
