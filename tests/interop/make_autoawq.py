"""What AutoAWQ writes. The answers are those of the numbers that it makes of its files: its products need a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from awq import AutoAWQForCausalLM
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file
from tiny import calibration, record, run, write_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

GROUP = 64


def make(out: Path, name: str) -> None:
    source = write_model(out / f"{name}.source")
    model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", torch_dtype=torch.float32)
    config = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
    tokenizer, texts = PreTrainedTokenizerFast.from_pretrained(source), [text["input_ids"] for text in calibration()]
    model.quantize(tokenizer, quant_config=config, calib_data=texts, max_calib_seq_len=64)
    model.save_quantized(str(out / name))
    tensors = load_file(out / name / "model.safetensors")
    for base in [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]:
        words, zeros, scales = (tensors.pop(f"{base}.{part}") for part in ("qweight", "qzeros", "scales"))
        tensors[f"{base}.weight"] = dequantize_gemm(words, zeros, scales.float(), 4, GROUP).t().contiguous()
    read = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    read.load_state_dict(tensors, strict=True)
    record(out, name, lambda tokens: read(tokens, use_cache=False).logits)


if __name__ == "__main__":
    run({"awq4": make})
