"""What AutoAWQ writes. The answers are those of the numbers that it makes of its files: its products need a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from awq import AutoAWQForCausalLM
from read_autoawq import plain
from tiny import calibration, record, run, write_model
from transformers import PreTrainedTokenizerFast

GROUP = 64


def make(out: Path, name: str) -> None:
    source = write_model(out / f"{name}.source")
    model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", torch_dtype=torch.float32)
    config = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
    tokenizer, texts = PreTrainedTokenizerFast.from_pretrained(source), [text["input_ids"] for text in calibration()]
    model.quantize(tokenizer, quant_config=config, calib_data=texts, max_calib_seq_len=64)
    model.save_quantized(str(out / name))
    read = plain(source, out / name, GROUP)
    record(out, name, lambda tokens: read(tokens, use_cache=False).logits)


if __name__ == "__main__":
    run({"awq4": make})
