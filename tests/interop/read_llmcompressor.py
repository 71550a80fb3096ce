"""Files of compressed-tensors as transformers reads them, by the package that llm-compressor brings."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import read_all
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


def read(folder: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    for module in model.modules():  # each program rounds activations, keys and values in its own way
        if scheme := getattr(module, "quantization_scheme", None):
            scheme.input_activations = None
    return model.float()  # MXFP4 becomes bfloat16, which holds its numbers


if __name__ == "__main__":
    read_all(read)
