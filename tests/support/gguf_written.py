"""Tiny models by the architecture that they are written as in GGUF files, and what such files may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from family_tensors import RELATIVES, grouped_qkv, packed_qkv, rewrite, write_relative
from gemma_variants import GEMMAS
from gguf_families import FALCON, GLM, GRANITE, KIMI, LATENTS, MULTIPLIED
from gguf_newer import DEEP, NEWER
from gguf_writing import SHAPE, VOCAB, add_tokenizer, byte_level
from model_variants import SMALL_ENCODER
from oracle import edit_config, write
from quire.gguf.file import GgufFile

MULTIPLIERS = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
               "attention_multiplier": 0.3}  # fmt: skip
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
          "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}  # fmt: skip
ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
         "moe_layer_start_index": 1, "tie_word_embeddings": False}  # fmt: skip
EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 5, "num_hidden_layers": 4}
HEADS = {"head_dim": 16}
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", MULTIPLIERS),
    "command-r": ("cohere", {}),
    "command-r norms": ("cohere", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": ("cohere2", WINDOW),
    "glm4": ("glm4", HEADS),
    "glm4 without biases": ("glm4", HEADS | {"attention_bias": False}),
    "chatglm": ("glm", HEADS),
    "olmo": ("olmo", {}),
    "olmo clipped": ("olmo", {"clip_qkv": 0.4}),
    "olmo2": ("olmo2", {}),
    "olmo2 third": ("olmo3", WINDOW),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "starcoder2 plain": ("starcoder2", {"use_bias": False}),
    "starcoder": ("gpt_bigcode", {}),
    "exaone4": ("exaone4", WINDOW),
    "exaone4 whole": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ernie4_5": ("ernie4_5", HEADS),
    "ernie4_5 biases": ("ernie4_5", HEADS | {"use_bias": True, "tie_word_embeddings": False}),
    "falcon": ("falcon", {"alibi": False}),
    "falcon biases": ("falcon", {"bias": True}),
    "falcon two norms": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon one norm": ("falcon", {
        "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "gpt2": ("gpt2", {}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "gptneox": ("gpt_neox", {}),
    "gptneox sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "bloom": ("bloom", {"hidden_size": 96, "num_attention_heads": 6}),
    "mpt": ("mpt", {}),
    "mpt clipped": ("mpt", {"attn_config": {"clip_qkv": 0.4}}),
    "stablelm": ("stablelm", {"use_parallel_residual": False, "use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "nemotron": ("nemotron", {}),
    "internlm2": ("internlm2", {}),
    "baichuan": ("baichuan", {}),
    "baichuan second": ("baichuan", {"z_loss_weight": 0}),
    "seed_oss": ("seed_oss", {"head_dim": 24}),
    "seed_oss biases": ("seed_oss", {"attention_bias": False, "attention_out_bias": False, "mlp_bias": True}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "llama": ("internlm3", HEADS),
    "llama helium": ("helium", HEADS),
    "llama ministral": ("ministral", HEADS | {"sliding_window": 5}),
    "glm4moe": ("glm4_moe", GLM | {"n_group": 4, "topk_group": 2, "attention_bias": True}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "dots1": ("dots1", ROUTED | {"head_dim": 24, "norm_topk_prob": True, "num_key_value_heads": 4}),
    "ernie4_5-moe": ("ernie4_5_moe", ERNIE),
    "ernie4_5-moe every second": ("ernie4_5_moe", ERNIE | {"moe_layer_interval": 2, "moe_num_shared_experts": 0}),
    "phimoe": ("phimoe", EIGHT | {"lm_head_bias": True, "attention_bias": True}),
    "deepseek2": ("deepseek_v2", LATENTS | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek2 groups": ("deepseek_v2", LATENTS | {
        "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
    "deepseek2 third": ("deepseek_v3", LATENTS | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}),
    "deepseek2 yarn": ("deepseek_v3", LATENTS | {
        "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "kimi-linear": ("kimi_linear", KIMI),
    "falcon-h1": ("falcon_h1", FALCON | MULTIPLIED),
    "falcon-h1 tied": ("falcon_h1", FALCON | MULTIPLIED | {"tie_word_embeddings": True, "mamba_rms_norm": True}),
    "t5": ("t5", SMALL_ENCODER),
    "t5 gated": ("t5", SMALL_ENCODER | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
                                        "num_decoder_layers": 2}),
    "granitehybrid": ("granitemoehybrid", GRANITE | {
        "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 48}),
}  # fmt: skip
OF_GGUF = {"vocab_size_per_layer_input": VOCAB, "laurel_rank": 64}
"""What the format has no key for, where tiny Gemmas have another number: rows of a table, the size of a space."""
WRITTEN |= NEWER
WRITTEN |= {
    name.replace("_", " ", 1): (kind, facts | {fact: value for fact, value in OF_GGUF.items() if fact in facts})
    for name, (kind, facts) in GEMMAS.items()
}
"""What a name begins with is the architecture."""
CHANGED = {"deepseek": {"norm_topk_prob": False}}
"""Fields of config.json that make another model of what transformers computes, which alone the format can hold."""
RENAMED = {"internlm2": grouped_qkv, "baichuan": packed_qkv}
"""Families that transformers has no code for: how Llama's tensors become theirs."""
PERMUTED = (
    "muse-glimmer",
    "xverse",
    "mistral3",
    "granitemoe",
    "granite_swa",
    "minicpm",
    "deepseek",
    "bailingmoe",
    "granite",
    "olmo",
    "smollm3",
    "arcee",
    "llama",
    "granitehybrid",
    "internlm2",
    "baichuan",
)
"""Architectures whose rows of queries and keys the converter interleaves."""
MULTIPLIED_IN = ("falcon-h1", "dots3note")
"""Architectures whose matrices or norms have other numbers than those of folders."""
LATER = (
    "dots3note",
    "glm5-next",
    "deepseek4",
    "muse-glimmer",
    "hy_v4",
    "hrm_text",
    "qwen4exp",
    "minimax-01",
    "bailingmoe3",
    "laguna",
    "minimax-m3",
    "granite_swa",
    "hy_v3",
    "mellum",
    "cohere2moe",
    "deepseek32",
)
LATER_KEYS = ("attention.value_scale", "attention.indexer.types", "attention.rope_pattern")
"""Architectures and keys that llama.cpp's sources have, and the gguf package of the development extra has not yet."""
LATER_NAMES = {"gemma4": {"blk.{bid}.ffn_gate_exps", "blk.{bid}.ffn_up_exps"}}
"""Names of tensors of an architecture, likewise."""
NOT_OF_THE_MAP = (".attn_qkv.", ".attn_kv_b.", ".ffn_gate_up_exps")
"""In names that the format has for matrices which its files have in parts."""


def write_folder(folder: Path, name: str) -> PreTrainedModel:
    """Write the model `name` of `WRITTEN` or `DEEP` with a tokenizer; returns what it computes as."""
    kind, facts = (WRITTEN | DEEP)[name]
    if kind in RELATIVES and kind not in RENAMED:
        model = write_relative(folder, kind, **{"vocab_size": VOCAB} | facts)
    elif kind in RENAMED:
        heads = 4 if kind == "baichuan" else 2
        layers = {fact: value for fact, value in facts.items() if fact == "num_hidden_layers"}
        model = write(folder, "llama", **SHAPE | {"num_key_value_heads": heads} | layers)
        rewrite(folder, RENAMED[kind])
        edit_config(folder, model_type=kind, architectures=None, **facts)
    else:
        model = write(folder, kind, **SHAPE | facts)
    if kind == "bitnet":
        with_two_values(model, folder)
    edit_config(folder, **CHANGED.get(name, {}))
    add_tokenizer(folder, byte_level())
    return model


def with_two_values(model: PreTrainedModel, folder: Path) -> None:
    """Give the matrices of layers two values, as they are rounded to in released files, and save the model."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("proj.weight"):
                p.copy_(torch.where(p < 0, -1 / 16, 1 / 16))
    model.save_pretrained(folder)


def strings(of: type) -> Iterator[str]:
    """All texts of a class and of those in it."""
    for value in vars(of).values():
        if isinstance(value, type):
            yield from strings(value)
        elif isinstance(value, str):
            yield value


def known_keys(arch: str) -> set[str]:
    """Keys that the format has."""
    return {text.replace("{arch}", arch) for text in strings(gguf.Keys)} | {f"{arch}.{key}" for key in LATER_KEYS}


def kind_of(arch: str) -> gguf.MODEL_ARCH | None:
    """What the gguf package has of an architecture, None for those of `LATER`."""
    found = next((kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), None)
    assert (found is None) == (arch in LATER), arch
    return found


def unknown(file: GgufFile, arch: str) -> set[str]:
    """Names and keys of the file that the gguf package does not know."""
    kind = kind_of(arch)
    if kind is None:
        return set()
    names = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kind]} | LATER_NAMES.get(arch, set())
    found = set()
    for name in file.tensors:
        base = re.sub(r"\.(weight|bias|scale)$", "", re.sub(r"^((?:enc\.|dec\.)?blk)\.\d+\.", r"\1.{bid}.", name))
        found |= {name} if base not in names else set()
    return found | {key for key in file.metadata if key.startswith(f"{arch}.")} - known_keys(arch)


def missing(file: GgufFile, arch: str, folder: Path) -> set[str]:
    """Names that the gguf package gives tensors of the folder, and the file lacks."""
    kind = kind_of(arch)
    if kind is None:
        return set()
    names = gguf.get_tensor_name_map(kind, file.metadata[f"{arch}.block_count"])
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        wanted = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in tensors.keys()}  # noqa: SIM118
    held = {name.replace("exp_probs_b.bias", "exp_probs_b") for name in file.tensors}
    held |= {name.removesuffix(".weight") for name in held}  # stacked in the folder, without a suffix
    return {n for n in wanted - held - {None} if not any(part in n for part in NOT_OF_THE_MAP)}
