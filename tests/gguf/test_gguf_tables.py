"""Tables of per-layer embeddings in GGUF files: rows are read out of the file, in every block type, as numbers equal to
those of the whole table."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package names the block types; it is in the dev extra")

from gguf.constants import GGMLQuantizationType as Type  # noqa: E402

from gemma_variants import GEMMAS  # noqa: E402
from gguf_models import random_blocks  # noqa: E402
from gguf_writing import SHAPE, VOCAB, add_tokenizer, byte_level  # noqa: E402
from mapped_files import resident  # noqa: E402
from oracle import BACKENDS, backend, write  # noqa: E402
from paged_model import Paged, prompt  # noqa: E402
from quire.compress.layouts.gguf import write_gguf  # noqa: E402
from quire.core.config import flat_config  # noqa: E402
from quire.core.dtypes import F32  # noqa: E402
from quire.model.build import Model, load_model  # noqa: E402
from quire.model.describe import describe, open_model  # noqa: E402
from quire.model.disk.headers import ModelHeaders  # noqa: E402
from quire.model.load.roles import ROLES  # noqa: E402
from quire.ops.arrays import to_numpy  # noqa: E402
from quire.ops.choice import choose  # noqa: E402
from quire.plan.weights import weight_parts  # noqa: E402
from quire.quant.gguf import TYPES, Block  # noqa: E402
from quire.quant.stored import StoredWeight  # noqa: E402

READ = [name for name in TYPES if Block(TYPES[name]).form.native]
TABLE = "model.embed_tokens_per_layer"
FACTS = GEMMAS["gemma4_small"][1] | {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCAB}
TOKENS = [VOCAB - 1, *prompt(9, 1), 0]


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("kind", READ)
def test_rows_are_those_of_the_whole_table(kind: str, device: str) -> None:
    raw = random_blocks((37, 512), Type[kind], 3)
    weight = Block(TYPES[kind]).load({kind: raw}, F32)
    assert isinstance(weight, StoredWeight)
    table, ops = weight.as_table(), backend(device)
    whole, tokens = to_numpy(weight.dequantize()), np.array([0, 36, 5, 5, 17], np.int32)
    ops.begin_step()
    assert np.array_equal(to_numpy(ops.embedding(ops.put(tokens), ops.place(table))), whole[tokens])
    ops.begin_step()
    found = to_numpy(ops.embedding(ops.put(tokens + 3), ops.place(table), 4))
    here = tokens > 0
    assert np.array_equal(found[here], whole[tokens[here] - 1])
    assert (found[~here] == 0).all() and np.signbit(found[~here]).all()


def test_a_token_beyond_the_table_is_refused() -> None:
    raw = random_blocks((8, 256), Type.Q6_K, 3)
    weight = Block(TYPES["Q6_K"]).load({"Q6_K": raw}, F32)
    assert isinstance(weight, StoredWeight)
    ops = backend(BACKENDS[-1])
    with pytest.raises((ValueError, IndexError)):
        ops.begin_step()
        ops.embedding(ops.put(np.array([8], np.int32)), ops.place(weight.as_table()))


def load(path: Path, device: str) -> Model:
    return load_model(flat_config(model=str(path), dtype="float32", activations="int16"), backend(device))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "F16"])
def test_models_answer_as_with_the_whole_table(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "gemma4_text", **SHAPE | FACTS)
    add_tokenizer(tmp_path, byte_level())
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, path, "F32", kinds={TABLE: kind})
    model = load(path, device)
    assert model.report["input_table"] == (f"{'float16' if kind == 'F16' else kind} in the file", 0)
    (got,) = Paged(model, [TOKENS]).run([[7], [len(TOKENS) - 7]])
    monkeypatch.setattr(ModelHeaders, "in_file", lambda opened, role: 0)
    whole = load(path, device)
    assert whole.report["input_table"][1] > 0
    (want,) = Paged(whole, [TOKENS]).run([[7], [len(TOKENS) - 7]])
    assert np.array_equal(to_numpy(got), to_numpy(want))


def test_codes_that_are_not_read_row_by_row_are_packed(tmp_path: Path) -> None:
    """The plan counts them."""
    write(tmp_path, "gemma4_text", **SHAPE | FACTS)
    add_tokenizer(tmp_path, byte_level())
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, path, "F32", kinds={TABLE: "Q8_0"})
    opened = open_model(str(path))
    assert opened.in_file("input_table") == VOCAB * 256 // 32 * 34 == describe(str(path)).in_file["input_table"]
    for device in BACKENDS:
        config = flat_config(model=str(path), device=device, dtype="float32")
        parts = weight_parts(config, describe(str(path)), choose(config.device))
        assert [part.nbytes for part in parts if part.role == "input_table"] == [0]
        assert sum(part.nbytes for part in parts) == load_model(config, backend(device)).weight_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_a_larger_table_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """36 MB of a file of 46: what is resident of it is what is read where it lies, and no row stays."""
    words = 1 << 15
    facts = FACTS | {"vocab_size": words, "vocab_size_per_layer_input": words, "hidden_size_per_layer_input": 256}
    write(tmp_path, "gemma4_text", **SHAPE | facts)
    add_tokenizer(tmp_path, byte_level())
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, path, "F32", kinds={TABLE: "Q8_0"})
    model = load(path, BACKENDS[-1])
    table = ROLES["input_table"].numbers(model.spec) // 32 * 34
    tokens = [words - 1, *prompt(30, 1), 3 * words // 4]
    (got,) = Paged(model, [tokens]).run([[len(tokens)]])
    assert resident(path) <= path.stat().st_size - table
    monkeypatch.setattr(ModelHeaders, "in_file", lambda opened, role: 0)
    (want,) = Paged(load(path, BACKENDS[-1]), [tokens]).run([[len(tokens)]])
    assert np.array_equal(to_numpy(got), to_numpy(want))
