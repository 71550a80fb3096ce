"""Tiny GGUF files as llama.cpp's converter would write them from transformers' models, made with the gguf package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor
from transformers import PreTrainedModel

import gguf_delta
import gguf_latents
import gguf_scans
from oracle import random_model

HF_ROLES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.final_layernorm": "output_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.dense": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "self_attn": "attn_sinks", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "model.embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
GPT_OSS_ROLES = HF_ROLES | {"post_attention_layernorm": "post_attention_norm"}
GEMMA_ROLES = HF_ROLES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
MUSE_ROLES = GEMMA_ROLES | {"self_attn.gate_proj": "attn_gate"}
KEYS = {
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon", "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "num_local_experts": "expert_count", "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count", "first_k_dense_replace": "leading_dense_block_count",
    "n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
    "output_multiplier": "logit_scale",
}  # fmt: skip
ARCHITECTURES = {"phi": "phi2", "gemma3_text": "gemma3", "mistral": "llama", "mixtral": "llama",
                 "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "lfm2_moe": "lfm2moe", "glm4_moe": "glm4moe",
                 "gpt_oss": "gpt-oss", "muse_glimmer_text": "muse-glimmer", **gguf_delta.ARCHITECTURES,
                 **gguf_scans.ARCHITECTURES, **gguf_latents.ARCHITECTURES}  # fmt: skip
YARN = {"rope_type": "rope.scaling.type", "factor": "rope.scaling.factor",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}  # fmt: skip
DELTA = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.conv1d.weight", "linear_attn.in_proj_qkvz.weight")
SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head with its halves interleaved, as the converter writes them for its own kind of rope."""
    n = weight.shape[0] // heads
    return weight.view(heads, 2, n // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def permutes(model: PreTrainedModel, name: str) -> int:
    """Heads of a matrix whose rows the converter permutes; 0 for any other."""
    config = model.config
    if config.model_type in gguf_scans.ARCHITECTURES:
        return gguf_scans.permuted_heads(config, name)
    if config.model_type not in ("llama", "mistral", "mixtral", "muse_glimmer_text"):
        return 0
    return int({"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2], 0))


def shift(model: PreTrainedModel, name: str) -> float:
    """What the converter adds to a tensor."""
    kind = model.config.model_type
    own = kind in gguf_delta.ARCHITECTURES and not name.endswith("ssm_norm.weight")
    own |= kind.startswith("muse") and name.startswith("blk.")
    return float((kind.startswith("gemma") or own) and name.endswith("norm.weight"))


def factor(model: PreTrainedModel, name: str) -> Tensor:
    """What the converter multiplies a tensor by, a number or one for each row [n, 1]."""
    scans = model.config.model_type in gguf_scans.ARCHITECTURES
    return gguf_scans.factor(model.config, name) if scans else torch.tensor(1.0)


def delta_order(model: PreTrainedModel, name: str) -> tuple[int, Tensor] | None:
    """Axis of a tensor of the gated delta rule that the converter puts in another order, and this order."""
    return gguf_delta.order(model.config, name) if model.config.model_type in gguf_delta.ARCHITECTURES else None


def views(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters under the format's names, as views in the shapes that the format has."""
    config, kind = model.config, model.config.model_type
    if kind in gguf_scans.ARCHITECTURES:
        yield from gguf_scans.views(model)
        return
    if kind in gguf_latents.ARCHITECTURES:
        yield from gguf_latents.views(model)
        return
    gemma = kind in ("gemma2", "gemma3_text")
    after = kind in ("gpt_oss", "glm4_moe") or kind in gguf_delta.ARCHITECTURES
    roles = MUSE_ROLES if kind.startswith("muse") else GEMMA_ROLES if gemma else GPT_OSS_ROLES if after else HF_ROLES
    for name, tensor in model.state_dict().items():
        base, _, suffix = name.rpartition(".")
        if base == "lm_head" and config.tie_word_embeddings:
            continue
        if not base.startswith("model.layers."):
            yield f"{roles[base]}.{suffix}", tensor
            continue
        index, _, rest = base.removeprefix("model.layers.").partition(".")
        if suffix in ("expert_bias", "e_score_correction_bias"):
            yield f"blk.{index}.exp_probs_b.bias", tensor
        elif rest == "conv.conv" and suffix == "weight":
            yield f"blk.{index}.shortconv.conv.weight", tensor[:, 0]
        elif f"{rest}.{suffix}" in DELTA:
            for part, view in gguf_delta.views(f"{rest}.{suffix}".removeprefix("linear_attn."), tensor):
                yield f"blk.{index}.{part}", view
        elif rest.endswith(".experts"):
            for part, view in expert_views(suffix, tensor, kind == "gpt_oss"):
                yield f"blk.{index}.{part}", view
        else:
            yield f"blk.{index}.{roles[rest]}.{suffix.replace('sinks', 'weight')}", tensor


def expert_views(name: str, tensor: Tensor, alternating: bool) -> Iterator[tuple[str, Tensor]]:
    """The parts of a tensor of all experts; `alternating`: matrices lie transposed, gate and up row by row in turn."""
    suffix = "bias" if name.endswith("_bias") else "weight"
    rows = tensor.transpose(1, 2) if alternating and suffix == "weight" else tensor
    if name.startswith("down"):
        yield f"ffn_down_exps.{suffix}", rows
    else:
        half = rows.shape[1] // 2
        yield f"ffn_gate_exps.{suffix}", rows[:, ::2] if alternating else rows[:, :half]
        yield f"ffn_up_exps.{suffix}", rows[:, 1::2] if alternating else rows[:, half:]


def as_gguf(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's tensors under the format's names, changed as the converter changes them."""
    out = {}
    for name, view in views(model):
        heads, moved = permutes(model, name), delta_order(model, name)
        tensor = permuted(view, heads) if heads else view + shift(model, name)
        tensor = tensor * factor(model, name)
        tensor = tensor if moved is None else tensor.index_select(*moved)
        tensor = -tensor.exp() if name.endswith("ssm_a") else tensor
        out[name] = tensor.detach().contiguous()
    return out


def vocabulary(count: int) -> tuple[list[str], list[float], list[int]]:
    """A SentencePiece vocabulary of `count` tokens: special ones, bytes as far as they fit, then pieces."""
    pieces = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581t", "he", "\u2581the", "in", "er", "\u2581a", "on"]
    tokens = SPECIAL + pieces
    types = [2, 3, 3] + [1] * len(pieces)
    scores = [0.0, 0.0, 0.0] + [-float(i) for i in range(len(pieces))]
    for i in range(count - len(tokens)):
        tokens.append(f"<0x{i:02X}>" if i < 256 else f"[PAD{i}]")
        types.append(6 if i < 256 else 5)
        scores.append(0.0)
    return tokens[:count], scores[:count], types[:count]


def add_vocabulary(writer: gguf.GGUFWriter, count: int) -> None:
    """Write that vocabulary, its special tokens and a chat template."""
    tokens, scores, types = vocabulary(count)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType, seed: int, spread: float = 0.05) -> Any:
    """Random blocks of a type [..., bytes of a row] whose numbers are about normal with deviation `spread`."""
    rng = np.random.default_rng(seed)
    numbers, nbytes = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // numbers, nbytes), dtype=np.uint8)
    halves: Mapping[str, tuple[tuple[int, float], ...]] = {
        "Q4_0": ((0, 1 / 4.6),), "Q4_1": ((0, 1 / 4.6), (2, -1.6)), "Q5_0": ((0, 1 / 9),),
        "Q5_1": ((0, 1 / 9), (2, -1.7)), "Q8_0": ((0, 1 / 74),), "Q2_K": ((80, 1 / 10), (82, 1 / 7)),
        "Q3_K": ((108, 1 / 42),), "Q4_K": ((0, 1 / 300), (2, 1 / 40)), "Q5_K": ((0, 1 / 600), (2, 1 / 40)),
        "Q6_K": ((208, 1 / 1370),), "IQ4_NL": ((0, 1 / 66),), "IQ4_XS": ((0, 1 / 1250),), "MXFP4": (),
        "IQ1_S": ((0, 1 / 7),), "IQ1_M": (), "IQ2_XXS": ((0, 1 / 55),), "IQ2_XS": ((0, 1 / 55),),
        "IQ2_S": ((0, 1 / 55),), "IQ3_XXS": ((0, 1 / 150),), "IQ3_S": ((0, 1 / 150),),
        "TQ1_0": ((52, 1.2),), "TQ2_0": ((64, 1.2),), "NVFP4": (),
    }  # fmt: skip
    for at, scale in halves[kind.name]:
        value = spread * scale * rng.uniform(0.8, 1.2, (*raw.shape[:-1], 1))
        raw[..., at : at + 2] = value.astype(np.float16).view(np.uint8)
    if kind.name == "NVFP4":
        raw[..., :4] = rng.integers(20, 28, (*raw.shape[:-1], 4))
    if kind.name == "MXFP4":
        raw[..., 0] = rng.integers(119, 122, raw.shape[:-1])
    if kind.name == "IQ1_M":  # its float16 lies in the highest nibbles of the last four words
        unit = (spread / 7 * rng.uniform(0.8, 1.2, raw.shape[:-1])).astype(np.float16).view(np.uint16).astype(np.int64)
        nibbles = unit[..., None] >> np.array([0, 4, 8, 12]) & 15
        raw[..., 49::2] = raw[..., 49::2] & 15 | (nibbles << 4).astype(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def add_facts(writer: gguf.GGUFWriter, config: Any) -> dict[str, Any]:
    """Write the metadata of a model; returns further keys and values."""
    kind = config.model_type
    if kind in gguf_scans.ARCHITECTURES:
        gguf_scans.add_facts(writer, config)
        return {}
    if kind in gguf_latents.ARCHITECTURES:
        gguf_latents.add_facts(writer, config)
        return {}
    arch = writer.arch
    for name, key in KEYS.items():
        value = config.to_dict().get(name)
        if name == "num_key_value_heads" and kind.startswith("lfm2"):
            writer.add_head_count_kv([value if kind == "full_attention" else 0 for kind in config.layer_types])
            continue
        if value is not None and not (name == "sliding_window" and kind.startswith("qwen")):
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{arch}.{key}", value)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_uint32(f"{arch}.attention.key_length", head_dim)
    writer.add_uint32(f"{arch}.attention.value_length", head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind in gguf_delta.ARCHITECTURES:
        gguf_delta.add_facts(writer, config)
    return {key: rope[name] for name, key in YARN.items()} if rope["rope_type"] == "yarn" else {}


def write_gguf(
    path: Path,
    model_type: str = "llama",
    quantize: Callable[[str], GGMLQuantizationType | None] = lambda name: None,
    edit: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    extra: Mapping[str, Any] | None = None,
    **facts: Any,
) -> PreTrainedModel:
    """Write such a file; returns the float32 model whose numbers the file holds, quantized matrices included."""
    model = random_model(model_type, **facts)
    config = model.config
    scans = model_type in gguf_scans.ARCHITECTURES
    arch = gguf_scans.architecture(config) if scans else ARCHITECTURES.get(model_type, model_type)
    writer = gguf.GGUFWriter(path, arch)
    extra = add_facts(writer, config) | dict(extra or {})
    for key, value in extra.items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"{arch}.{key}", value)
    add_vocabulary(writer, config.vocab_size)
    with torch.no_grad():
        for seed, (name, tensor) in enumerate(as_gguf(model).items()):
            whole = any(part in name for part in ("ffn_gate_inp", "shortconv.conv", "ssm_conv1d", "ssm_norm"))
            whole |= "attn_k_b" in name and tensor.shape[-1] % 32 > 0  # its rows are short
            matrix = tensor.dim() > 1 and name.endswith(".weight") and not whole
            kind = quantize(name) if matrix else None
            if kind is None:
                writer.add_tensor(name, tensor.numpy())
            elif kind.name in ("F16", "BF16"):
                writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, random_blocks(tuple(tensor.shape), kind, seed), raw_dtype=kind)
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    put_back(model, path)
    return model


def put_back(model: PreTrainedModel, path: Path) -> None:
    """Give `model` the file's numbers, as the gguf package reads them."""
    ours = {
        t.name: torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type), dtype=np.float32))
        for t in gguf.GGUFReader(path).tensors
    }
    with torch.no_grad():
        for name, view in views(model):
            tensor = ours.get(name)
            if tensor is not None and (heads := permutes(model, name)):
                back = torch.empty_like(tensor)
                back[permuted(torch.arange(len(tensor)), heads)] = tensor
                tensor = back
            if tensor is not None and (moved := delta_order(model, name)) is not None:
                tensor = view.index_copy(*moved, tensor)
            if tensor is not None and not name.endswith("ssm_a"):
                tensor = (tensor - shift(model, name)).view(view.shape)
                view.copy_(tensor / factor(model, name))
