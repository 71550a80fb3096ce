"""GGUF files of layers that scan: packed formats, what is refused, and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package writes the test files; it is in the dev extra")

from gguf.constants import GGMLQuantizationType as Type  # noqa: E402

import gguf_scans  # noqa: E402
from gguf_families import FAMILIES  # noqa: E402
from gguf_models import write_gguf  # noqa: E402
from gguf_writing import add_tokenizer, byte_level  # noqa: E402
from oracle import BACKENDS, backend, logits, relative_error, write  # noqa: E402
from paged_model import Paged, prompt  # noqa: E402
from quire.compress.layouts.gguf import write_gguf as write_folder  # noqa: E402
from quire.core.config import flat_config  # noqa: E402
from quire.core.errors import ConfigError, ModelError  # noqa: E402
from quire.gguf.file import GgufFile  # noqa: E402
from quire.model.build import load_model  # noqa: E402
from quire.model.describe import describe  # noqa: E402
from quire.model.disk.gguf_layers import Layers, by_periods  # noqa: E402

TOKENS = prompt(19, 1)
PACKED = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "mamba2", "mamba", "jamba")
WRITTEN = [name for name, (kind, _) in FAMILIES.items() if kind in gguf_scans.ARCHITECTURES and kind != "falcon_h1"]
SIZES = {"intermediate_size": 128, "shared_intermediate_size": 64}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", PACKED)
def test_quantized_files_stay_packed(name: str, device: str, tmp_path: Path) -> None:
    kind, facts = FAMILIES[name]
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, kind, lambda tensor: Type.Q8_0, **facts | SIZES)
    model = load_model(flat_config(model=str(path), dtype="float32", activations="int16"), backend(device))
    (got,) = Paged(model, [TOKENS]).run([[len(TOKENS)]])
    assert relative_error(got, logits(oracle, TOKENS)) <= 2e-3  # activations have 16 bits, and routers choose by them
    floats = {role for role, (label, _) in model.report.items() if label in ("f32", "bf16")}
    assert floats <= {"rope", "norms", "scan_conv", "channel_conv", "biases", "embed", "router", "router_bias"}, floats


def turning(writer: Any) -> None:
    """Say that heads turn by positions."""
    writer.kv_data[0]["granitehybrid.rope.scaling.finetuned"].value = True


def test_what_the_format_cannot_tell_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    kind, facts = FAMILIES["granitehybrid"]
    write_gguf(path, kind, edit=turning, **facts)
    with pytest.raises(ModelError, match=r"rope\.scaling\.finetuned: is True, False is what granitehybrid models have"):
        describe(str(path))
    kind, facts = FAMILIES["falcon-h1"]
    write_gguf(path, kind, **facts | {"tie_word_embeddings": True})
    with pytest.raises(ModelError, match=r"missing tensors: output\.weight \(role head\)"):
        describe(str(path))


def test_layers_without_a_period_are_refused() -> None:
    layers = Layers("model.gguf", [0, 2, 0, 0, 2, 2], [64] * 6, [False] * 6)
    with pytest.raises(ModelError, match=r"model\.gguf: layers \[1, 4, 5\] do not come every 3 layers"):
        by_periods(layers)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", WRITTEN)
def test_written_files_answer_as_transformers_does(name: str, tmp_path: Path) -> None:
    kind, facts = FAMILIES[name]
    model = write(tmp_path, kind, **facts | {"vocab_size": 352})
    add_tokenizer(tmp_path, byte_level())
    path = tmp_path / "model.gguf"
    write_folder(tmp_path, path, "F32")
    read = load_model(flat_config(model=str(path), dtype="float32"), backend("reference"))
    (got,) = Paged(read, [TOKENS]).run([[len(TOKENS)]])
    assert relative_error(got, logits(model, TOKENS)) <= 1e-5
    assert describe(str(path)).parameters == describe(str(tmp_path)).parameters
    converted = tmp_path / "converted.gguf"
    write_gguf(converted, kind, **facts | {"vocab_size": 352})
    ours, theirs = (GgufFile(file) for file in (path, converted))
    assert ours.metadata["general.architecture"] == theirs.metadata["general.architecture"]
    assert {n: t.shape for n, t in ours.tensors.items()} == {n: t.shape for n, t in theirs.tensors.items()}


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    kind, facts = FAMILIES["granitehybrid"]
    write(tmp_path, kind, **facts | {"position_embedding_type": "rope", "vocab_size": 352})
    add_tokenizer(tmp_path, byte_level())
    with pytest.raises(ConfigError, match="GGUF has no key for the model's rope"):
        write_folder(tmp_path, tmp_path / "model.gguf", "Q8_0")
