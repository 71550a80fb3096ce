"""Encoders made smaller make vectors as before: what sentence-transformers' files say goes along with the weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from encoder_models import say_splade, write_encoder, write_splade, write_tokenizer
from net_checks import error, made, random_tokens
from paged_model import TOLERANCE
from quire import LLM
from quire.cli.app import app
from quire.compress.checkpoint.net import Net
from quire.core.errors import ConfigError
from quire.model.describe import open_model
from quire.ops.native import load_native

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native is not built")
RTN = {"kind": "quantize", "method": "rtn", "bits": 8, "group_size": 32}
TEXTS = ["a cat sat on the mat", "how many live in berlin?", "berlin"]


def llm_of(folder: Path) -> LLM:
    return LLM(folder, device="cpu", num_blocks=512)


def write_modules(folder: Path) -> None:
    """A pooling of the first token, a dense layer, the division by the length, prompts and limits."""
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    said = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(parts.items())]  # fmt: skip
    dense = {"in_features": 64, "out_features": 24, "activation_function": "torch.nn.modules.linear.Identity"}
    files = {
        "modules.json": said,
        "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        "2_Dense/config.json": dense,
        "sentence_bert_config.json": {"max_seq_length": 100, "do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
    }
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    (folder / "3_Normalize").mkdir()
    save_file({"linear.weight": torch.randn(24, 64)}, folder / "2_Dense" / "model.safetensors")


@pytest.mark.parametrize("layout", ["auto", "dense"])
def test_vectors_are_pooled_as_before(layout: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    write_encoder(source, "bert")
    write_tokenizer(source)
    write_modules(source)
    (source / "README.md").write_text("none of the model's")
    out = made(tmp_path / "out", RTN, layout=layout, source=str(source))
    own, found = open_model(str(source)).pooling, open_model(str(out)).pooling
    assert (own.kind, own.longest, own.prompt, own.normalize) == ("cls", 100, "query", True)
    assert len(own.dense) == 1 and own.width == 24
    assert found == own
    with llm_of(source) as before, llm_of(out) as after:
        assert after.info.max_model_len == before.info.max_model_len == 100
        for one, other in zip(before.embed(TEXTS), after.embed(TEXTS), strict=True):
            assert float(np.dot(one.outputs.embedding, other.outputs.embedding)) > 0.99
    assert not (out / "README.md").exists()
    assert [path.name for path in (out / "2_Dense").iterdir()] and (out / "3_Normalize").is_dir()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_weights_of_the_vocabulary_stay(name: str, tmp_path: Path) -> None:
    source, tokens = tmp_path / "in", random_tokens(2, 9)
    source.mkdir()
    model = write_splade(source, name)
    write_tokenizer(source)
    say_splade(source, pooling_strategy="sum")
    with torch.no_grad():
        assert error(Net.open(str(source)).logits(tokens), model(tokens).logits) <= TOLERANCE
    out = made(tmp_path / "out", RTN, source=str(source))
    awq = {"kind": "quantize", "method": "awq", "bits": 8, "group_size": 32}
    again = made(tmp_path / "again", awq, layout="dense", source=str(out))
    assert open_model(str(again)).pooling == open_model(str(out)).pooling == open_model(str(source)).pooling
    with llm_of(source) as before, llm_of(out) as after, llm_of(again) as last:
        want = before.embed_sparse(TEXTS)
        for llm in (after, last):
            for one, other in zip(want, llm.embed_sparse(TEXTS), strict=True):
                whole = np.zeros((2, 99))
                for row, each in zip(whole, (one.outputs, other.outputs), strict=True):
                    row[each.indices] = each.values
                assert whole.any(1).all() and whole[0] @ whole[1] / np.prod(np.linalg.norm(whole, axis=1)) > 0.99


def test_what_is_not_measured_is_not_proposed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`quire eval` compares texts, which encoders do not write."""
    source, out = tmp_path / "in", tmp_path / "out"
    write_encoder(source, "bert")
    write_tokenizer(source)
    words = ["compress", str(source), str(out), "--quantize", "rtn", "--set", "group_size=32"]
    told = CliRunner().invoke(app, words).output
    assert f"quire serve {out}" in told and "quire eval" not in told
    assert "no passport is measured: it makes vectors" in caplog.text


@pytest.mark.parametrize("name", ["bert", "eurobert"])
def test_a_file_of_sparse_vectors_is_refused(name: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    write_splade(source, name)
    write_tokenizer(source)
    with pytest.raises(ConfigError, match="SPLADE's head and pooling have no place in GGUF; keep the folder"):
        made(tmp_path / "out", {"kind": "quantize", "method": "gguf", "format": "Q8_0"}, source=str(source))
    assert not (tmp_path / "out").exists()


def test_modules_of_a_path_elsewhere_are_not_copied(tmp_path: Path) -> None:
    source, other = tmp_path / "in", tmp_path / "other"
    write_encoder(source, "bert")
    write_tokenizer(source)
    other.mkdir()
    (other / "secret").write_text("x")
    (source / "modules.json").write_text(json.dumps([{"path": "../other", "type": "a.Normalize"}]))
    out = made(tmp_path / "out", RTN, source=str(source))
    assert not list(out.rglob("secret"))
