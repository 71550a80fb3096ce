"""Tiny models whose files have a layer for multi-token prediction, and that layer by its formula.

transformers reads past these tensors. The layer here is one of its decoder layers between the norms and matrices that
DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 2.2, describes, computed anew for every token.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from family_tensors import RELATIVES, write_relative
from mixture_variants import FEW
from model_variants import LATENT_GROUPS, LATENT_SIZES, ROUTED
from oracle import edit_config, is_norm, write
from speculation_methods import INDEXED, TINY, write_words

DELTA = TINY["states"][1] | {"head_dim": 16}
NARROW = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
          "shared_expert_intermediate_size": 64}  # fmt: skip
NEMOTRON = {"hybrid_override_pattern": "ME*M-", "num_hidden_layers": 5, "mamba_num_heads": 4, "mamba_head_dim": 16,
            "ssm_state_size": 16, "n_groups": 2, "head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}  # fmt: skip
LOCAL, FULL = "sliding_attention", "full_attention"
MIMO = {"head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "sliding_window": 5, "num_hidden_layers": 3, "layer_types": [FULL, LOCAL, FULL], "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in ((FULL, 1e5), (LOCAL, 1e3))}}  # fmt: skip
DOTS3 = INDEXED | {
    "num_hidden_layers": 3, "layer_types": [FULL, LOCAL, FULL], "num_key_value_heads": 4, "sliding_window": 5,
    "shared_experts_intermediate_size": 32, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 8,
    "swa_q_lora_rank": 32, "swa_kv_lora_rank": 64, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16}  # fmt: skip
WITH_MTP: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", DELTA | NARROW),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA | NARROW),
    "glm4_moe": ("glm4_moe", ROUTED | {"use_qk_norm": True, "attention_bias": True, "moe_intermediate_size": 32}),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h_latent": ("nemotron_h", NEMOTRON | {"moe_latent_size": 32}),
    "deepseek_v32": ("deepseek_v32", INDEXED | LATENT_GROUPS),
    "glm_moe_dsa": ("glm_moe_dsa", INDEXED | {"indexer_types": ["full", "shared", "full"]}),
    "hy_v3": ("hy_v3", FEW | {"head_dim": 24, "moe_intermediate_size": 32}),
    "mimo_v2_flash": ("mimo_v2_flash", MIMO),
    "dots3_note": ("dots3_note_text", DOTS3),
    "exaone_moe": ("exaone_moe", FEW | {"moe_intermediate_size": 32, "sliding_window": 5,
                                        "layer_types": [LOCAL, FULL, LOCAL]}),
    "bailing_moe_v2": ("bailing_moe_v2", {}),
    "deepseek_v3": ("deepseek_v3", LATENT_SIZES | LATENT_GROUPS | {"v_head_dim": 16, "q_lora_rank": 32}),
}  # fmt: skip
"""Family and facts of each model."""
LIKE = {"mimo_v2_flash": LOCAL, "dots3_note_text": LOCAL, "exaone_moe": FULL}
"""Families whose layer is like those of one kind, and has no experts."""
OWN = {"join": "fc", "token_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "final_norm": "norm"}
PAIR = {"join": "layers.0.eh_proj", "token_norm": "layers.0.enorm", "hidden_norm": "layers.0.hnorm",
        "final_norm": "layers.1.final_layernorm"}  # fmt: skip
NEXTN = {"join": "eh_proj", "token_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "shared_head.norm"}
FINAL = NEXTN | {"final_norm": "final_layernorm"}


class LayersOfOnePart(nn.Module):
    """A layer that attends and one of experts (Nemotron 3), by the class of a model's `layer`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        config = copy.deepcopy(layer.config)
        config.layer_types, config.num_hidden_layers = ["full_attention", "moe"], 2
        self.layers = nn.ModuleList([type(layer)(config, i) for i in range(2)])

    def forward(self, x: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        """The stream behind both."""
        found: Tensor = self.layers[1](self.layers[0](x, attention_mask=attention_mask))
        return found


@dataclass
class MtpLayer:
    """The layer beside its `model`."""

    model: PreTrainedModel
    block: nn.Module
    join: nn.Linear
    token_norm: nn.Module
    hidden_norm: nn.Module
    final_norm: nn.Module

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype, seed: int = 7) -> MtpLayer:
        """One with random numbers, rounded to `dtype`."""
        torch.manual_seed(seed)
        config, layers, parts = model.config, model.model.layers, hasattr(model.model, "norm_f")
        own = LIKE.get(config.model_type)
        norm = model.model.norm_f if parts else model.model.norm
        norms = [type(norm)(config.hidden_size, eps=norm.variance_epsilon if parts else config.rms_norm_eps)
                 for _ in range(3)]  # fmt: skip
        like = max((i for i, layer in enumerate(layers) if hasattr(layer, "self_attn")), default=0)
        if own is not None:
            config, like = copy.deepcopy(config), max(i for i, kind in enumerate(config.layer_types) if kind == own)
            config.mlp_layer_types[like] = "dense"
        made = cls(
            model,
            LayersOfOnePart(layers[0]) if parts else type(layers[like])(config, like),
            nn.Linear(2 * config.hidden_size, config.hidden_size, False),
            *norms,
        )
        with torch.no_grad():
            for name, p in (pair for module in made.modules.values() for pair in module.named_parameters()):
                plain = p.ndim == 1 and (is_norm(name) or name == "weight")
                p.copy_((torch.randn_like(p) * (0.08 if p.ndim > 1 else 0.3) + float(plain)).to(dtype))
            for name, buffer in made.block.named_buffers():
                if "correction" in name:
                    buffer.copy_((torch.randn_like(buffer) * 0.3).to(dtype))
        made.block.eval().float()
        return made

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Parts by the names of fields."""
        return {"block": self.block, "join": self.join, "token_norm": self.token_norm, "hidden_norm": self.hidden_norm,
                "final_norm": self.final_norm}  # fmt: skip

    @property
    def window(self) -> int:
        """How many tokens back the layer sees, 0 = all."""
        config = self.model.config
        return int(config.sliding_window) if LIKE.get(config.model_type) == LOCAL else 0

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by the names that releases have, experts one by one."""
        parts = isinstance(self.block, LayersOfOnePart)
        kind = self.model.config.model_type
        mimo = kind == "mimo_v2_flash"
        hybrid = hasattr(self.model.config, "linear_num_key_heads") or parts or kind == "exaone_moe"
        start = "mtp." if hybrid else f"model.layers.{self.model.config.num_hidden_layers}."
        block = start + ("layers.0." if hybrid and not parts else "")
        start, block = ("model.mtp.layers.0.",) * 2 if mimo else (start, block)
        last = kind == "hy_v3" or mimo
        names = PAIR if parts else OWN if hybrid else FINAL if last else NEXTN
        found = {f"{start}{name}.weight": self.modules[part].weight for part, name in names.items()}
        for name, tensor in self.block.state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                for e, both in enumerate(tensor):
                    for half, rows in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                        found[f"{block}{name.removesuffix('gate_up_proj')}{e}.{half}.weight"] = rows
            elif name.endswith(("experts.down_proj", "experts.up_proj")):
                base, _, matrix = name.rpartition(".")
                found |= {f"{block}{base}.{e}.{matrix}.weight": m for e, m in enumerate(tensor)}
            else:
                found[block + (name.replace("post_attention_", "pre_mlp_") if mimo else name)] = tensor
        if kind == "dots3_note_text":
            found["model.mtp.embed_tokens.weight"] = self.model.get_input_embeddings().weight
        elif not hybrid and not last:  # releases have these once more
            found |= {f"{start}embed_tokens.weight": self.model.get_input_embeddings().weight,
                      f"{start}shared_head.head.weight": self.model.lm_head.weight}  # fmt: skip
        return {name: tensor.detach() for name, tensor in found.items()}

    def rows(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """What the head reads [n, hidden], of tokens 1 .. n and hidden rows 0 .. n - 1."""
        embedded = self.model.get_input_embeddings()(torch.tensor(tokens[1:]))
        x = self.join(torch.cat((self.token_norm(embedded), self.hidden_norm(hidden)), -1))[None]
        n = x.shape[1]
        places = torch.arange(n)[None]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        mask = mask + torch.full((n, n), -torch.inf).tril(-self.window) if self.window else mask
        own = (LOCAL,) if self.window else ()
        turns = None if isinstance(self.block, LayersOfOnePart) else self.model.model.rotary_emb(x, places, *own)
        found = self.block(x, position_embeddings=turns, attention_mask=mask, position_ids=places)
        return self.final_norm(found[0] if isinstance(found, tuple) else found)[0]

    @torch.no_grad()
    def logits(self, tokens: list[int], count: int) -> Tensor:
        """Logits [count, V] of the tokens after `tokens`, each after the likeliest one of those before it."""
        hidden, found, row = main_rows(self.model, tokens[:-1]), [], [*tokens]
        for _ in range(count):
            last = self.rows(row, hidden)[-1:]
            found.append(self.model.lm_head(last)[0])
            row.append(int(found[-1].argmax()))
            hidden = torch.cat((hidden, last))
        return torch.stack(found)


@torch.no_grad()
def main_rows(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """What the head of `model` reads [n, hidden]; recurrences row by row, which is their definition."""
    module = sys.modules[type(model).__module__]
    if sequential := getattr(module, "torch_recurrent_gated_delta_rule", None):
        module.torch_chunk_gated_delta_rule = sequential  # type: ignore[attr-defined]
    return model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


def is_copy(name: str) -> bool:
    """Whether a tensor of the layer is the model's table of tokens, or its head, once more."""
    return name.endswith(("embed_tokens.weight", "shared_head.head.weight"))


def write_mtp(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **facts: Any) -> MtpLayer:
    """Save the model of `WITH_MTP` with its layer to `folder`, and a tokenizer of 99 words."""
    family, own = WITH_MTP[kind]
    maker = write_relative if family in RELATIVES else write
    layer = MtpLayer.of(maker(folder, family, dtype=dtype, **{"max_position_embeddings": 256} | own | facts), dtype)
    tensors = layer.tensors()
    if family in RELATIVES:
        kept = {n.replace("shared_head.norm", "final_layernorm"): t for n, t in tensors.items() if not is_copy(n)}
        tensors = RELATIVES[family].change(kept)
    path = folder / "model.safetensors"
    whole = load_file(path) | {name: t.to(dtype).contiguous().clone() for name, t in tensors.items()}
    save_file(whole, str(path), {"format": "pt"})
    if kind in ("bailing_moe_v2", "glm4_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "hy_v3"):
        edit_config(folder, num_nextn_predict_layers=1)
    if family == "nemotron_h":
        edit_config(folder, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
    write_words(folder, 99)
    return layer
