"""What gptqmodel writes: GPTQ of 2 to 8 bits, in each of its layouts and with rules by layer.

The answers are those of the numbers that its modules make of the files: their products are of 16 bits. Its AWQ needs a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from tiny import calibration, record, run, write_model


def case(**options: Any) -> Callable[[Path, str], None]:
    def make(out: Path, name: str) -> None:
        source = write_model(out / f"{name}.source")
        config = QuantizeConfig(**{"bits": 4, "group_size": 64, "desc_act": False, "device": "cpu"} | options)
        model = GPTQModel.load(str(source), config, dtype=torch.float32)
        model.quantize(calibration(), batch_size=4)
        model.save(str(out / name))
        read = GPTQModel.load(str(out / name), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16).model.float()
        for inner, module in [*read.named_modules()]:
            if hasattr(module, "dequantize_weight"):
                weight = module.dequantize_weight().detach().float().t()
                linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                linear.weight.data = weight
                read.set_submodule(inner, linear)
        record(out, name, lambda tokens: read(tokens, use_cache=False).logits)

    return make


RULES = {
    r"-:.*layers\.0\.self_attn\.o_proj.*": {},
    r"+:.*layers\.1\..*(k|down)_proj.*": {"bits": 8, "group_size": 32},
    r"+:.*up_proj.*": {"bits": 3},
    "lm_head": {"bits": 8},
}
CASES = {
    "gptq4": case(),
    "gptq4_act_order": case(desc_act=True, group_size=128),
    "gptq4_asymmetric": case(sym=False, format="gptq_v2"),
    **{f"gptq{bits}": case(bits=bits, group_size=32) for bits in (2, 3, 5, 6, 7, 8)},
    "gptq3_planar": case(bits=3, group_size=32, format="gptq_p"),
    "rules": case(dynamic={k: v for k, v in RULES.items() if k != "lm_head"}),
    "rules_head": case(dynamic=RULES, lm_head=True),
}

if __name__ == "__main__":
    run(CASES)
