"""Adapters with random numbers: written as PEFT does, applied by hand, and merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from attention_variants import GATED, GATED_DENSE, LATENT_VARIANTS
from gemma_variants import GEMMAS
from live_server import FOLDER
from mixture_variants import NEWER
from paged_model import VARIANTS, Paged
from peft_layouts import Layout
from quire.model.build import Model
from quire.model.net.decoder import Decoder
from quire.ops.arrays import to_torch
from sparse_variants import SPARSE, WHOLE

TARGETS = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "cohere": ("q_proj", "v_proj", "down_proj"),
    "gpt_neox": ("query_key_value",),
    "lfm2": ("in_proj", "out_proj", "q_proj", "w1", "w2"),
    "bamba": ("in_proj", "out_proj", "q_proj", "o_proj", "gate_proj", "down_proj"),
    "falcon_h1": ("in_proj", "out_proj", "k_proj", "o_proj", "up_proj", "down_proj"),
    "mamba": ("in_proj", "x_proj", "dt_proj", "out_proj"),
    "nemotron_h": ("in_proj", "out_proj", "v_proj", "up_proj", "down_proj"),
    "minimax": ("qkv_proj", "output_gate", "out_proj", "k_proj", "o_proj"),
    "muse_glimmer_text": ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "afmoe": ("self_attn.gate_proj", "q_proj", "o_proj"),
    "laguna": ("g_proj", "q_proj", "o_proj"),
    "hrm_text": ("self_attn.gate_proj", "k_proj", "o_proj", "up_proj", "down_proj"),
    "lfm3": ("g_proj", "in_proj", "v_proj"),
    "qwen3_5_text": ("q_proj", "o_proj", "in_proj_qkv", "in_proj_z"),
    "qwen4_exp_text": ("q_proj", "k_proj", "o_proj", "in_proj_qkv", "in_proj_z"),
    "longcat_flash": ("o_proj", "gate_proj", "up_proj", "down_proj"),
    "dots3_note_text": ("o_proj", "g_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "step3p5": ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"),
    "gemma3n_text": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "gemma4_text": ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
FACTS = {"lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32},
         "bamba": VARIANTS["bamba"][1], "falcon_h1": VARIANTS["falcon_h1_multipliers"][1],
         "minimax": NEWER["minimax"][1], "muse_glimmer_text": VARIANTS["muse_glimmer"][1],
         "mamba": VARIANTS["mamba_biases"][1], "nemotron_h": VARIANTS["nemotron_h"][1],
         "afmoe": GATED["afmoe"][1], "laguna": GATED["laguna"][1], "lfm3": GATED_DENSE["lfm3"][1],
         "hrm_text": GATED_DENSE["hrm_text"][1],
         "longcat_flash": LATENT_VARIANTS["longcat_flash"][1], "step3p5": GATED["step3p5"][1],
         "dots3_note_text": SPARSE["dots3_note"][1],
         "qwen3_5_text": VARIANTS["qwen3_5"][1], "qwen4_exp_text": WHOLE["qwen4_exp_short"][1],
         "gemma3n_text": GEMMAS["gemma3n"][1], "gemma4_text": GEMMAS["gemma4_small"][1]}  # fmt: skip
"""Of models whose usual ones have not all of these."""


def write_adapter(folder: Path, oracle: PreTrainedModel, targets: tuple[str, ...], seed: int, **config: Any) -> Path:
    """A PEFT folder of random matrices for every module of `oracle` whose name ends in one of `targets`."""
    generator = torch.Generator().manual_seed(seed)
    rank = config.setdefault("r", 4)
    tensors: dict[str, Tensor] = {}
    for name, module in oracle.named_modules():
        if any(f".{name}".endswith(f".{target}") for target in targets):
            n, k = module.weight.shape[::-1] if type(module).__name__ == "Conv1D" else module.weight.shape
            base = f"base_model.model.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(rank, k, generator=generator) * 0.2
            tensors[f"{base}.lora_B.weight"] = torch.randn(n, rank, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "lora_alpha": 6, "target_modules": list(targets), "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged_by_hand(oracle: PreTrainedModel, folder: Path, scale: float) -> PreTrainedModel:
    """`oracle` with W + scale B A in place of W, added in float64."""
    tensors, model = load_file(folder / "adapter_model.safetensors"), copy.deepcopy(oracle)
    with torch.no_grad():
        for name, module in model.named_modules():
            a = tensors.get(f"base_model.model.{name}.lora_A.weight")
            if a is not None:
                delta = scale * tensors[f"base_model.model.{name}.lora_B.weight"].double() @ a.double()
                delta = delta.t() if type(module).__name__ == "Conv1D" else delta
                module.weight.copy_((module.weight.double() + delta).float())
    return model


def run_adapted(model: Model, sequences: list[list[int]], adapters: list[str], cut: list[list[int]]) -> list[Tensor]:
    """Logits of every sequence with its adapter."""
    paged, rows = Paged(model, sequences), []
    assert model.adapters is not None
    for counts in cut:
        slots = [model.adapters.slot(a) for a, n in zip(adapters, counts, strict=True) for _ in range(n)]
        model.adapters.rows[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        rows.append(paged.step(counts))
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "c_attn", "c_proj", "c_fc", *LINEARS)
Kind = Callable[[PreTrainedModel, int], Layout]
KINDS: dict[str, Kind] = {
    "dora": lambda m, s: Layout(m, s).low_rank(*ALL, dora=True),
    "dora of tables": lambda m, s: Layout(m, s).low_rank("embed_tokens", "lm_head", "v_proj", dora=True),
    "bias": lambda m, s: Layout(m, s).low_rank(*ALL, "lm_head", bias=True),
    "patterns": lambda m, s: Layout(m, s).low_rank(*ALL, ranks={"q_proj": 7, "o_proj": 1}, alphas={"up_proj": 3.0}),
    "tables": lambda m, s: Layout(m, s).low_rank("embed_tokens", "lm_head", "wte", "down_proj", "c_fc"),
    "saved": lambda m, s: Layout(m, s).low_rank(*ALL).saved("embed_tokens", "lm_head", "wte"),
    "tokens": lambda m, s: Layout(m, s).low_rank("k_proj").tokens([3, 9, 41]),
    "tokens of both": lambda m, s: Layout(m, s).low_rank("k_proj").tokens({"embed_tokens": [3, 9], "lm_head": [50]}),
    "tied tokens": lambda m, s: Layout(m, s).low_rank("k_proj").tokens([3, 9, 41], tied=True),
    "plain": lambda m, s: Layout(m, s).low_rank(*ALL),
}


class Extended(Paged):
    """`PagedSequences` with the decoder that has all that adapters hold, each sequence with its own."""

    def __init__(self, model: Model, sequences: list[list[int]], names: list[str]) -> None:
        assert model.adapters is not None and isinstance(model.decoder, Decoder)
        self.adapters, self.names = model.adapters, names
        super().__init__(replace(model, decoder=model.adapters.extensions.decoder(model.decoder)), sequences)

    def step(self, counts: list[int], wanted: int | None = None) -> list[Tensor]:
        decoder = self.model.decoder
        assert isinstance(decoder, Decoder)
        batch = decoder.ops.place(self.batch(counts, wanted))
        slots = [self.adapters.slot(name) for name, n in zip(self.names, counts, strict=True) for _ in range(n)]
        for rows in self.adapters.arrays.values():
            rows[: len(slots)] = decoder.ops.put(np.array(slots, np.int32))
        self.adapters.extensions.look_up(batch)
        decoder.ops.begin_step()
        found = decoder(batch, self.caches)
        own = decoder.ops.host(self.adapters.rows[: len(slots)])
        return list(to_torch(self.adapters.extensions.after(found, own, decoder, batch)).clone().split(counts))


def options(folder: Path, adapters: dict[str, Path], **more: Any) -> dict[str, Any]:
    modules = tuple(f"{name}={path}" for name, path in adapters.items())
    return {"model": str(folder), "enable_lora": True, "lora_modules": modules} | more


def write_server_adapter(
    folder: Path, seed: int, rank: int = 4, roles: tuple[str, ...] = ("q_proj", "down_proj"), **config: Any
) -> str:
    """A PEFT folder that changes the embedded model's text, with magnitudes if `use_dora`; returns its path."""
    made, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(FOLDER / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if base.rsplit(".", 1)[-1] in roles:
            n, k = weight.shape
            tensors[f"base_model.model.{base}.lora_A.weight"] = torch.randn(rank, k, generator=made) * 0.3
            tensors[f"base_model.model.{base}.lora_B.weight"] = torch.randn(n, rank, generator=made) * 0.3
            if config.get("use_dora"):
                norms = weight.float().norm(dim=1)
                tensors[f"base_model.model.{base}.lora_magnitude_vector"] = norms * torch.rand(n, generator=made)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8} | config))
    return str(folder)
