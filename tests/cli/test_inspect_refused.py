"""`quire inspect` of what does not load: what it is, why not, which row is nearest, and what to do."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Type

from gguf_families import FAMILIES, WIDE
from gguf_models import vocabulary, write_gguf
from oracle import write
from quire.cli import main
from quire.gguf.file import GgufFile
from quire.gguf.writer import NewTensor, write_file

Answer = tuple[int, str, str]


@pytest.fixture
def inspect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`inspect(path, "--flag")` -> (exit code, stdout, stderr)."""

    def call(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["quire", "inspect", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


def renamed(path: Path, old: str, new: str) -> Path:
    assert len(old) == len(new)
    path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))
    return path


def test_gguf_of_an_unknown_architecture(inspect: Callable[..., Answer], tmp_path: Path) -> None:
    kind, facts = FAMILIES["qwen3moe"]
    write_gguf(tmp_path / "model.gguf", kind, lambda name: Type.Q8_0, **facts)
    renamed(tmp_path / "model.gguf", "qwen3moe", "qwen9moe")
    code, told, error = inspect(tmp_path / "model.gguf")
    assert code == 2 and "'qwen9moe' is not supported" in error
    for line in (
        "architecture     qwen9moe",
        "Q8_0",
        "experts          6",
        "runs here   no",
        "qwen3moe: its roles take all",
    ):
        assert line in told
    renamed(tmp_path / "model.gguf", "attn_q_norm", "attn_x_norm")
    _, said, _ = inspect(tmp_path / "model.gguf", "--json")
    found = json.loads(said)
    assert found["model"]["architecture"] == "qwen9moe"
    assert "not blk.{}.attn_x_norm.weight" in found["does it run"]["nearest"]
    assert "'qwen9moe' is not supported" in found["does it run"]["because"]


def test_gguf_of_what_is_no_model(inspect: Callable[..., Answer], tmp_path: Path) -> None:
    facts = {"general.type": "imatrix", "imatrix.chunk_count": 1}
    sums = NewTensor("blk.0.attn_q.weight.in_sum2", "F32", (1, 64))
    write_file(tmp_path / "imatrix.gguf", facts, [sums], [np.ones((1, 64), np.float32)])
    code, told, _ = inspect(tmp_path / "imatrix.gguf")
    assert code == 2 and "statistics of activations" in told and "nearest" not in told


def test_folder_of_an_unknown_type(inspect: Callable[..., Answer], tmp_path: Path) -> None:
    write(tmp_path, "qwen2", **WIDE)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen99"}))
    code, told, error = inspect(tmp_path)
    assert code == 2 and "'qwen99' is not supported" in error
    assert "model type" in told and "Qwen2ForCausalLM" in told and "nearest     qwen2: its roles take all" in told
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mllama"}))
    code, told, error = inspect(tmp_path)
    assert code == 2 and "attends to images in layers of their own" in error


def test_a_name_of_the_hub_is_refused_by_its_config_alone(
    inspect: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen99", "num_hidden_layers": 7}))
    asked = list[Any]()

    def snapshot_download(name: str, allow_patterns: list[str], **options: Any) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    code, told, error = inspect("somebody/Qwen99-7B")
    assert code == 2 and "'qwen99' is not supported" in error
    assert "layers      7" in told and "qwen" in told.partition("nearest")[2].partition("\n")[0]
    assert {*asked[0][1]} == {"config.json"} and all(patterns == ["config.json"] for _, patterns in asked)


def with_vocabulary(path: Path, count: int) -> None:
    """Write the file anew with so many tokens, and tables of as many rows of zeros.

    The gguf package takes 20 s to write as many and to read them again.
    """
    small = GgufFile(path)
    tokens, scores, types = vocabulary(count)
    words = {"tokens": tokens, "scores": np.array(scores, np.float32), "token_type": np.array(types, np.int32)}
    facts = dict(small.metadata) | {f"tokenizer.ggml.{name}": value for name, value in words.items()}
    assert len(small.metadata["tokenizer.ggml.tokens"]) == 99
    tensors = [
        NewTensor(t.name, t.type.name, tuple(count if rows == 99 else rows for rows in t.shape))
        for t in small.tensors.values()
    ]
    write_file(path, facts, tensors, (np.zeros(each.nbytes, np.uint8) for each in tensors))


def test_large_vocabularies_take_less_than_a_second(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", **WIDE)
    with_vocabulary(tmp_path / "model.gguf", 256_000)
    renamed(tmp_path / "model.gguf", "llama", "gaucho"[:5])
    run = [sys.executable, "-m", "quire", "inspect", str(tmp_path / "model.gguf")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2 and "256,000 tokens" in done.stdout, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_a_vocabulary_that_cannot_be_built_is_noted(inspect: Callable[..., Answer], tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    raw = (tmp_path / "model.gguf").read_bytes()
    at = raw.index(b"tokenizer.ggml.model")
    (tmp_path / "model.gguf").write_bytes(raw[:at] + raw[at:].replace(b"llama", b"rwkv9", 1))
    code, told, _ = inspect(tmp_path / "model.gguf")
    assert code == 0 and "tokenizer.ggml.model 'rwkv9' cannot be built" in told


FOREIGN: dict[str, tuple[dict[str, str], str]] = {
    "empty": ({}, "the folder is empty"),
    "pipeline": ({"model_index.json": '{"_class_name": "FluxPipeline"}', "unet/config.json": "{}"},
                 "a diffusion pipeline (FluxPipeline)"),
    "adapter": ({"adapter_config.json": '{"base_model_name_or_path": "some/model"}', "adapter_model.safetensors": ""},
                "an adapter of some/model; run that model with --enable-lora --lora-modules NAME="),
    "damaged": ({"adapter_config.json": "{"}, "an adapter of a model that adapter_config.json does not name"),
    "onnx": ({"model.onnx": "x"}, "ONNX files"),
    "makers": ({"params.json": "{}", "consolidated.00.pth": "x"}, "in their maker's own format (params.json)"),
    "inner": ({"one/config.json": "{}", "two/config.json": "{}"}, "folders in it have one: one, two"),
    "projector": ({"mmproj.gguf": "x"}, "GGUF files, of which none is a model of text"),
    "weights": ({"model.safetensors": "x"}, "weights without a config.json"),
    "other": ({"readme.txt": "x"}, "a model folder in Hugging Face format is needed"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_without_config_says_what_it_is(name: str, inspect: Callable[..., Answer], tmp_path: Path) -> None:
    files, what = FOREIGN[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    code, _, error = inspect(tmp_path)
    assert code == 2 and "config.json is missing" in error and what in " ".join(error.split())


def test_a_type_with_a_slip_names_those_that_are_alike(inspect: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwem2", "num_hidden_layers": 7}))
    code, _, error = inspect(tmp_path)
    assert code == 2 and "'qwem2' is not supported; there is qwen2" in error and len(error) < 500
