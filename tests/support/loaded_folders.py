"""Model folders as they are loaded, and what was packed anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oracle import backend, write
from paged_model import Paged
from quire.core.config import flat_config
from quire.model.build import Model, load_model
from quire.model.load.reader import WeightReader
from quire.ops.backend import open_backend


def load(folder: Path, **options: Any) -> Model:
    return load_model(flat_config(model=str(folder), **options), backend("reference"))


def whole(model: Model, tokens: list[int]) -> torch.Tensor:
    return Paged(model, [tokens]).run([[len(tokens)]])[0]


def load_packed(folder: Path, **options: Any) -> Model:
    """The model, once its packed weights are kept in `folder`/.quire, or in the folder asked for."""
    asked = {"model": str(folder), "cache_packed": str(folder / ".quire"), "quantization": "int4"} | options
    config = flat_config(**asked)
    model = load_model(config, open_backend(config.device))
    if model.writing is not None:
        model.writing.finish(60)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "llama", attention_bias=True)
    return tmp_path


def made_anew(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The matrices that the loader packs from now on."""
    made: list[object] = []
    make = WeightReader.matrix

    def counted(self: WeightReader, *which: Any) -> Any:
        made.append(which)
        return make(self, *which)

    monkeypatch.setattr(WeightReader, "matrix", counted)
    return made


KEPT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": ("mixtral", {"num_local_experts": 4}, {}),
    "experts_with_biases": ("gpt_oss", {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}, {}),
    "latents": ("deepseek_v3", {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                                "q_lora_rank": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
                                "topk_group": 1, "moe_intermediate_size": 32, "num_key_value_heads": 4,
                                "first_k_dense_replace": 1}, {}),
    "tables": ("llama", {}, {"quantization": "nf4", "group_size": 32}),
    "wide_activations": ("llama", {}, {"activations": "int16"}),
}  # fmt: skip
