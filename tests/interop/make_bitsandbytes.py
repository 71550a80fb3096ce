"""What bitsandbytes writes by way of transformers: NF4 and FP4, held by every type, scales plain or nested; LLM.int8().

The answers are those of the numbers that it makes of its files (`dequantize`): its products on a CPU are of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import record, run, write_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def case(family: str = "llama", **options: Any) -> Callable[[Path, str], None]:
    def make(out: Path, name: str) -> None:
        source = write_model(out / f"{name}.source", family)
        config = BitsAndBytesConfig(**options)
        model = AutoModelForCausalLM.from_pretrained(
            source, quantization_config=config, dtype=torch.float32, device_map="cpu"
        )
        model.save_pretrained(out / name)
        read = AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32, device_map="cpu")
        read = read.dequantize().float().eval()
        record(out, name, lambda tokens: read(tokens, use_cache=False).logits)

    return make


FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
CASES = {
    "nf4": case(**FOUR, bnb_4bit_quant_type="nf4"),
    "nf4_nested": case(**FOUR, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": case(**FOUR, bnb_4bit_quant_type="fp4"),
    **{
        f"nf4_in_{storage}": case(**FOUR, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=storage)
        for storage in ("bfloat16", "float16", "float32")
    },
    "int8": case(load_in_8bit=True),
    "mixtral_nf4": case("mixtral", **FOUR, bnb_4bit_quant_type="nf4"),
}

if __name__ == "__main__":
    run(CASES)
