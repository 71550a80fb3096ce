"""Files of AWQ as AutoAWQ reads them, as the numbers that it makes of them: its products need a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file
from tiny import read_all
from transformers import AutoConfig, AutoModelForCausalLM


def read(folder: Path) -> torch.nn.Module:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return plain(folder, folder, config["group_size"])


def plain(config: Path, folder: Path, group: int) -> torch.nn.Module:
    """A model as the folder `config` says, with the numbers that AutoAWQ makes of the file in `folder`."""
    asked = AutoConfig.from_pretrained(config)
    if hasattr(asked, "quantization_config"):
        del asked.quantization_config
    tensors = load_file(folder / "model.safetensors")
    for base in [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]:
        words, zeros, scales = (tensors.pop(f"{base}.{part}") for part in ("qweight", "qzeros", "scales"))
        tensors[f"{base}.weight"] = dequantize_gemm(words, zeros, scales.float(), 4, group).t().contiguous()
    model = AutoModelForCausalLM.from_config(asked).float()
    model.load_state_dict(tensors, strict=True)
    return model


if __name__ == "__main__":
    read_all(read)
