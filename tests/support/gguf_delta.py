"""What llama.cpp's converter makes of layers with the gated delta rule (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedConfig

ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}


def views(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter of `linear_attn` under the format's names; two of them may be of one."""
    if name == "A_log":
        yield "ssm_a", tensor
    elif name == "dt_bias":
        yield "ssm_dt.bias", tensor
    elif name == "conv1d.weight":
        yield "ssm_conv1d.weight", tensor[:, 0]
    else:
        yield "attn_qkv.weight", tensor
        yield "attn_gate.weight", tensor


def value_heads_by_turns(config: PreTrainedConfig, each: int) -> Tensor:
    """The numbers of the first value head of each key head, then those of the second ones ..., as the file has them."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return torch.arange(values * each).reshape(keys, values // keys, each).permute(1, 0, 2).reshape(-1)


def order(config: PreTrainedConfig, name: str) -> tuple[int, Tensor] | None:
    """Axis of the tensor `name` whose entries are put in another order, and this order; None for any other."""
    part = name.split(".", 2)[-1].removesuffix(".weight")
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    keys = config.linear_num_key_heads * key_dim
    if config.model_type == "qwen3_next":
        if part not in ("attn_qkv", "attn_gate") or ".attn_q." in name:
            return None
        sizes = [key_dim, key_dim, *[config.linear_num_value_heads // config.linear_num_key_heads * value_dim] * 2]
        rows = torch.arange(config.linear_num_key_heads * sum(sizes)).view(config.linear_num_key_heads, -1)
        q, k, v, z = (piece.reshape(-1) for piece in rows.split(sizes, 1))
        return 0, torch.cat((q, k, v)) if part == "attn_qkv" else z
    values = value_heads_by_turns(config, value_dim)
    if part in ("attn_qkv", "ssm_conv1d"):
        return 0, torch.cat((torch.arange(2 * keys), 2 * keys + values))
    if part in ("attn_gate", "ssm_out"):
        return (0 if part == "attn_gate" else 1), values
    return (0, value_heads_by_turns(config, 1)) if part in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt.bias") else None


def add_facts(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the number of all values, which layers are recurrent, and what else the converter writes of such a model.

    Those of a period are told by that, as the converter does, others by a list, which llama.cpp reads, too.
    """
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    every = recurrent.index(False) + 1
    if recurrent == [bool((i + 1) % every) for i in range(len(recurrent))]:
        writer.add_full_attention_interval(every)
    else:
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
