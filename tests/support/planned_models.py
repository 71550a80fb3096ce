"""Configurations and rates of models that plans are made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.ops.native import load_native
from quire.plan.rates import AttentionRates, Calibration, KindRates, RecurrenceRates

native = pytest.mark.skipif(load_native() is None, reason="quire._native was not built")
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float16", "vocab_size": 32000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_7B = LLAMA | {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 11008,
}  # fmt: skip
SMALL = LLAMA | {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 512, "head_dim": 32,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def written(folder: Path, config: dict[str, Any]) -> str:
    """A folder with a config and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def rates(seconds: float = 1e-10) -> Calibration:
    """A machine whose every number takes `seconds` a row beyond the eighth, and as long up to there."""
    each = [seconds * max(8, rows) for rows in (1, 8, 512)]
    kind = KindRates([1, 8, 512], each, each, each, each)
    return Calibration(
        machine="made up", read_bytes_per_s=1e10, call=0.0, kinds={"bf16": kind, "int8 g32": kind},
        attention={"bfloat16": AttentionRates(0.0, 1e-10, 0.0, 0.0, 0.0, 1e-12, 0.0)},
        recurrence=RecurrenceRates(0.0, 1e-9, 1e-10), norms={1: 0.0}, ropes={1: 0.0},
        sample=0.0, host=(1e-3, 0.0, 0.0, 1e-5), process=1 << 20,
    )  # fmt: skip
