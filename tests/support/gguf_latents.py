"""What llama.cpp's converter makes of models with latent attention: DeepSeek V2 and V3, and Kimi Linear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
from torch import Tensor
from transformers import PreTrainedModel

ARCHITECTURES = {"deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "kimi_linear": "kimi-linear"}
OLDER = False
"""Whether files are as those of early 2025 and before: one matrix makes keys and values, and no key says more."""
SOFTMAX, SIGMOID = 1, 2
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ROLES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "self_attn.b_proj": "ssm_beta", "self_attn.o_norm": "ssm_norm",
    "self_attn.forget_gate.f_a_proj": "ssm_f_a", "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.g_a_proj": "ssm_g_a", "self_attn.g_b_proj": "ssm_g_b", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip


def views(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters under the format's names, as views in the shapes that the format has."""
    for name, tensor in model.state_dict().items():
        base, _, suffix = name.rpartition(".")
        if base in OUTER:
            yield f"{OUTER[base]}.{suffix}", tensor
            continue
        index, _, rest = name.removeprefix("model.layers.").partition(".")
        for part, view in of_layer(model.config, rest, tensor):
            yield f"blk.{index}.{part}", view


def of_layer(config: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parts of a parameter of a layer."""
    base, _, suffix = name.rpartition(".")
    if base == "self_attn.kv_b_proj" and not OLDER:
        heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
        yield "attn_k_b.weight", heads[:, : config.qk_nope_head_dim].transpose(1, 2)
        yield "attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
    elif name == "self_attn.conv1d.weight":
        for part, taps in zip("qkv", tensor.chunk(3), strict=True):
            yield f"ssm_conv1d_{part}.weight", taps.view(1, len(taps), 1, -1)
    elif name == "mlp.experts.gate_up_proj":
        gate, up = tensor.chunk(2, 1)
        yield "ffn_gate_exps.weight", gate
        yield "ffn_up_exps.weight", up
    elif name == "mlp.experts.down_proj":
        yield "ffn_down_exps.weight", tensor
    elif suffix == "e_score_correction_bias":
        yield "exp_probs_b.bias", tensor
    elif suffix == "A_log":
        yield "ssm_a", tensor
    elif suffix == "dt_bias":
        yield "ssm_dt.bias", tensor
    else:
        yield f"{ROLES[base]}.{suffix}", tensor


def add_facts(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the metadata."""
    kimi = config.model_type == "kimi_linear"
    head = config.qk_nope_head_dim + config.qk_rope_head_dim
    facts: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
        "vocab_size": config.vocab_size,
        "expert_used_count": config.num_experts_per_token if kimi else config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": float(config.routed_scaling_factor),
    }
    if OLDER:
        facts |= {"attention.head_count_kv": config.num_attention_heads, "attention.key_length": head,
                  "attention.value_length": config.v_head_dim}  # fmt: skip
    else:
        facts |= {"attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
                  "attention.key_length_mla": head, "attention.value_length_mla": config.v_head_dim}  # fmt: skip
        facts |= {} if kimi else {"attention.head_count_kv": 1, "attention.value_length": config.kv_lora_rank}
    if config.q_lora_rank is not None:
        facts["attention.q_lora_rank"] = config.q_lora_rank
    for key, value in (facts | (kimi_facts(config) if kimi else deepseek_facts(config))).items():
        add: Any = {float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array,
                    str: writer.add_string}  # fmt: skip
        add[type(value)](f"{writer.arch}.{key}", value)


def deepseek_facts(config: Any) -> dict[str, Any]:
    """Facts of `deepseek2`."""
    third, rope = config.model_type == "deepseek_v3", config.rope_parameters
    facts: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    groups = {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    facts |= groups if config.n_group else {}
    facts |= {"expert_weights_norm": True} if third and config.norm_topk_prob else {}
    facts |= {} if OLDER and not third else {"expert_gating_func": SIGMOID if third else SOFTMAX}
    if rope["rope_type"] == "yarn":
        facts |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return facts


def kimi_facts(config: Any) -> dict[str, Any]:
    """Facts of `kimi-linear`."""
    return {
        "context_length": config.max_position_embeddings,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "expert_count": config.num_experts,
        "expert_shared_count": config.num_shared_experts,
        "expert_gating_func": SIGMOID,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
    }
