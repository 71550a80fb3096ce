"""GPTQModel as a measured process (see job.py)."""

from __future__ import annotations

from collections.abc import Callable

from gptqmodel import GPTQModel, QuantizeConfig
from job import Job, run

BATCH = 8
"""Rows that go through the model together, as quire has it."""


def method(act_order: bool, group: int = 64) -> Callable[[Job], None]:
    """GPTQ to 4 bits; without act-order the tool still orders whole groups by activation, as it does by default."""

    def make(job: Job) -> None:
        config = QuantizeConfig(bits=4, group_size=group, desc_act=act_order, device="cpu")
        model = GPTQModel.load(job.source, config)
        model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in job.rows], batch_size=BATCH)
        model.save(job.out)

    return make


METHODS = {"gptq4_g64": method(act_order=False), "gptq4_act_order": method(act_order=True)}

if __name__ == "__main__":
    run(METHODS)
