"""AutoAWQ as a measured process (see job.py)."""

from __future__ import annotations

from typing import Any

import torch
from awq import AutoAWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer
from job import Job, run
from transformers import AutoTokenizer


class Restoring(AwqQuantizer):
    """Version 0.2.9 keeps the weights before it tries scales on them, by `.cpu()`: on a CPU that is no copy, and the
    first scales stay in them without an inverse anywhere."""

    def _compute_best_scale(
        self, x: Any, w_mean: Any, x_mean: Any, module2inspect: torch.nn.Module, *others: Any, **named: Any
    ) -> Any:
        plain = module2inspect.state_dict
        module2inspect.state_dict = lambda: {name: t.clone() for name, t in plain().items()}
        try:
            return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *others, **named)
        finally:
            del module2inspect.state_dict


def make(job: Job) -> None:
    """AWQ to 4 bits with zeros, in groups of 64 columns."""
    model = AutoAWQForCausalLM.from_pretrained(job.source, device_map="cpu")
    config = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    tokenizer, length = AutoTokenizer.from_pretrained(job.source), len(job.rows[0])
    model.quantize(
        tokenizer, quant_config=config, calib_data=job.rows, max_calib_samples=len(job.rows), max_calib_seq_len=length,
        quantizer_cls=Restoring,
    )  # fmt: skip
    model.save_quantized(job.out)
    tokenizer.save_pretrained(job.out)


if __name__ == "__main__":
    run({"awq4": make})
