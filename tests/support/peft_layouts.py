"""Adapters in the layouts of PEFT, written by hand, and the models that they make: the definition of right."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

Indices = Mapping[str, Sequence[int]]


class Layout:
    """An adapter of random numbers for `oracle`: tensors as PEFT writes them, and `merged`, the model it makes."""

    def __init__(self, oracle: PreTrainedModel, seed: int, rank: int = 4, alpha: float = 6.0) -> None:
        self.merged = copy.deepcopy(oracle)
        head = self.merged.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())  # what is tied may be changed alone
        self.made = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}
        self.rank, self.alpha = rank, alpha
        self.config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"}

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.made) * 0.2

    def modules(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        return [(n, m) for n, m in self.merged.named_modules() if n.rsplit(".", 1)[-1] in names]

    def low_rank(
        self,
        *targets: str,
        dora: bool = False,
        bias: bool = False,
        ranks: Mapping[str, int] | None = None,
        alphas: Mapping[str, float] | None = None,
    ) -> Layout:
        """LoRA of modules with these last names; `ranks` and `alphas` by such a name."""
        self.config |= {"use_dora": dora, "lora_bias": bias, "rank_pattern": ranks or {}, "alpha_pattern": alphas or {}}
        for name, module in self.modules(targets):
            last = name.rsplit(".", 1)[-1]
            rank = (ranks or {}).get(last, self.rank)
            scale = (alphas or {}).get(last, self.alpha) / rank
            table, turned = isinstance(module, nn.Embedding), type(module).__name__ == "Conv1D"
            weight = module.weight.detach().double()
            weight = weight.t() if table or turned else weight
            a, b = self.random(rank, weight.shape[1]), self.random(len(weight), rank)
            new = weight + scale * b.double() @ a.double()
            base = f"base_model.model.{name}"
            first, second = ("lora_embedding_A", "lora_embedding_B") if table else ("lora_A.weight", "lora_B.weight")
            self.tensors |= {f"{base}.{first}": a, f"{base}.{second}": b}
            if name.endswith(("embed_tokens", "lm_head")):
                self.tensors[f"{base}.base_layer.weight"] = module.weight.detach().clone()
            if dora:
                norm = new.norm(dim=1)
                magnitude = (norm * (1 + self.random(len(norm)))).float()
                self.tensors[f"{base}.lora_magnitude_vector"] = magnitude
                new = new * (magnitude / norm)[:, None]
            if bias:
                added = self.tensors[f"{base}.lora_B.bias"] = self.random(len(weight))
                old = torch.zeros(len(weight)) if module.bias is None else module.bias.detach()
                module.bias = nn.Parameter(old + scale * added)
            with torch.no_grad():
                module.weight.copy_((new.t() if table or turned else new).float())
        return self

    def saved(self, *names: str) -> Layout:
        """Modules of its own (`modules_to_save`)."""
        self.config["modules_to_save"] = list(names)
        for name, module in self.modules(names):
            new = self.tensors[f"base_model.model.{name}.weight"] = self.random(*module.weight.shape) * 0.4
            with torch.no_grad():
                module.weight.copy_(new)
        return self

    def tokens(self, indices: Sequence[int] | Indices, tied: bool = False) -> Layout:
        """Rows of tokens of its own (`trainable_token_indices`); `tied`: of the head, too."""
        self.config["trainable_token_indices"] = indices
        by_name: Indices = indices if isinstance(indices, Mapping) else {"embed_tokens": indices}
        for given, ids in by_name.items():
            for name, module in self.modules([given]):
                rows = self.random(len(ids), module.weight.shape[1])
                self.tensors[f"base_model.model.{name}.token_adapter.trainable_tokens_delta"] = rows
                with torch.no_grad():
                    module.weight[list(ids)] = rows
                    if tied:
                        self.merged.get_output_embeddings().weight[list(ids)] = rows
        return self

    def write(self, folder: Path) -> Path:
        """The folder as PEFT would have written it."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        return folder
