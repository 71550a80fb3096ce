"""llm-compressor as a measured process (see job.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from job import Job, run
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 8
"""Rows that go through the model together, as quire has it."""
LINEAR: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head"]}
HALF: dict[str, Any] = {"targets": [r"re:model\.layers\.\d+$"], "sparsity": 0.5, "mask_structure": "2:4"}
"""Of pruning the targets are layers, whose matrices are pruned; of a matrix named itself none is."""
# Version 0.14.0.1 pins activations for an accelerator, and fails where there is none.
IntermediatesCache.pin_memory = lambda self, batch_index, input_names=None: None


def method(modifiers: Callable[[], list[Any]], reads: bool = True) -> Callable[[Job], None]:
    """A recipe of `modifiers`; `reads`: whether they want text."""

    def make(job: Job) -> None:
        model = AutoModelForCausalLM.from_pretrained(job.source, dtype="auto")
        text: dict[str, Any] = {}
        if reads:
            rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job.rows]
            text = {"dataset": Dataset.from_list(rows), "num_calibration_samples": len(rows), "batch_size": BATCH,
                    "max_seq_length": len(job.rows[0]), "shuffle_calibration_samples": False}  # fmt: skip
        oneshot(model=model, recipe=modifiers(), **text)
        model.save_pretrained(job.out, save_compressed=True)
        AutoTokenizer.from_pretrained(job.source).save_pretrained(job.out)

    return make


def integers(group: int, symmetric: bool = True, bits: int = 4) -> dict[str, Any]:
    """Options of a modifier that rounds weights to integers by groups of columns."""
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=group)
    return {"ignore": ["lm_head"], "config_groups": {"a": QuantizationScheme(targets=["Linear"], weights=args)}}


METHODS: dict[str, Callable[[Job], None]] = {
    "rtn4": method(lambda: [QuantizationModifier(**integers(64))], reads=False),
    "rtn8": method(lambda: [QuantizationModifier(**integers(64, bits=8))], reads=False),
    "gptq4_g64": method(lambda: [GPTQModifier(**integers(64))]),
    "gptq4_g32": method(lambda: [GPTQModifier(**integers(32))]),
    "awq4": method(lambda: [AWQModifier(), QuantizationModifier(**integers(64, symmetric=False))]),
    "smoothquant": method(
        lambda: [SmoothQuantModifier(smoothing_strength=0.5), QuantizationModifier(scheme="W8A8", **LINEAR)]
    ),
    "fp8_dynamic": method(lambda: [QuantizationModifier(scheme="FP8_DYNAMIC", **LINEAR)], reads=False),
    "fp8_static": method(lambda: [QuantizationModifier(scheme="FP8", **LINEAR)]),
    "sparsegpt": method(lambda: [SparseGPTModifier(**HALF)]),
    "wanda": method(lambda: [WandaPruningModifier(**HALF)]),
}

if __name__ == "__main__":
    run(METHODS)
