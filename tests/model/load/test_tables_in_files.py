"""Tables of which rows are read out of the mapped file: as they are asked for, and no others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gemma_variants import GEMMAS
from mapped_files import resident
from oracle import BACKENDS, backend, logits, relative_error, write
from paged_model import TOLERANCE, Paged, load, prompt
from quire.core.config import flat_config
from quire.model.describe import describe
from quire.model.load.roles import ROLES
from quire.ops.choice import choose
from quire.plan.weights import weight_parts

WORDS = 1 << 15


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
@pytest.mark.parametrize("name", BACKENDS)
def test_only_rows_of_the_tokens_are_in_memory(name: str, tmp_path: Path) -> None:
    family, facts = GEMMAS["gemma4_small"]
    facts = facts | {"vocab_size": WORDS, "vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 64}
    oracle = write(tmp_path, family, **facts)
    model = load(tmp_path, backend(name))
    table = 4 * ROLES["input_table"].numbers(model.spec)
    assert table == 4 * WORDS * 4 * 64 and model.report["input_table"] == ("float32 in the file", 0)
    tokens = [WORDS - 1, *prompt(5, 1), 3 * WORDS // 4]
    (got,) = Paged(model, [tokens]).run([[7]])
    assert relative_error(got, logits(oracle, tokens)) <= TOLERANCE
    file = tmp_path / "model.safetensors"
    others = file.stat().st_size - table
    rows = 0 if name == "cpu" else table / 8
    assert resident(file) <= others + rows, "others' matrices may be read where they lie"


def test_the_plan_counts_no_bytes_of_such_a_table(tmp_path: Path) -> None:
    family, facts = GEMMAS["gemma4_small"]
    write(tmp_path, family, **facts)
    config = flat_config(model=str(tmp_path), device="reference", dtype="float32")
    parts = weight_parts(config, describe(str(tmp_path)), choose(config.device))
    assert [part.nbytes for part in parts if part.role == "input_table"] == [0]
    assert sum(part.nbytes for part in parts) == load(tmp_path, backend("reference")).weight_bytes
