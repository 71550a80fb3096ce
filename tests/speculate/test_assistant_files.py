"""GGUF files of models that draft for another: drafts are those of the folder's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from assistant_files import write_assistant_file
from assistants import Pair, write_assistant, write_pair
from engine_answers import engine_of
from gemma_variants import GEMMAS
from gguf_writing import VOCAB, add_tokenizer, byte_level
from llama_cpp_peer import ENVIRONMENT
from llama_cpp_peer import pytestmark as with_llama_cpp
from mtp_drafts import IN_CHUNKS, check_logits
from oracle import BACKENDS, write
from paths import SUPPORT
from quire.cli.app import app
from quire.compress.layouts.gguf import write_gguf
from quire.compress.layouts.gguf_assistants import UNGROUPED
from quire.core.errors import ConfigError, ModelError
from quire.model.disk.assistant_headers import open_assistant
from quire.store.hub import NEWEST

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="quire._native is not built")
KINDS = {
    "gemma4": {},
    "gemma4_keys_as_values": {"use_ordered_embeddings": False},
    "gemma4_small": {"use_ordered_embeddings": False},
    "gemma4_unified": {"use_ordered_embeddings": False},
}
"""Targets, and facts of their assistants: files have no clusters of tokens."""
SIZES = ("kv_heads", "head_dim", "windows", "rope", "assistant", "max_position", "sizes")


def engine_with(folder: Path, assistant: Path) -> Any:
    asked = json.dumps({"method": "mtp", "model": str(assistant), "adaptive": False})
    return engine_of(model=str(folder / "target"), speculative_config=asked, **IN_CHUNKS)


def converted(folder: Path, out: Path) -> None:
    """What llama.cpp's converter writes."""
    sources = next(Path(ENVIRONMENT).glob("sources/*/vendor/llama.cpp"))
    script = [sys.executable, str(SUPPORT / "llama_cpp_convert.py"), str(sources)]
    shutil.copy(folder.parent / "target" / "tokenizer.json", folder)
    command = json.dumps({"folder": str(folder), "out": str(out)})
    done = subprocess.run(script, input=command, text=True, capture_output=True)
    assert out.exists(), done.stdout + done.stderr[-2000:]


CASES = [(kind, write_assistant_file) for kind in KINDS]
CASES += [pytest.param(kind, converted, marks=with_llama_cpp) for kind in KINDS if kind != "gemma4_unified"]
"""The converter looks for experts in every folder of that type, and has none."""


@pytest.mark.parametrize(("kind", "write"), CASES)
def test_the_logits_are_those_of_transformers(kind: str, write: Any, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, kind, **KINDS[kind])
    write(tmp_path / "assistant", tmp_path / "assistant.gguf")
    file, folder = (open_assistant(str(tmp_path / name), NEWEST).spec for name in ("assistant.gguf", "assistant"))
    names = {f.name for f in fields(folder)} & set(SIZES)
    assert {name: getattr(file, name) for name in names} == {name: getattr(folder, name) for name in names}
    check_logits(engine_with(tmp_path, tmp_path / "assistant.gguf").engine, pair.logits, pair.target)


def write_speaking_pair(folder: Path, kind: str, **facts: Any) -> Pair:
    """A target and its assistant, both with a tokenizer that files have."""
    family, own = GEMMAS[kind]
    tables = {name: VOCAB for name in ("vocab_size", "vocab_size_per_layer_input") if name in own | {"vocab_size": 0}}
    target = write(folder / "target", family, **own | {"max_position_embeddings": 256} | tables)
    assistant = write_assistant(folder / "assistant", kind, text_config={"vocab_size": VOCAB}, **facts)
    for name in ("target", "assistant"):
        add_tokenizer(folder / name, byte_level())
    return Pair(target, assistant)


WHOLE = KINDS | {"gemma4_windows": {}, "gemma4_experts": {}}


@pytest.mark.parametrize("kind", WHOLE)
def test_written_files_draft_as_transformers_does(kind: str, tmp_path: Path) -> None:
    pair = write_speaking_pair(tmp_path, kind, **WHOLE[kind])
    write_gguf(tmp_path / "assistant", tmp_path / "assistant.gguf", "F32")
    check_logits(engine_with(tmp_path, tmp_path / "assistant.gguf").engine, pair.logits, pair.target)


def tensors_of(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor.data.squeeze() for tensor in gguf.GGUFReader(path).tensors}


@with_llama_cpp[0]
@with_llama_cpp[1]
@pytest.mark.parametrize("kind", [kind for kind in WHOLE if kind not in ("gemma4_unified", "gemma4_experts")])
def test_written_files_hold_the_tensors_of_converted_ones(kind: str, tmp_path: Path) -> None:
    """The converter leaves out rows of tokens that the tokenizer does not have."""
    write_speaking_pair(tmp_path, kind, **WHOLE[kind])
    write_gguf(tmp_path / "assistant", tmp_path / "ours.gguf", "F32")
    converted(tmp_path / "assistant", tmp_path / "theirs.gguf")
    ours, theirs = tensors_of(tmp_path / "ours.gguf"), tensors_of(tmp_path / "theirs.gguf")
    assert ours.keys() == theirs.keys()
    ours["token_embd.weight"] = ours["token_embd.weight"][: len(theirs["token_embd.weight"])]
    assert not [name for name in ours if not np.array_equal(ours[name], theirs[name])]


def test_compress_writes_a_file_without_clusters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_speaking_pair(tmp_path, "gemma4_small", num_centroids=10)
    words = ["compress", str(tmp_path / "assistant"), str(tmp_path / "out"), "--quantize", "F16"]
    with caplog.at_level("WARNING"):
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert UNGROUPED in caplog.text and "no passport is measured" in caplog.text
    assert "quire serve TARGET --speculative-config" in done.output
    (file,) = (tmp_path / "out").glob("*.gguf")
    write_assistant_file(tmp_path / "assistant", tmp_path / "wanted.gguf")
    made, wanted = tensors_of(file), tensors_of(tmp_path / "wanted.gguf")
    assert made.keys() == wanted.keys()
    assert not [name for name in made if not np.allclose(made[name], wanted[name], rtol=1e-3, atol=1e-6)]
    specs = [open_assistant(str(path), NEWEST).spec for path in (file, tmp_path / "wanted.gguf")]
    assert specs[0] == replace(specs[1], output_softcap=specs[0].output_softcap)


def test_methods_that_run_layers_refuse_an_assistant(tmp_path: Path) -> None:
    write_speaking_pair(tmp_path, "gemma4")
    words = ["compress", str(tmp_path / "assistant"), str(tmp_path / "out"), "--quantize", "rtn"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ModelError) and "does not run alone" in done.exception.message


def test_a_file_does_not_run_alone_and_fits_its_target(tmp_path: Path) -> None:
    write_pair(tmp_path, "gemma4")
    write_assistant_file(tmp_path / "assistant", tmp_path / "assistant.gguf")
    with pytest.raises(ModelError, match="it drafts for another model: start that with --spec"):
        engine_of(model=str(tmp_path / "assistant.gguf"))
    write_pair(tmp_path / "other", "gemma4_keys_as_values")
    with pytest.raises(ConfigError, match=r"method mtp: .*layer"):
        engine_with(tmp_path / "other", tmp_path / "assistant.gguf")
