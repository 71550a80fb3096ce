"""Checkpoints as functions of their tensors: transformers' logits, errors, folders written and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from model_variants import ENCODERS, LATENTS, MIXTURES
from oracle import NOT_EAGER, relative_error
from paged_model import VARIANTS
from quire.compress.checkpoint.net import Net
from quire.compress.checkpoint.writer import write_folder
from quire.compress.pipelines.recipe_runner import compress
from quire.compress.recipes.parser import Recipe, recipe_of
from speculation_methods import PYDOC

CALIBRATION = {"samples": 6, "length": 32}


def recipe(*stages: dict[str, object], layout: str = "auto") -> Recipe:
    return recipe_of({"calibration": CALIBRATION, "output": {"layout": layout}, "stage": list(stages)}, "test")


def made(out: Path, *stages: dict[str, object], layout: str = "auto", source: str = PYDOC) -> Path:
    compress(source, out, recipe(*stages, layout=layout), lambda what: None)
    return out


ALL = VARIANTS | MIXTURES | LATENTS
ENCODED = ENCODERS


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 99, shape, generator=torch.Generator().manual_seed(seed))


def oracle_logits(model: PreTrainedModel, tokens: Tensor, encoded: Tensor | None = None) -> Tensor:
    if encoded is not None:
        return model(input_ids=encoded, decoder_input_ids=tokens).logits
    return model(tokens, use_cache=False).logits


def error(got: Tensor, want: Tensor) -> float:
    return relative_error(got.detach(), want.detach())


def read_back(folder: Path, family: str = "llama", code: Any = AutoModelForCausalLM) -> PreTrainedModel:
    found, report = code.from_pretrained(
        folder, attn_implementation=NOT_EAGER.get(family, "eager"), dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    model: PreTrainedModel = found.eval()
    return model


def write_net(out: Path, net: Net, dtype: torch.dtype = torch.float32) -> None:
    write_folder(out, net.tensors, net.config, net.folder, dtype)


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 512, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SOURCE = {"llama": 2 * 16 * (4 * 1024 * 1024 + 3 * 1024 * 4096), "mixtral": 2 * 8 * (4 + 3 * 8) * 1024 * 1024}
"""Bytes of the layers' matrices on disk: 512 and 448 MiB."""
PROCESS = 48 << 20
"""Of the process: code that runs for the first time, ropes' tables, threads. 9 to 32 MiB were measured."""
