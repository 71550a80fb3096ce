"""Tiny models with assistants that read their keys and values, and what transformers' assistants say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
    PreTrainedModel,
)

from gemma_variants import GEMMAS
from oracle import SMALL, is_norm, write
from speculation_methods import write_words


def _modes(config: Any) -> list[str | None]:
    """What transformers 5.23 fails to say of assistants: it looks for layers with keys of their own."""
    if config.num_kv_shared_layers == config.num_hidden_layers:
        return ["reuse"] * config.num_hidden_layers
    found: list[str | None] = _own_modes[type(config)].fget(config)
    return found


_own_modes: dict[type, Any] = {kind: kind.kv_sharing_modes for kind in (Gemma4TextConfig, Gemma4UnifiedTextConfig)}
for _kind in _own_modes:
    _kind.kv_sharing_modes = property(_modes)
CODE = {"gemma4_assistant": Gemma4AssistantForCausalLM, "gemma4_unified_assistant": Gemma4UnifiedAssistantForCausalLM}
LAYERS = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
OWN = {"hidden_size": 32, "intermediate_size": 64, "num_kv_shared_layers": 3, "use_double_wide_mlp": False}
PLAIN = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 11, "centroid_intermediate_top_k": 4}
KINDS: dict[str, dict[str, Any]] = {
    "gemma4": {},
    "gemma4_keys_as_values": CLUSTERS,
    "gemma4_small": CLUSTERS,
    "gemma4_windows": {},
    "gemma4_experts": {},
    "gemma4_unified": CLUSTERS,
}
"""Targets, variants of `GEMMAS`, and facts of their assistants."""


@dataclass(frozen=True)
class Pair:
    """transformers' target and its assistant."""

    target: PreTrainedModel
    assistant: PreTrainedModel

    @torch.no_grad()
    def logits(self, tokens: list[int], count: int) -> Tensor:
        """Logits [count, V] of the tokens after `tokens`, each after the likeliest one of those before it.

        Windows hold what the last token sees beside itself.
        """
        seen = self.target(torch.tensor([tokens[:-1]]), use_cache=True, output_hidden_states=True)
        config, kept = self.target.config, dict[str, tuple[Tensor, Tensor]]()
        own = config.num_hidden_layers - config.num_kv_shared_layers
        for kind, layer in zip(config.layer_types[:own], seen.past_key_values.layers, strict=False):
            first = 1 - config.sliding_window if kind == "sliding_attention" else 0
            kept[kind] = layer.keys[:, :, first:], layer.values[:, :, first:]
        hidden, row, found = seen.hidden_states[-1][:, -1:], tokens[-1], list[Tensor]()
        for _ in range(count):
            embedded = self.target.get_input_embeddings()(torch.tensor([[row]]))
            said = self.assistant(
                inputs_embeds=torch.cat((embedded, hidden), -1), position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=kept, use_cache=False,
            )  # fmt: skip
            found.append(said.logits[0, -1])
            row, hidden = int(found[-1].argmax()), said.last_hidden_state
        return torch.stack(found)


def write_assistant(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **facts: Any) -> PreTrainedModel:
    """Save an assistant of the target `kind` of `KINDS`; `facts` of its config, `text_config` of its decoder's."""
    family, own = GEMMAS[kind]
    plain = {} if family.startswith("gemma4_unified") else PLAIN
    whole = {"backbone_hidden_size": 64} | KINDS[kind] | facts
    text = SMALL | own | plain | LAYERS | OWN | whole.pop("text_config", {})
    code = family.replace("_text", "_assistant")
    config = AutoConfig.for_model(code, text_config=AutoConfig.for_model(family, **text), **whole)
    torch.manual_seed(5)
    model = CODE[code]._from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            plain_norm = p.ndim == 1 and is_norm(name)
            scale = 0.25 if name.endswith("q_norm.weight") else 1.0  # of scores, which have no other
            p.copy_((scale * (torch.randn_like(p) * (0.1 if p.ndim > 1 else 0.3) + float(plain_norm))).to(dtype))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_((torch.rand_like(buffer) + 0.4).to(dtype))
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer)))
    model.to(dtype).save_pretrained(folder)
    return model.float()


def write_pair(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **facts: Any) -> Pair:
    """Save a target and its assistant to folder/target and folder/assistant, with a tokenizer of 99 words."""
    family, own = GEMMAS[kind]
    target = write(folder / "target", family, dtype=dtype, **own | {"max_position_embeddings": 256})
    write_words(folder / "target", 99)
    return Pair(target, write_assistant(folder / "assistant", kind, dtype, **facts))


def asked(folder: Path, **more: Any) -> dict[str, Any]:
    """What is asked of drafts by the assistant in `folder`."""
    return {"method": "mtp", "model": str(folder / "assistant"), "adaptive": False} | more
