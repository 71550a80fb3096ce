"""A load takes the memory of the packed model and of one layer. Linux only, where a process can be asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory.model_loading import measured, write_zeros
from often import one_of
from quire.ops.native import load_native

pytestmark = [
    pytest.mark.skipif(load_native() is None, reason="quire._native is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 512, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTURE = LLAMA | {"model_type": "mixtral", "num_hidden_layers": 8, "num_local_experts": 8, "intermediate_size": 1024,
                   "num_experts_per_tok": 2}  # fmt: skip
SOURCE = {"llama": 2 * 16 * (4 * 1024 * 1024 + 3 * 1024 * 4096), "mixtral": 2 * 8 * (4 + 3 * 8) * 1024 * 1024}
"""Bytes of the layers' matrices on disk: 512 and 448 MiB."""
PROCESS = 48 << 20
"""Of the process: code that runs for the first time, ropes' tables, threads. 9 to 32 MiB were measured."""


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
