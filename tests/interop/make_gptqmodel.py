"""What gptqmodel writes: GPTQ of 2 to 8 bits, in both zero conventions and with rules by layer, AWQ, and float8."""

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
        awq = options.get("method") == "awq"
        read = GPTQModel.load(str(out / name), backend=BACKEND.TORCH_AWQ if awq else BACKEND.TORCH, device="cpu",
                              dtype=torch.float32)  # fmt: skip
        record(out, name, lambda tokens: read.model(tokens, use_cache=False).logits, rounds=False)

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
    "awq4": case(method="awq", format="gemm"),
    "awq4_symmetric": case(method="awq", format="gemm", sym=True),
}

if __name__ == "__main__":
    run(CASES)
