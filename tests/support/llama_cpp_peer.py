"""llama.cpp in an environment of its own, asked for greedy generations and token ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import llama_cpp_models
from model_variants import Encoded
from oracle import backend, write
from paged_model import Paged
from paths import SUPPORT
from quire.core.config import flat_config
from quire.core.tree_map import rebuilt
from quire.model.build import load_model
from quire.model.net.altup import SparseGate
from quire.model.net.parts import Linear
from quire.ops.reference.layers import FUNCTIONS

ENVIRONMENT = os.environ.get("QUIRE_LLAMA_CPP", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENVIRONMENT, reason="QUIRE_LLAMA_CPP does not name an environment with llama.cpp"),
]
GEMMA = {"head_dim": 64, "sliding_window": 5, "query_pre_attn_scalar": 64}
EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
NARROW = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
LFM2 = {"num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "full_attention"]}
DELTA = {"num_hidden_layers": 4, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128,
         "layer_types": ["linear_attention"] * 3 + ["full_attention"]}  # fmt: skip
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                                "mrope_section": [3, 3, 2], "mrope_interleaved": True}}  # fmt: skip
SCANS = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_n_groups": 2}
FALCON = SCANS | {"mamba_d_ssm": 512, "head_dim": 64, "mamba_norm_before_gate": False, "key_multiplier": 0.6,
                  "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.25,
                  "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.36], "ssm_out_multiplier": 0.47,
                  "mlp_multipliers": [0.8, 0.3], "embedding_multiplier": 3.5, "lm_head_multiplier": 0.4}  # fmt: skip
NEMOTRON = {"hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5, "mamba_num_heads": 8, "mamba_head_dim": 64,
            "n_groups": 2, "ssm_state_size": 16, "head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 256, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 256,
            "routed_scaling_factor": 2.5}  # fmt: skip
JAMBA = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16,
         "mamba_dt_rank": 32, "num_experts": 6, "num_experts_per_tok": 3}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "gemma": ("gemma", {"head_dim": 64}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "phi2": ("phi", {"num_key_value_heads": 4, "intermediate_size": 1024}),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", EIGHT),
    "qwen2moe": ("qwen2_moe", NARROW | {"shared_expert_intermediate_size": 512}),
    "qwen3moe": ("qwen3_moe", NARROW | {"head_dim": 64, "norm_topk_prob": True}),
    "gpt-oss": ("gpt_oss", EIGHT | {"head_dim": 64, "sliding_window": 5}),
    "qwen3next": ("qwen3_next", NARROW | DELTA | {"shared_expert_intermediate_size": 256}),
    "qwen35": ("qwen3_5_text", DELTA | SECTIONS),
    "qwen35moe": ("qwen3_5_moe_text", NARROW | DELTA | SECTIONS | {"shared_expert_intermediate_size": 256}),
    "lfm2": ("lfm2", LFM2 | {"block_multiple_of": 256}),
    "lfm2moe": ("lfm2_moe", LFM2 | NARROW | {"num_dense_layers": 1}),
    "granitehybrid": (
        "granitemoehybrid",
        SCANS
        | EIGHT
        | {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 256,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
        },
    ),
    "falcon-h1": ("falcon_h1", FALCON),
    "nemotron_h_moe": ("nemotron_h", NEMOTRON),
    "mamba2": ("mamba2", {"intermediate_size": 512, "num_heads": 8, "head_dim": 64, "state_size": 16, "n_groups": 2}),
    "mamba": ("mamba", {"intermediate_size": 512, "state_size": 16, "time_step_rank": 32}),
    "falcon-mamba": ("falcon_mamba", {"intermediate_size": 512, "state_size": 16, "time_step_rank": 32}),
    "jamba": ("jamba", JAMBA),
}
LATENTS = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "q_lora_rank": 256,
           "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "n_shared_experts": 1,
           "num_key_value_heads": 4, "first_k_dense_replace": 1}  # fmt: skip
MODELS |= {
    "deepseek2": ("deepseek_v2", LATENTS | {"n_group": 1, "topk_group": 1}),
    "deepseek2 third": ("deepseek_v3", LATENTS | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}),
    "deepseek2 yarn": ("deepseek_v3", LATENTS | {"n_group": 4, "topk_group": 2, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}}),
    "kimi-linear": ("kimi_linear", LATENTS | {
        "q_lora_rank": None, "num_hidden_layers": 4, "linear_head_dim": 64, "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}),
}  # fmt: skip
MODELS |= llama_cpp_models.FURTHER
RELEASED: dict[str, dict[str, Any]] = llama_cpp_models.RELEASED | {
    "granitehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "deepseek2 third": {"scoring_func": "sigmoid"},
    "deepseek2 yarn": {"scoring_func": "sigmoid"},
}  # fmt: skip
"""Fields of config.json as releases have them, where transformers writes words that the converter does not know."""
MADE = ("kimi-linear",)
"""Models that transformers writes under names that the converter does not know: the tests' writer makes the file."""
STEPS = 32
MOST = 1e-3
"""Largest difference of logits in F32 files, relative to the largest logit.

It is below 1e-4 but for GELU, which llama.cpp takes from a table of f16 (see `gelu_of_table`).
"""


class Peer:
    """llama.cpp's process."""

    process: subprocess.Popen[str]

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start it."""
        folder = Path(ENVIRONMENT)
        variables = os.environ | {"LLAMA_CPP_LIB_PATH": str(folder / "build" / "bin")}
        self.process = subprocess.Popen(
            [str(folder / "bin" / "python"), str(SUPPORT / "llama_cpp_answers.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables,
        )  # fmt: skip

    def ask(self, **command: Any) -> dict[str, Any]:
        """Its answer; it prints other lines, too."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = next((line for line in self.process.stdout if line.startswith("{")), "")
        if not line:
            self.process.communicate()
            self.start()
            raise AssertionError(f"llama.cpp ended at {command}")
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer


class Converter:
    """The process of llama.cpp's converter."""

    def __init__(self) -> None:
        sources = next(Path(ENVIRONMENT).glob("sources/*/vendor/llama.cpp"))
        script = [sys.executable, str(SUPPORT / "llama_cpp_convert.py"), str(sources)]
        self.process = subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def convert(self, folder: Path, out: Path, **options: Any) -> None:
        """Write the file `out` of the model in `folder`; `options` of the converter."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"folder": str(folder), "out": str(out), "options": options}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line and "error" not in json.loads(line), json.loads(line)["error"] if line else "the converter ended"

    def end(self) -> None:
        """End it."""
        with self.process as process:
            assert process.stdin is not None
            process.stdin.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    it = Peer()
    yield it
    with it.process as process:
        assert process.stdin is not None
        process.stdin.close()


def write_released(folder: Path, name: str, **facts: Any) -> None:
    """Write the model `name` of `MODELS`, with `facts`, as its releases are."""
    kind, own = MODELS[name]
    write(folder, kind, **facts | own)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | RELEASED.get(name, {})))
    count_tokens(folder)


def count_tokens(folder: Path) -> None:
    """Make tokenizer.json one of as many entries as config.json says: the converter counts those of Gemma's."""
    count = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocab = {str(i): i for i in range(count)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))


def replay(
    path: Path, prompts: list[list[int]], given: list[list[int]], on: str = "cpu", **options: Any
) -> np.ndarray[Any, Any]:
    """Our logits [prompts, steps, vocabulary] after each prompt and each of the tokens `given` but the last.

    On the reference backend with the GELU of llama.cpp.
    """
    model = load_model(flat_config(model=str(path), **options), backend(on))
    model = replace(model, decoder=rebuilt(model.decoder, _with_their_deviation))

    def rows(tokens: list[int], more: list[int]) -> Tensor:
        if model.encoder is not None:
            return Encoded(model, [tokens], [[model.spec.encoder.start, *more[:-1]]]).run([[STEPS]])[0]
        return Paged(model, [tokens + more[:-1]]).run([[len(tokens) + STEPS - 1]])[0][-STEPS:]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FUNCTIONS, "gelu_tanh", gelu_of_table)
        return torch.stack([rows(tokens, more) for tokens, more in zip(prompts, given, strict=True)]).numpy()


def gelu_of_table(x: Tensor) -> Tensor:
    """GELU by tanh as ggml's CPU backend has it: of numbers rounded to f16, rounded to f16, between -10 and 10."""
    found = F.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x.abs() < 10, found, x.relu())


def _with_their_deviation(part: Any) -> Any:
    """Gates of Gemma 3n are cut by a deviation that llama.cpp divides by one less than their number."""
    if not isinstance(part, SparseGate):
        return part
    assert isinstance(part.own, Linear)
    gates = part.own.weight.n if part.own.more else part.own.weight.n // 2
    return replace(part, factor=part.factor * (gates / (gates - 1)) ** 0.5)


def size(x: np.ndarray[Any, Any]) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.square(x, dtype=np.float64).mean()))


TEXTS = [
    "", " ", "   ", "\t", "\n\n\n", " \n ", "Hello, world", " Hello", "Hello  world ", "3.14159 1,000,000 0x1F 2^10",
    "a\u0301 \u00e1 \u212b \ufb01",
    "it's I'LL don't WE'VE", "\u2581under_bar\u2581", "!!!???...---===", "<0x0A> <0xFF>",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4", "\u0130stanbul \u017f \u00df",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea", "\x00\x01\x7f", "a" * 32, "x" * 300,
    "\u00a0\u2003\u200b\ufeffx\u0085y\u2028z", "def f(x):\n\treturn x**2  # ok\r\n",
]  # fmt: skip
