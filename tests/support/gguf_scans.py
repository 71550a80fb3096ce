"""What llama.cpp's converter makes of layers that scan: Granite 4, Falcon-H1, Nemotron-H, Mamba-2, Mamba and Jamba."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel

ARCHITECTURES = {"granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1", "nemotron_h": "nemotron_h",
                 "mamba2": "mamba2", "mamba": "mamba", "falcon_mamba": "mamba", "jamba": "jamba"}  # fmt: skip
ATTENTION = ("attention", "full_attention")
ROLES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.final_layernorm": "output_norm",
    "model.embeddings": "token_embd", "model.norm_f": "output_norm", "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "norm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output", "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down", "feed_forward.router": "ffn_gate_inp",
    "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down", "mixer.gate": "ffn_gate_inp",
    "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
    "block_sparse_moe.router.layer": "ffn_gate_inp", "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}  # fmt: skip
SCAN = {
    "in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out", "x_proj": "ssm_x",
    "dt_proj": "ssm_dt", "dt_layernorm": "ssm_dt_norm", "b_layernorm": "ssm_b_norm", "c_layernorm": "ssm_c_norm",
}  # fmt: skip
EXPERTS = ("block_sparse_moe.experts", "block_sparse_moe.input_linear", "block_sparse_moe.output_linear",
           "mixer.experts", "feed_forward.experts")  # fmt: skip


def views(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters under the format's names, as views in the shapes that the format has."""
    for name, tensor in model.state_dict().items():
        if name.startswith("lm_head") and model.config.tie_word_embeddings:
            continue
        _, dot, rest = name.partition(".layers.")
        if not dot:
            base, _, suffix = name.rpartition(".")
            yield f"{ROLES[base]}.{suffix}", tensor
            continue
        index, _, rest = rest.partition(".")
        for part, view in of_layer(model.config, rest, tensor):
            yield f"blk.{index}.{part}", view


def of_layer(config: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parts of a parameter of a layer."""
    base, _, suffix = name.rpartition(".")
    inner, _, part = name.partition(".")
    if inner in ("mamba", "mixer") and base not in ROLES and not base.startswith("mixer.experts"):
        yield scan_part(config, part, tensor)
    elif base in EXPERTS:
        if "gate_up" in suffix or base.endswith("input_linear"):
            gate, up = tensor.chunk(2, 1)
            yield "ffn_gate_exps.weight", gate
            yield "ffn_up_exps.weight", up
        else:
            yield f"ffn_{'up' if suffix.startswith('up') else 'down'}_exps.weight", tensor
    elif base == "shared_mlp.input_linear":
        end = "_shexp" if config.num_local_experts else ""
        gate, up = tensor.chunk(2)
        yield f"ffn_gate{end}.weight", gate
        yield f"ffn_up{end}.weight", up
    elif base == "shared_mlp.output_linear" and not config.num_local_experts:
        yield "ffn_down.weight", tensor
    elif suffix == "e_score_correction_bias":
        yield "exp_probs_b.bias", tensor
    elif base == "pre_ff_layernorm" and config.model_type == "falcon_h1":
        yield "ffn_norm", tensor
    else:
        yield f"{ROLES[base]}.{suffix}", tensor


def scan_part(config: Any, name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A parameter of a scan; those of heads are columns, and the norm is a row for each group."""
    if name in ("A_log", "D"):
        return {"A_log": "ssm_a", "D": "ssm_d"}[name], tensor if one_channel(config) else tensor[:, None]
    if name == "dt_bias":
        return "ssm_dt.bias", tensor
    base, _, suffix = name.partition(".")
    if base == "conv1d" and suffix == "weight":
        tensor = tensor[:, 0]
    elif base == "norm":
        tensor = tensor.view(groups(config), -1)
    return f"{SCAN[base]}.{suffix}", tensor


def one_channel(config: Any) -> bool:
    """Whether each channel is a head of its own (Mamba)."""
    return config.model_type in ("mamba", "falcon_mamba", "jamba")


def groups(config: Any) -> int:
    """Number of pairs of B and C."""
    return int(getattr(config, "mamba_n_groups", 0) or config.n_groups)


def permuted_heads(config: Any, name: str) -> int:
    """Heads of a matrix whose rows the converter permutes; 0 for any other."""
    if config.model_type != "granitemoehybrid":
        return 0
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    return int(heads.get(name.split(".")[-2], 0))


def factor(config: Any, name: str) -> Tensor:
    """What the converter multiplies a tensor by, a number or one for each row [n, 1]."""
    if config.model_type != "falcon_h1":
        return torch.tensor(1.0)
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part == "ssm_in":
        pairs = groups(config) * config.mamba_d_state
        sizes = torch.tensor([config.mamba_d_ssm, config.mamba_d_ssm, pairs, pairs, config.mamba_n_heads])
        return config.ssm_in_multiplier * torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)[:, None]
    into = config.attention_in_multiplier
    return torch.tensor({
        "attn_q": into, "attn_k": into * config.key_multiplier, "attn_v": into,
        "attn_output": config.attention_out_multiplier, "ssm_out": config.ssm_out_multiplier,
        "ffn_gate": config.mlp_multipliers[0], "ffn_down": config.mlp_multipliers[1],
        "output": config.lm_head_multiplier, "token_embd": config.embedding_multiplier,
    }.get(part, 1.0))  # fmt: skip


def scan_facts(config: Any) -> dict[str, int]:
    """Sizes of a scan of heads, which the families call by names of their own."""

    def first(*names: str) -> int:
        return int(next(value for name in names if (value := getattr(config, name, None)) is not None))

    heads = first("mamba_n_heads", "mamba_num_heads", "num_heads")
    return {
        "ssm.conv_kernel": first("mamba_d_conv", "conv_kernel"),
        "ssm.state_size": first("mamba_d_state", "ssm_state_size", "state_size"),
        "ssm.group_count": groups(config),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * first("mamba_d_head", "mamba_head_dim", "head_dim"),
    }


def granite_facts(config: Any) -> dict[str, Any]:
    """Facts of `granitehybrid`."""
    attends = [kind in ATTENTION for kind in config.layer_types]
    return scan_facts(config) | {
        "feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "expert_used_count": config.num_experts_per_tok if config.num_local_experts else 0,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads * one for one in attends],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.freq_base": 10000.0,
        "rope.scaling.finetuned": False,
        "context_length": 2**20,
        "expert_count": config.num_local_experts,
    }  # fmt: skip


def falcon_facts(config: Any) -> dict[str, Any]:
    """Facts of `falcon-h1`."""
    return scan_facts(config) | {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def nemotron_facts(config: Any) -> dict[str, Any]:
    """Facts of `nemotron_h` and `nemotron_h_moe`."""
    kinds = config.layers_block_type
    width = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
    facts = scan_facts(config) | {
        "context_length": 2**20,
        "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in kinds],
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads * (kind in ATTENTION) for kind in kinds],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": False,
    }
    if "moe" in kinds:
        facts |= {
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
        facts |= {"moe_latent_size": config.moe_latent_size} if config.moe_latent_size else {}
    return facts


def mamba_facts(config: Any) -> dict[str, Any]:
    """Facts of `mamba2` and `mamba`, none of whose layers attend."""
    facts: dict[str, Any] = {
        "context_length": 2**20,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
    }
    if config.model_type == "mamba2":
        return facts | scan_facts(config)
    return facts | {
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.intermediate_size,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": int(config.time_step_rank),
        "ssm.dt_b_c_rms": config.model_type == "falcon_mamba",
    }


def jamba_facts(config: Any) -> dict[str, Any]:
    """Facts of `jamba`."""
    every, first = config.attn_layer_period, config.attn_layer_offset
    attends = [i % every == first for i in range(config.num_hidden_layers)]
    return {
        "context_length": config.max_position_embeddings,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads * one for one in attends],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": int(config.mamba_dt_rank),
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
    }


FACTS = {"granitemoehybrid": granite_facts, "falcon_h1": falcon_facts, "nemotron_h": nemotron_facts,
         "mamba2": mamba_facts, "mamba": mamba_facts, "falcon_mamba": mamba_facts, "jamba": jamba_facts}  # fmt: skip


def architecture(config: Any) -> str:
    """The format's name of the model's kind."""
    experts = config.model_type == "nemotron_h" and "moe" in config.layers_block_type
    return ARCHITECTURES[config.model_type] + "_moe" * experts


def add_facts(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the metadata."""
    common = {"block_count": config.num_hidden_layers, "embedding_length": config.hidden_size}
    for key, value in (common | FACTS[config.model_type](config)).items():
        add: Any = {float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
        add[type(value)](f"{writer.arch}.{key}", value)
