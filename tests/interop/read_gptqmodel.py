"""Files of GPTQ and AWQ as gptqmodel reads them, as the numbers that its modules make of them."""

from __future__ import annotations

from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file
from tiny import read_all


def read(folder: Path) -> torch.nn.Module:
    model = GPTQModel.load(str(folder), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16).model.float()
    model = plain(model)
    # What is not quantized it reads in 16 bits too: norms that AWQ's scales went into are more than that in the file.
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """The model with each quantized module as the numbers that it makes of its codes.

    Modules of AWQ multiply in float16, activations too, and have no method for the numbers alone.
    """
    for name, module in [*model.named_modules()]:
        if hasattr(module, "qweight"):
            if hasattr(module, "dequantize_weight"):
                made = module.dequantize_weight()
            else:
                made = dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size)
            weight = made.detach().float().t()
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight.data = weight
            model.set_submodule(name, linear)
    return model


if __name__ == "__main__":
    read_all(read)
