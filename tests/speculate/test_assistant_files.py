"""GGUF files of models that draft for another: drafts are those of the folder's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from assistant_files import write_assistant_file
from assistants import write_pair
from engine_answers import engine_of
from llama_cpp_peer import ENVIRONMENT
from llama_cpp_peer import pytestmark as with_llama_cpp
from mtp_drafts import IN_CHUNKS, check_logits
from oracle import BACKENDS
from paths import SUPPORT
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


def test_a_file_does_not_run_alone_and_fits_its_target(tmp_path: Path) -> None:
    write_pair(tmp_path, "gemma4")
    write_assistant_file(tmp_path / "assistant", tmp_path / "assistant.gguf")
    with pytest.raises(ModelError, match="it drafts for another model: start that with --spec"):
        engine_of(model=str(tmp_path / "assistant.gguf"))
    write_pair(tmp_path / "other", "gemma4_keys_as_values")
    with pytest.raises(ConfigError, match=r"method mtp: .*layer"):
        engine_with(tmp_path / "other", tmp_path / "assistant.gguf")
