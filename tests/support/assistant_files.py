"""GGUF files of assistants, written from a folder of transformers as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from gguf_models import add_vocabulary

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale",
}
OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection",
}
ARCHITECTURE = "gemma4-assistant"


def write_assistant_file(folder: Path, out: Path) -> None:
    """The file of the assistant in `folder`, all of its tensors in F32; clusters of tokens are left out."""
    whole = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, ARCHITECTURE)
    writer.add_name("tiny")
    _metadata(whole, writer)
    add_vocabulary(writer, whole["text_config"]["vocab_size"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith(("masked_embedding.", "lm_head.")):
            continue
        writer.add_tensor(_called(name), tensor.float().numpy())
    writer.add_tensor("rope_freqs.weight", _factors(whole["text_config"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _called(name: str) -> str:
    base = name.removesuffix(".weight")
    if base in OUTER:
        return f"{OUTER[base]}.weight"
    layer, _, part = base.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER[part]}.weight"


def _metadata(whole: dict[str, Any], writer: gguf.GGUFWriter) -> None:
    text = whole["text_config"]
    windowed = [kind == "sliding_attention" for kind in text["layer_types"]]
    ropes, size, wide = text["rope_parameters"], text["head_dim"], _whole(text, "global_head_dim", "head_dim")
    local = text["num_key_value_heads"]
    full = _whole(text, "num_global_key_value_heads", "num_key_value_heads")
    writer.add_block_count(len(windowed))
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_embedding_length_out(whole["backbone_hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv([local if seen else full for seen in windowed])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(text["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(len(windowed))
    writer.add_embedding_length_per_layer_input(0)
    writer.add_nextn_predict_layers(len(windowed))
    writer.add_vocab_size(text["vocab_size"])
    for add, numbers in (
        (writer.add_key_length, wide), (writer.add_value_length, wide), (writer.add_rope_dimension_count, wide),
        (writer.add_key_length_swa, size), (writer.add_value_length_swa, size),
        (writer.add_rope_dimension_count_swa, size),
    ):  # fmt: skip
        add(numbers)


def _whole(text: dict[str, Any], name: str, own: str) -> int:
    """A size of layers that see everything, which newer files have layer by layer."""
    layer = str(text["layer_types"].index("full_attention"))
    each = (text.get("per_layer_config") or {}).get(layer, {})
    return int(text.get(name) or each.get(own) or text[own])


def _factors(text: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Factors of the rope of layers that see everything: pairs that do not turn have a large one."""
    size = _whole(text, "global_head_dim", "head_dim")
    turned = int(size * text["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    return np.array([1.0] * turned + [1e30] * (size // 2 - turned), np.float32)
