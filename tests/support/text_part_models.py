"""Tiny models that take more than text, by transformers: their decoders have the sizes of other tests, the other parts
are as small as they can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM, PreTrainedModel

from attention_variants import GATED
from chunked_models import LLAMA4
from oracle import SMALL, is_norm
from paged_model import NEMOTRON
from quire.model.families.text_parts import text_part
from sparse_variants import SPARSE, WHOLE

TEXT = SMALL | {"vocab_size": 320}
LAST = TEXT["vocab_size"] - 1
TOWER = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 32, "image_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 32, "num_heads": 2,
    "out_hidden_size": 64, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "num_layers": 1, "encoder_hidden_size": 32, "deepstack_visual_indexes": [0], "output_dim": 64, "n_window": 4,
    "hidden_dim": 32, "adapter_in_dim": 32, "adapter_out_dim": 64, "adapter_input_size": 32,
    "downsample_hidden_size": 16,
}  # fmt: skip
"""What fields of other parts become."""


def rope(*sections: int, **more: Any) -> dict[str, Any]:
    """A plain rope whose positions of images are of three kinds."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)} | more}


HALF = {"partial_rotary_factor": 0.5}
ROUTED = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
MORE: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "cohere2": {"sliding_window": 5, "num_hidden_layers": 4},
    "granite": {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                "attention_multiplier": 0.3},
    "glm4v_text": {"head_dim": 16} | rope(2, 1, 1, **HALF),
    "glm4v_moe_text": {"head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
                      | ROUTED | rope(2, 1, 1, **HALF),
    "qwen2_5_omni_text": rope(2, 3, 3),
    "qwen3_omni_moe_text": {"head_dim": 16, "num_experts": 6} | ROUTED | rope(4, 2, 2),
    "llama4_text": LLAMA4 | {"no_rope_layers": [1, 0, 1]},
    "mllama_text_model": {"num_hidden_layers": 4, "cross_attention_layers": [1],
                          "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "ernie4_5_vl_moe_text": {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": [40, 32],
                             "moe_num_shared_experts": 2, "tie_word_embeddings": False,
                             "mlp_layer_types": ["dense", "sparse", "sparse"]} | rope(3, 3, 2),
    "glm_ocr_text": {"head_dim": 16} | rope(2, 1, 1, **HALF),
    "exaone4": {"sliding_window": 5, "num_hidden_layers": 4},
    "nemotron_h": NEMOTRON | {"hybrid_override_pattern": "M-*", "num_hidden_layers": 3},
    "muse_glimmer_text": {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 4},
    "glm5_next_text": SPARSE["glm5_next"][1],
    "paddleocr_vl_text": {"head_dim": 16} | rope(4, 2, 2),
    "step3p5": GATED["step3p5"][1],
    "dots3_note_text": SPARSE["dots3_note"][1],
    "qwen4_exp_text": WHOLE["qwen4_exp_short"][1] | {
        "rope_parameters": HALF | {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
}  # fmt: skip
"""Further fields of a text_config, by its type."""


def _shrink(config: dict[str, Any]) -> None:
    """Make every part but the decoder small, in place."""
    for name, part in config.items():
        if isinstance(part, dict) and name not in ("text_config", "thinker_config") and name.endswith("_config"):
            for field in ("layer_types", "mlp_layer_types"):
                if part.get(field):
                    part[field] = part[field][: TOWER["num_hidden_layers"]]
            part.pop("per_layer_config", None)  # of layers that are left out
            part.update({field: value for field, value in TOWER.items() if type(part.get(field)) is type(value)})
            _shrink(part)


def tiny_config(model_type: str) -> dict[str, Any]:
    """The fields of a config whose decoder has the sizes of `TEXT`."""
    raw = AutoConfig.for_model(model_type).to_dict() | {"model_type": model_type}
    part = text_part(raw)
    assert part is not None, model_type
    _shrink(raw)
    inner = raw
    for step in part.where.split(": ") if part.where else ():
        inner = inner[step]
        _shrink(inner)
    kind = inner["model_type"]
    if part.where:
        inner.clear()
    inner.update({"model_type": kind} | TEXT | MORE.get(kind, {}))
    for name in ("dtype", "torch_dtype", "_name_or_path", "transformers_version"):
        raw.pop(name, None)
    ids = [name for name in raw if name.endswith(("_token_id", "_token_index")) and isinstance(raw[name], int)]
    return raw | {name: min(raw[name], LAST) for name in ids}


def write_whole(folder: Path, model_type: str) -> PreTrainedModel:
    """Save such a model to `folder`, all of its parameters random; returns it as it answers prompts of text."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**tiny_config(model_type))
    kinds = [kind for kind in (AutoModelForImageTextToText, AutoModelForMultimodalLM)
             if type(config) in kind._model_mapping]  # fmt: skip
    model = (kinds or [AutoModel])[0].from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            spread = 0.08 if p.ndim > 1 else 0.3
            p.copy_(torch.randn_like(p) * spread + (1.0 if p.ndim == 1 and is_norm(name) else 0.0))
    model.save_pretrained(folder)
    found: PreTrainedModel = getattr(model, "thinker", model)
    return found
