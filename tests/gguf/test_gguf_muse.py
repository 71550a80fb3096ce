"""GGUF files of Muse Glimmer: the factor of queries lies in the weights of a norm that its folders do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package writes the files; it is in the dev extra")

from attention_variants import GATED_DENSE  # noqa: E402
from gguf_models import write_gguf  # noqa: E402
from oracle import BACKENDS, backend, logits, relative_error  # noqa: E402
from paged_model import CUTS, Paged, load, prompt  # noqa: E402
from quire.core.errors import ModelError  # noqa: E402
from quire.model.describe import describe  # noqa: E402

FACTS = GATED_DENSE["muse_glimmer"][1] | {"qk_scale_factor": 2.5, "num_key_value_heads": 2}
KINDS = [True, True, True, False]


def as_converted(writer: Any) -> None:
    """What the converter writes beside the model's own tensors: norms of queries and keys, and which layers turn."""
    writer.add_sliding_window_pattern(KINDS)
    for i in range(len(KINDS)):
        writer.add_tensor(f"blk.{i}.attn_q_norm.weight", np.full(16, FACTS["qk_scale_factor"], np.float32))
        writer.add_tensor(f"blk.{i}.attn_k_norm.weight", np.ones(16, np.float32))


@pytest.mark.parametrize("name", BACKENDS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    path, sequences = tmp_path / "muse.gguf", [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    oracle = write_gguf(path, "muse_glimmer_text", edit=as_converted, **FACTS)
    model = load(path, backend(name))
    for cut in CUTS.values():
        for got, tokens in zip(Paged(model, sequences).run(cut), sequences, strict=True):
            assert relative_error(got, logits(oracle, tokens)) <= 1e-5


def test_files_need_these_norms(tmp_path: Path) -> None:
    path = tmp_path / "muse.gguf"
    write_gguf(path, "muse_glimmer_text", **FACTS)
    with pytest.raises(ModelError, match="attn_q_norm"):
        describe(str(path))
