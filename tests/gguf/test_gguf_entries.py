"""GGUF files of attention to entries (DeepSeek V4): what has no key there is refused, and tables keep whole numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="tiny models of GGUF's architectures need the gguf package; it is in the dev extra")

from gguf_newer import NEWER
from gguf_writing import add_tokenizer, byte_level
from gguf_written import SHAPE, write_folder
from oracle import edit_config, write
from quire.compress.layouts.gguf import write_gguf
from quire.core.errors import ConfigError, ModelError
from quire.gguf.file import GgufFile
from quire.gguf.writer import NewTensor, write_file
from quire.model.describe import open_model

KIND, FACTS = NEWER["deepseek4"]
RATES = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 128}


def write_with(path: Path, other: Path, more: dict[str, Any]) -> None:
    """Write the file `path` again as `other`, with `more` metadata."""
    file = GgufFile(path)
    metadata = {key: file.metadata[key] for key in file.metadata} | more
    tensors = [NewTensor(tensor.name, tensor.type.name, tensor.shape) for tensor in file.tensors.values()]
    data = [np.frombuffer(file.data, np.uint8, tensor.nbytes, tensor.start) for tensor in file.tensors.values()]
    write_file(other, metadata, tensors, data)


OTHER: list[tuple[dict[str, Any], str]] = [
    ({"compress_rates": RATES}, "GGUF has no key for the model's (windows|entries)"),
    ({"mlp_layer_types": ["moe", "hash_moe", "moe"]}, "GGUF has no key for the model's moe"),
]


@pytest.mark.parametrize(("facts", "named"), OTHER)
def test_models_that_the_format_has_no_keys_for_are_refused(facts: dict[str, Any], named: str, tmp_path: Path) -> None:
    write(tmp_path, KIND, **SHAPE | FACTS | facts)
    add_tokenizer(tmp_path, byte_level())
    with pytest.raises(ConfigError, match=named):
        write_gguf(tmp_path, tmp_path / "model.gguf", "F32")


def test_scores_of_another_kind_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "deepseek4")
    edit_config(tmp_path, scoring_func="sigmoid")
    with pytest.raises(ConfigError, match="GGUF has no key for the model's moe"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "F32")


def test_tables_of_tokens_keep_whole_numbers_in_every_format(tmp_path: Path) -> None:
    write_folder(tmp_path, "deepseek4")
    write_gguf(tmp_path, tmp_path / "model.gguf", "Q8_0")
    tables = [tensor for tensor in GgufFile(tmp_path / "model.gguf").tensors.values() if "tid2eid" in tensor.name]
    assert [(table.name, table.type.name) for table in tables] == [("blk.0.ffn_gate_tid2eid.weight", "I32")]


def test_limits_that_differ_by_layer_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "deepseek4")
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    write_gguf(tmp_path, path, "F32")
    limits = np.arange(1, 1 + open_model(str(path)).spec.layers, dtype=np.float32)
    write_with(path, other, {"deepseek4.swiglu_clamp_shexp": limits})
    with pytest.raises(ModelError, match="one limit is needed"):
        open_model(str(other))


def test_files_may_say_how_many_numbers_all_streams_have(tmp_path: Path) -> None:
    """As those of llama.cpp's converter do."""
    write_folder(tmp_path, "deepseek4")
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    write_gguf(tmp_path, path, "F32")
    write_with(path, other, {"deepseek4.embedding_length_out": 256})
    assert open_model(str(other)).spec == open_model(str(path)).spec
