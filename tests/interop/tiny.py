"""Tiny random models for the tools to quantize, and what the tools say that the quantized ones answer, those that the
tools made (`run`) and those that quire did (`read_all`).

Runs in each tool's environment: nothing of quire is imported. Answers of a case are in OUT/CASE.answers.safetensors:
`tokens` [prompts, LENGTH], `logits` f32 [prompts, LENGTH, vocabulary] of them, `made` [prompts, STEPS], the best tokens
after.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY, LENGTH, STEPS, PROMPTS = 320, 12, 10, 4
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256, "sliding_window": 5},
}


def write_model(folder: Path, family: str = "llama") -> Path:
    """A random model of `family` in float32, its numbers those of float16, with a tokenizer of numbers."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **SIZES | MIXTURES.get(family, {}))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.05 if "router" not in name and ".gate.weight" not in name else 0.5)
    model.half().float()
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", bos_token="1", eos_token="2").save_pretrained(folder)
    return folder


def calibration(count: int = 16, length: int = 64) -> list[dict[str, list[int]]]:
    """Random texts."""
    made = torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row.tolist(), "attention_mask": [1] * length} for row in made]


@torch.inference_mode()
def record(out: Path, case: str, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Keep what `forward` (tokens [1, n] -> logits [1, n, vocabulary]) answers."""
    tokens = torch.randint(3, VOCABULARY, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(11))
    logits, made = [], []
    for row in tokens:
        text = row[None]
        logits.append(forward(text)[0].float())
        for _ in range(STEPS):
            text = torch.cat((text, forward(text)[:, -1].argmax(-1, keepdim=True)), 1)
        made.append(text[0, LENGTH:])
    answers = {"tokens": tokens, "logits": torch.stack(logits), "made": torch.stack(made)}
    save_file(answers, out / f"{case}.answers.safetensors")


def run(cases: Mapping[str, Callable[[Path, str], None]], below: str = "") -> None:
    """Make every case in the folder that the command line names; one that fails says why and stops no other."""
    out = Path(sys.argv[1]) / below
    for case, make in cases.items():
        try:
            make(out, case)
        except Exception as error:
            traceback.print_exc()
            (out / f"{case}.failed").write_text(
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )


def read_all(read: Callable[[Path], torch.nn.Module]) -> None:
    """Record what the model in each folder of OUT/cases answers, as `read` reads it, beside the folder."""

    def case(out: Path, name: str) -> None:
        model = read(out / name).eval()
        record(out, name, lambda tokens: model(tokens, use_cache=False).logits)

    made = sorted(folder.name for folder in (Path(sys.argv[1]) / "cases").iterdir() if folder.is_dir())
    run(dict.fromkeys(made, case), "cases")
