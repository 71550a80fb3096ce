"""Tiny random checkpoints written by transformers, and transformers' logits for them: the definition of right."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Glm5NextTextConfig,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedModel,
    Step3p7TextConfig,
)
from transformers.utils import logging

import muse_model  # noqa: F401  which makes its decoder known
from glm_model import Glm5NextForCausalLM
from quire.core.config import DeviceConfig
from quire.ops.backend import Ops, open_backend
from quire.ops.native import load_native
from quire.ops.op import REGISTRY
from step_model import Step3p5ForCausalLM

logging.disable_progress_bar()
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # which it does not know by itself
AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
BACKENDS = ["reference", *(["cpu"] if load_native() else [])]

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GPT2_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
              "max_position_embeddings": "n_positions"}  # fmt: skip
T5_NAMES = {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
            "max_position_embeddings": "n_positions"}  # fmt: skip
OWN_NAMES = {
    "gpt2": GPT2_NAMES, "gpt_bigcode": GPT2_NAMES, "gptj": GPT2_NAMES, "codegen": GPT2_NAMES, "openai-gpt": GPT2_NAMES,
    "gpt_neo": {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "mpt": {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len"},
    "xglm": {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "attention_heads"},
    "ctrl": GPT2_NAMES,
    "dbrx": {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
             "max_position_embeddings": "max_seq_len"},
    "t5": T5_NAMES, "mt5": T5_NAMES,
}  # fmt: skip
"""Families that do not take `SMALL` as it is: our name of a field -> theirs; they know no key/value heads or width."""
NOT_EAGER = {"falcon": "sdpa"}  # its eager attention ignores the mask of ALiBi in batches of one


UNSCALED = ("gemma3n", "gemma4")
"""Families without a scale of scores, which their norms of queries have instead."""


def family_facts(model_type: str, facts: dict[str, Any]) -> dict[str, Any]:
    """`SMALL` with `facts`, in the family's spelling."""
    own = OWN_NAMES.get(model_type)
    if own is None:
        return SMALL | facts
    kept = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "intermediate_size")}
    return {own.get(k, k): v for k, v in (kept | facts).items()}


def is_norm(name: str) -> bool:
    """Whether the parameter `name` is a norm's weight."""
    return name.endswith("weight") and any(part in name for part in ("norm", "ln_"))


def random_model(model_type: str, seed: int = 0, **facts: Any) -> PreTrainedModel:
    """A float32 model of `SMALL` with `facts`, all parameters random, norm weights and biases included."""
    torch.manual_seed(seed)
    own = copy.deepcopy(facts)  # of which transformers changes those of ropes
    config = AutoConfig.for_model(model_type, **family_facts(model_type, own))
    attention = NOT_EAGER.get(model_type, "eager")
    code = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = code.from_config(config, attn_implementation=attention).eval().float()
    if not getattr(config, "scale_decoder_outputs", True):  # transformers ties the heads of those that are not, too
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        for name, p in model.named_parameters():
            spread = 0.08 if p.ndim > 1 else 0.3
            p.copy_(torch.randn_like(p) * spread + (1.0 if p.ndim == 1 and is_norm(name) else 0.0))
            if config.model_type.startswith(UNSCALED) and name.endswith("q_norm.weight"):
                p.mul_(0.25)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
            if name.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                buffer.copy_(torch.rand(len(buffer), experts).argsort(1)[:, : buffer.shape[1]])
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.4)
    return model


def write(
    folder: Path, model_type: str, seed: int = 0, dtype: torch.dtype = torch.float32, **facts: Any
) -> PreTrainedModel:
    """Save such a model to `folder` in `dtype`; `facts["shard"]` sets max_shard_size. Returns it as float32."""
    shard = facts.pop("shard", "50GB")
    model = random_model(model_type, seed, **facts)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(dtype))
    stored = model if dtype is torch.float32 else copy.deepcopy(model).to(dtype)
    save(stored, folder, shard)
    return model


def save(model: PreTrainedModel, folder: Path, shard: str = "50GB") -> None:
    """Save a model to `folder` as releases of its family lie, in files of `shard` bytes at most."""
    model.save_pretrained(folder, max_shard_size=shard)
    if model.config.model_type == "olmo_hybrid":
        _part_taps(folder, model.config)


def _part_taps(folder: Path, config: Any) -> None:
    """Give queries, keys and values the taps that are theirs: transformers writes a third of all to each."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    widths = keys, keys, config.linear_num_value_heads * config.linear_value_head_dim
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for first in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [first.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        parts = torch.cat([tensors[name] for name in names]).split(widths)
        tensors |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, path, {"format": "pt"})


def edit_config(folder: Path, remove: tuple[str, ...] = (), **fields: Any) -> None:
    """Change fields of the folder's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in remove}))


def logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """transformers' logits [len(tokens), vocab] f32 for one sequence."""
    module = sys.modules[type(model).__module__]
    if sequential := getattr(module, "torch_recurrent_gated_delta_rule", None):
        # The recurrence row by row is the definition; in chunks it is 1.2e-5 off for 19 rows.
        module.torch_chunk_gated_delta_rule = sequential  # type: ignore[attr-defined]
    with torch.no_grad():
        return model(torch.tensor(tokens)[None], use_cache=False).logits[0]


def relative_error(got: Tensor, want: Tensor) -> float:
    """max |got - want| / max |want|."""
    return float((got - want).abs().max() / want.abs().max())


MODEL_OPS = {
    "embedding",
    "rmsnorm",
    "add_rmsnorm",
    "linear",
    "rope_and_cache",
    "rope_queries",
    "lora",
    "lora_expand",
    "lora_scale",
    "attention",
    "causal_conv",
    "gated_activation",
    "gated_mlp",
    "plain_mlp",
    "take_rows",
    "pick_rows",
    "layernorm",
    "add_layernorm",
    "norm_spans",
    "join_columns",
    "place_columns",
    "take_columns",
    "add",
    "add_positions",
    "scale",
    "scale_rows",
    "softcap",
    "clip",
    "activation",
    "route",
    "sort_by_expert",
    "grouped_linear",
    "expert_mlp",
    "combine",
    "clamped_swiglu",
    "scale_by_sigmoid",
    "scale_by_softplus",
    "scale_choices",
    "scale_columns",
    "mix_streams",
    "match_lengths",
    "sparse_gate",
    "head_linear",
    "latent_rope_and_cache",
    "latent_attention",
    "index_rope_and_cache",
    "choose_tokens",
    "choose_blocks",
    "pool_keys",
    "sinkhorn_gates",
    "choose_pooled",
    "ngram_rows",
    "gate_values",
    "pool_entries",
    "entry_attention",
    "route_by_token",
    "delta_rule",
    "ssm_scan",
    "gated_rmsnorm",
    "xielu",
}
TOWER_OPS = {"whole_attention"}
"""What encoders of images call beside these."""


def backend(name: str) -> Ops:
    """The backend "reference" or "cpu" on two threads; what no model calls may come from the reference."""
    others = () if name == "reference" else tuple(f"{op}=reference" for op in REGISTRY.keys() - MODEL_OPS - TOWER_OPS)
    return open_backend(DeviceConfig(device=name, threads=2 if name == "cpu" else 0, ops=others))
