"""Adapters that the installed PEFT writes (0.15 or later), and its logits with them. Run with peft installed:

pytest -m slow tests/features/adapters/test_against_peft.py
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lora_adapters import Extended, options
from oracle import BACKENDS, backend, logits, relative_error, write
from quire.core.config import flat_config
from quire.model.build import load_model

peft: Any = pytest.importorskip("peft", reason="compares with PEFT's own logits: pip install peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TIED = {"tie_word_embeddings": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora": ("llama", {}, {"use_dora": True, "target_modules": LINEARS}),
    "dora, biases": ("qwen2", {}, {"use_dora": True, "target_modules": LINEARS, "use_rslora": True}),
    "dora, transposed": ("gpt2", {}, {"use_dora": True, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "dora of tables": ("llama", {}, {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "lora_bias": ("llama", {}, {"lora_bias": True, "target_modules": [*LINEARS, "lm_head"]}),
    "patterns": (
        "llama",
        {},
        {
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 3, r"layers\.[01]\.mlp\.up_proj": 2, r"^model\.layers\.2\..*down_proj": 8},
            "alpha_pattern": {"self_attn.v_proj": 7, "up_proj": 1},
        },
    ),
    "saved": ("llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved head": ("phi3", {}, {"target_modules": ["qkv_proj"], "modules_to_save": ["lm_head"]}),
    "saved table of tied": ("llama", TIED, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "saved, tied": (
        "llama",
        TIED,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tables": ("llama", {}, {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "tables, tied": ("llama", TIED, {"target_modules": ["embed_tokens", "v_proj"], "ensure_weight_tying": True}),
    "table of tied": ("llama", TIED, {"target_modules": ["embed_tokens", "v_proj"]}),
    "table, scaled": ("gemma2", {}, {"target_modules": ["embed_tokens", "v_proj"]}),
    "tokens": ("llama", {}, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9, 41]}),
    "tokens, tied": ("llama", TIED, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9, 41]}),
    "tokens, scaled": ("gemma2", {}, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9]}),
    "tokens of both": (
        "llama",
        {},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 9], "lm_head": [41, 5]}},
    ),
    "everything": (
        "qwen2",
        {},
        {"use_dora": True, "target_modules": LINEARS, "modules_to_save": ["lm_head"], "rank_pattern": {"o_proj": 9},
         "trainable_token_indices": [3, 9]},
    ),
}  # fmt: skip
TOKENS = [3, 9, 41, 5, 60, 61, 9, 12, 88, 70, 41]


def adapted(oracle: PreTrainedModel, config: dict[str, Any]) -> Any:
    """`oracle` with an adapter of PEFT whose every number was changed at random."""
    model = peft.get_peft_model(copy.deepcopy(oracle), peft.LoraConfig(r=4, lora_alpha=6, **config)).eval()
    made, seen = torch.Generator().manual_seed(1), set[int]()
    of_adapter = ("lora_", "modules_to_save", "trainable_tokens")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.data_ptr() in seen or not any(part in name for part in of_adapter):
                continue
            seen.add(p.data_ptr())
            noise = torch.randn(p.shape, generator=made) * 0.2
            p.copy_(p * (1 + noise) if "magnitude" in name else noise)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    family, facts, config = CASES[case]
    oracle = write(tmp_path / "m", family, **facts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted(oracle, config)
        model.save_pretrained(tmp_path / "a")
    want = model(torch.tensor(TOKENS)[None], use_cache=False).logits[0].detach()
    for name in BACKENDS:
        ours = load_model(flat_config(**options(tmp_path / "m", {"a": tmp_path / "a"})), backend(name))
        found = Extended(ours, [TOKENS, TOKENS], ["a", ""]).run([[6, 3], [5, 8]])
        assert relative_error(found[0], want) <= 1e-4, name
        assert relative_error(found[1], logits(oracle, TOKENS)) <= 1e-4 < relative_error(found[1], want), name
