"""The layer that drafts, of a model's own files, in folders that `quire compress` writes: kept, or its loss is told."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtp_models import write_mtp
from net_checks import recipe
from quire.compress.pipelines.recipe_runner import compress
from quire.core.config import flat_config
from quire.engine.local import LocalEngine
from quire.model.describe import describe
from speculation_methods import answers, requests_of

LOST = "written without the layer that drafts"
DRAFTS = json.dumps({"method": "mtp", "num_speculative_tokens": 3, "adaptive": False})
RTN = {"kind": "quantize", "method": "rtn", "bits": 8, "group_size": 32}
"""By numbers alone: no text is read."""


@pytest.mark.parametrize("kind", ["hy_v3", "qwen3_5"])
@pytest.mark.parametrize("layout", ["auto", "dense"])
def test_a_quantized_folder_keeps_it(layout: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_mtp(tmp_path / "in", kind, dtype=torch.bfloat16)
    compress(str(tmp_path / "in"), tmp_path / "out", recipe(RTN, layout=layout), lambda what: None)
    before, after = (describe(str(tmp_path / name)) for name in ("in", "out"))
    assert before.mtp is not None and after.mtp is not None
    assert after.mtp.parameters == before.mtp.parameters
    assert LOST not in caplog.text
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    beginning = "mtp." if kind == "qwen3_5" else "model.layers.3."
    own = [name for name in old if name.startswith(beginning)]
    assert own and all(torch.equal(new[name], old[name]) for name in own)
    if layout == "auto":
        ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
        assert any(name.startswith(beginning) for name in ignored)
    options = {"model": str(tmp_path / "out"), "max_model_len": 128, "threads": 1, "speculative_config": DRAFTS}
    with closing(LocalEngine(flat_config(**options))) as engine:
        assert answers(engine, requests_of(99, "")[:4])
        assert engine.engine.stats().draft_tokens > 0


def test_a_folder_of_fewer_layers_is_told_to_lack_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_mtp(tmp_path / "in", "hy_v3", dtype=torch.bfloat16)
    asked = {"kind": "prune", "method": "structured", "score": "magnitude", "layers": 1}
    with caplog.at_level(logging.WARNING):
        compress(str(tmp_path / "in"), tmp_path / "out", recipe(asked), lambda what: None)
    assert f"{LOST}: it is made for the whole model" in caplog.text
    found = describe(str(tmp_path / "out"))
    assert found.spec.layers == 2 and found.mtp is None
