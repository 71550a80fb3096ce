"""What llm-compressor writes: integers of 2 to 8 bits, micro-scaled floats, several formats, cache scales, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from tiny import calibration, record, run, write_model
from transformers import AutoModelForCausalLM

Make = Callable[[Path, str], None]


def weights(
    bits: int, group: int | None = None, kind: str = "int", symmetric: bool = True, **more: Any
) -> QuantizationArgs:
    how = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return QuantizationArgs(**{"num_bits": bits, "type": kind, "symmetric": symmetric} | how | more)


def case(family: str = "llama", **recipe: Any) -> Make:
    """`recipe` applied to a tiny model of `family`; its answers are those of the model that is then saved.

    Read back by transformers, experts that were taken apart would be new ones, and some formats would be in bfloat16.
    """

    def make(out: Path, name: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(write_model(out / f"{name}.source", family), dtype=torch.float32)
        texts = Dataset.from_list(calibration())
        ignore = ["lm_head", "re:.*router$", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"]
        modifier = QuantizationModifier(**{"targets": "Linear", "ignore": ignore} | recipe)
        oneshot(model=model, dataset=texts, recipe=modifier, max_seq_length=64, num_calibration_samples=16)
        with exact_activations(model):
            record(out, name, lambda tokens: model(tokens, use_cache=False).logits)
        model.save_pretrained(out / name, save_compressed=True)

    return make


@contextmanager
def exact_activations(model: torch.nn.Module) -> Iterator[None]:
    """The model without the rounding of activations, keys and values, which each program does in its own way."""
    kept = [(s, s.input_activations) for m in model.modules() if (s := getattr(m, "quantization_scheme", None))]
    for scheme, _ in kept:
        scheme.input_activations = None
    yield
    for scheme, rounding in kept:
        scheme.input_activations = rounding or scheme.input_activations


def group(targets: list[str], args: QuantizationArgs) -> QuantizationScheme:
    return QuantizationScheme(targets=targets, weights=args)


CASES: dict[str, Make] = {
    "w4a16": case(scheme="W4A16"),
    "w8a8": case(scheme="W8A8"),
    "fp8_dynamic": case(scheme="FP8_DYNAMIC"),
    **{
        f"int{bits}_g64{'' if symmetric else '_asymmetric'}": case(
            config_groups={"a": group(["Linear"], weights(bits, 64, symmetric=symmetric))}
        )
        for bits in (2, 3, 5, 6, 7, 8)
        for symmetric in (True, False)
    },
    "mxfp4": case(scheme="MXFP4A16"),
    "mxfp8": case(scheme="MXFP8A16"),
    "nvfp4": case(scheme="NVFP4A16"),
    "several": case(
        targets=[],
        config_groups={
            "a": group([r"re:.*self_attn\.(q|k|v)_proj$"], weights(8)),
            "b": group(["re:.*mlp.down_proj"], weights(3, 32, symmetric=False)),
            "c": group(["re:.*(gate|up|o)_proj$"], weights(4, 128)),
        },
    ),
    "cache": case(scheme="W4A16", kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor",
                                                   "dynamic": False, "symmetric": True}),
    **{f"{family}_w4a16": case(family, config_groups={"a": group(["Linear"], weights(4, 64))})
       for family in ("mixtral", "qwen3_moe", "gpt_oss")},
}  # fmt: skip

if __name__ == "__main__":
    run(CASES)
