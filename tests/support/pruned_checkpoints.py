"""Checkpoints before and after structures are pruned, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_variants import LATENTS, MIXTURES
from oracle import write
from paged_model import VARIANTS as DENSE
from sparse_variants import SPARSE

PRUNED = DENSE | MIXTURES
ATTENTION_OUT = ("self_attn.o_proj", "attn.c_proj", "attention.dense", "self_attn.dense", "attn.out_proj",
                 "self_attn.out_proj", "self_attention.dense", "attn.attention.out_proj", "conv.out_proj",
                 "mamba.out_proj", "mixer.out_proj", "mixer.o_proj", "attn.Wo", "multi_head_attention.dense",
                 "norm_attn_norm.attn.out_proj", "linear_attn.out_proj", "linear_attn.o_proj")  # fmt: skip
HYBRIDS = ("lfm2", "lfm2_moe", "lfm3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear",
           "granitemoehybrid", "bamba", "nemotron_h", "mamba2", "mamba", "falcon_mamba", "jamba", "falcon_h1",
           "zamba2", "olmo_hybrid", "minimax", "bailing_hybrid")  # fmt: skip
"""Families some of whose layers have no heads, and of which none can be dropped."""
UNLIKE = ("laguna", "mimo_v2_flash", "step3p5", "gemma3n_text", "gemma4_text", "gemma4_unified_text")
"""Families whose layers may differ in how many heads they have, or read those of others: none can be dropped."""
INPUT_OUT = ("per_layer_projection",)
"""Matrices that add what is given to each layer of a token."""
MLP_OUT = ("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.fc2", "fc2", "mlp.fc_out", "ffn.down_proj",
           "feed_forward.w2", "feed_forward.down_proj", "shared_mlp.output_linear", "mixer.down_proj",
           "mixer.shared_experts.down_proj", "mlp.Wo", "ffn.2")  # fmt: skip
WITHOUT_MLP = ("nemotron_h", "mamba2", "mamba", "falcon_mamba", "falcon_h1", "zamba2")
"""Families some of whose layers have no MLP, and no channels to drop."""
UNEVEN_MLPS = ("gemma3n", "gemma3n_sparse", "gemma4_shared_keys", "gemma4_small", "gemma4_small_windows",
               "gemma4_experts")  # fmt: skip
"""Variants some of whose layers have wider MLPs than others, experts beside an MLP, or gates that few numbers pass."""


def checkpoint(folder: Path, variant: str, **facts: Any) -> PreTrainedModel:
    family, own = (PRUNED | LATENTS | SPARSE)[variant]
    return write(folder, family, **(own | facts))


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    count = getattr(model.config, "num_layers_per_stack", None) or model.config.num_hidden_layers
    return list(next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count))


def part(layer: nn.Module, names: Sequence[str]) -> nn.Module:
    return layer.get_submodule(next(name for name, _ in layer.named_modules() if name in names))
