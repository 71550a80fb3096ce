"""A load takes the memory of the packed model and of one layer. Linux only, where a process can be asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.memory import measured, write_zeros
from net_checks import LLAMA, PROCESS, SOURCE
from often import one_of
from quire.ops.native import load_native

pytestmark = [
    pytest.mark.skipif(load_native() is None, reason="quire._native is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]
MIXTURE = LLAMA | {"model_type": "mixtral", "num_hidden_layers": 8, "num_local_experts": 8, "intermediate_size": 1024,
                   "num_experts_per_tok": 2}  # fmt: skip


@pytest.mark.parametrize("config", one_of(2, [LLAMA, MIXTURE]), ids=lambda c: c["model_type"])
@pytest.mark.parametrize("quantization", ["int4", pytest.param("none", marks=pytest.mark.slow)])
def test_a_load_takes_the_packed_model_and_a_layer(config: dict[str, Any], quantization: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_zeros(tmp_path)
    found = measured(tmp_path, quantization)
    source = SOURCE[config["model_type"]]
    layer = source / config["num_hidden_layers"]
    assert found["packed"] >= source / (4 if quantization == "int4" else 1)
    beside = found["peak"] - found["packed"]
    assert beside <= layer + PROCESS, f"{beside / 2**20:.0f} MiB beside the packed model"
