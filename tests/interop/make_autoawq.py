"""What AutoAWQ writes."""

from __future__ import annotations

from pathlib import Path

import torch
from awq import AutoAWQForCausalLM
from tiny import calibration, record, run, write_model
from transformers import PreTrainedTokenizerFast


def make(out: Path, name: str) -> None:
    source = write_model(out / f"{name}.source")
    model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", torch_dtype=torch.float32)
    texts = [text["input_ids"] for text in calibration()]
    config = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    model.quantize(tokenizer, quant_config=config, calib_data=texts, max_calib_seq_len=64)
    model.save_quantized(str(out / name))
    read = AutoAWQForCausalLM.from_quantized(str(out / name), fuse_layers=False, device_map="cpu")
    record(out, name, lambda tokens: read.model(tokens, use_cache=False).logits, rounds=False)


if __name__ == "__main__":
    run({"awq4": make})
