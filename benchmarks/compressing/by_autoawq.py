"""AutoAWQ as a measured process (see job.py)."""

from __future__ import annotations

from awq import AutoAWQForCausalLM
from job import Job, run
from transformers import AutoTokenizer


def make(job: Job) -> None:
    """AWQ to 4 bits with zeros, in groups of 64 columns."""
    model = AutoAWQForCausalLM.from_pretrained(job.source, device_map="cpu")
    config = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    tokenizer, length = AutoTokenizer.from_pretrained(job.source), len(job.rows[0])
    model.quantize(
        tokenizer, quant_config=config, calib_data=job.rows, max_calib_samples=len(job.rows), max_calib_seq_len=length
    )
    model.save_quantized(job.out)
    tokenizer.save_pretrained(job.out)


if __name__ == "__main__":
    run({"awq4": make})
