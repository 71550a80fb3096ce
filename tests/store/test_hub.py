"""Names on the hub: which files are asked for, of which revision, and where they go."""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM
from quire.core.config import ModelConfig
from quire.core.errors import ConfigError, ModelError
from quire.model.disk.checkpoint import EMBEDDED, resolve
from quire.model.disk.tokenizer import model_template, tokenizer_folder
from quire.store.hub import Hub, hub_beside, hub_of
from quire.text.tokenizer import Tokenizer
from tiny_model import OPTIONS, write_tiny

FOLDER = (
    "config.json", "model-00001-of-00002.safetensors", "chat_template.jinja", "additional_chat_templates/rag.jinja",
    "tokenizer.model", "vocab.txt", "merges.txt", "qwen.tiktoken",
)  # fmt: skip
OTHER = ("pytorch_model.bin", "model.onnx", "m-Q4_K_M.gguf", "README.md")
IMAGES = ("mmproj-m-F16.gguf", "mmproj-m-BF16.gguf", "mmproj-m-F32.gguf")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the hub was asked for; it puts made-up files into `tmp_path`."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        for file in (*FOLDER, *OTHER, "m-Q4_K_S.gguf", "deep/m.q8_0.gguf"):
            if not (tmp_path / file).exists() and any(
                fnmatch.fnmatchcase(file, pattern) for pattern in options["allow_patterns"]
            ):
                (tmp_path / file).parent.mkdir(exist_ok=True)
                (tmp_path / file).write_bytes(b"GGUF")
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    return calls


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_all_that_a_model_needs_is_downloaded(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert resolve("owner/model") == tmp_path
    assert files(tmp_path) == set(FOLDER)
    assert (asked[0]["name"], asked[0]["revision"], asked[0]["cache_dir"]) == ("owner/model", None, None)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("owner/model:Q4_K_M", "m-Q4_K_M.gguf"),
        ("owner/model:q4_k_s", "m-Q4_K_S.gguf"),
        ("owner/model:Q8_0", "deep/m.q8_0.gguf"),
        ("owner/model/m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
        ("owner/model/deep/m.q8_0.gguf", "deep/m.q8_0.gguf"),
    ],
)
def test_a_gguf_file_is_downloaded_alone(name: str, file: str, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert resolve(name) == tmp_path / file
    assert files(tmp_path) == {file} and asked[0]["name"] == "owner/model"


def test_what_makes_rows_of_images_is_downloaded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        for file in (*OTHER, *IMAGES):
            if any(fnmatch.fnmatchcase(file, pattern) for pattern in options["allow_patterns"]):
                (tmp_path / file).write_bytes(b"GGUF")
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert resolve("owner/model:Q4_K_M", Hub(mmproj="")) == tmp_path / "m-Q4_K_M.gguf"
    assert files(tmp_path) == {"m-Q4_K_M.gguf"}
    assert resolve("owner/model:Q4_K_M") == tmp_path / "m-Q4_K_M.gguf"
    assert files(tmp_path) == {"m-Q4_K_M.gguf", "mmproj-m-F16.gguf"}


def test_what_is_not_there_is_named(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="means no file"):
        resolve("owner/model:Q2_K")
    (tmp_path / "x-Q4_K_M.gguf").touch()
    with pytest.raises(ModelError, match=r"means m-Q4_K_M\.gguf, x-Q4_K_M\.gguf; name one file"):
        resolve("owner/model:Q4_K_M")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json; if GGUF files are there, name one: owner/model:Q4_K_M"):
        resolve("owner/model")


def test_revision_and_folder_of_downloads(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    options = ModelConfig(model="owner/model", revision="v2", download_dir="/downloads")
    assert (hub_of(options), hub_beside(options)) == (Hub("v2", "/downloads"), Hub(None, "/downloads"))
    resolve(options.model, hub_of(options))
    assert (asked[0]["revision"], asked[0]["cache_dir"]) == ("v2", "/downloads")
    write_tiny(tmp_path)
    with LLM("owner/model", **OPTIONS, revision="v2", download_dir=tmp_path) as llm:
        assert llm.info.model == "owner/model"
    assert {(call["revision"], call["cache_dir"]) for call in asked[1:]} == {("v2", str(tmp_path))}
    for model in ("", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"--revision v2: .* lies on this machine"):
            LLM(model, **OPTIONS, revision="v2")


def test_names_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"quire\[hub\]"):
        resolve("owner/model")
    for bad in ("nowhere", "a/b/c", "../x/y", "a/b/../c.gguf", str(tmp_path / "none")):
        reason = "no such file or folder" if "/" in bad else "neither a folder nor a hub name"
        with pytest.raises(ModelError, match=reason):
            resolve(bad)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve(str(tmp_path / "model.gguf"))
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"link is a symbolic link to .*gone, which is not there"):
        resolve(str(tmp_path / "link"))
    assert resolve("") == resolve("pydoc") == EMBEDDED


def test_a_tokenizer_is_the_models_unless_another_is_named(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    named = str(tmp_path / "words")  # no model is in it
    assert (
        tokenizer_folder(ModelConfig(), "/model")
        == tokenizer_folder(ModelConfig(tokenizer=""), "/model")
        == Path("/model")
    )
    assert tokenizer_folder(ModelConfig(tokenizer=named), "/model") == Path(named)
    with pytest.raises(ModelError, match="none: no such file or folder"):
        tokenizer_folder(ModelConfig(tokenizer=str(tmp_path / "none")), "/model")


def test_a_chat_template_lies_with_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(EMBEDDED)
    assert model_template(ModelConfig(), tmp_path, tokenizer, 64) is None
    assert model_template(ModelConfig(), EMBEDDED, tokenizer, 64) is not None
    assert model_template(ModelConfig(tokenizer=str(EMBEDDED)), tmp_path, tokenizer, 64) is not None
    assert model_template(ModelConfig(tokenizer=str(tmp_path)), EMBEDDED, tokenizer, 64) is None
