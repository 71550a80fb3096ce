"""Export an encoder as ONNX for fastembed, and ONNX Runtime's dynamic int8 quantization of it.

    python embedding_onnx.py FOLDER OUT

OUT gets model.onnx, after the fusions that ONNX Runtime's transformers optimizer has for the type (fastembed's own
files have them), model_int8.onnx and the files of the tokenizer.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from onnx import TensorProto
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers import optimizer
from transformers import AutoModel

NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json", "vocab.txt")


class Hidden(torch.nn.Module):
    """The hidden rows of the model."""

    def __init__(self, model: torch.nn.Module, types: bool) -> None:
        super().__init__()
        self.model, self.types = model, types

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """input_ids, attention_mask, token_type_ids where there are any."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        return self.model(**dict(zip(names, inputs, strict=False))).last_hidden_state


def main(folder: Path, out: Path) -> None:
    """Write the two files."""
    out.mkdir(parents=True)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    config = model.config
    types = getattr(config, "type_vocab_size", 0) > 0
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * types
    rows = [torch.ones(2, 16, dtype=torch.long) for _ in names]
    axes = {name: {0: "batch", 1: "tokens"} for name in (*names, "last_hidden_state")}
    plain = out / "plain.onnx"
    with torch.inference_mode():
        torch.onnx.export(
            Hidden(model, types), tuple(rows), str(plain), input_names=names, output_names=["last_hidden_state"],
            dynamic_axes=axes, opset_version=17, dynamo=False,
        )  # fmt: skip
    if types:
        fused = optimizer.optimize_model(
            str(plain), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size, opt_level=1
        )
        fused.save_model_to_file(str(out / "model.onnx"))
    else:
        shutil.copy(plain, out / "model.onnx")
    plain.unlink()
    usual = {"DefaultTensorType": TensorProto.FLOAT}  # types of fused operators are not inferred
    quantize_dynamic(
        out / "model.onnx", out / "model_int8.onnx", weight_type=QuantType.QInt8, per_channel=True, extra_options=usual
    )
    for name in NAMES:
        if (folder / name).exists():
            shutil.copy(folder / name, out / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
