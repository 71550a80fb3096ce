"""Files of bitsandbytes as transformers reads them, as the numbers that it makes of them (`dequantize`)."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import read_all
from transformers import AutoModelForCausalLM


def read(folder: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    return model.dequantize().float()


if __name__ == "__main__":
    read_all(read)
