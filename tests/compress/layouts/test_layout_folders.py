"""Whole model folders in each layout answer as transformers does with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import foreign_weights as foreign
from oracle import logits, relative_error
from paged_model import Paged, prompt
from quantized_checkpoints import load
from quire.compress.layouts.base import Layout
from quire.compress.layouts.bitsandbytes import BitsAndBytesLayout
from quire.compress.layouts.compressed_tensors import CompressedTensorsLayout
from quire.compress.layouts.gptq import GptqLayout
from quire.compress.layouts.registry import LAYOUTS
from quire.ops.weights import Weight
from quire.quant.codebook import NF4
from quire.quant.registry import QUANTIZERS
from torch_weights import quantize_torch


def by_rows(w: Tensor) -> Weight:
    """Symmetric int8 with a scale a row."""
    codes, zeros, scales = foreign.quantize(w, 8, -1, True, torch.float32)
    return Weight("int8", (codes - zeros[0, 0]).to(torch.int8), scales, group=w.shape[1])


CHECKPOINTS: dict[str, tuple[Layout, Callable[[Tensor], Weight]]] = {
    "gptq": (GptqLayout(), lambda w: quantize_torch(QUANTIZERS["int4"], w, 64).weight),
    "awq": (LAYOUTS["awq"], lambda w: quantize_torch(QUANTIZERS["int4"], w, 64).weight),
    "compressed-tensors": (CompressedTensorsLayout(), lambda w: by_rows(w)),
    "bitsandbytes": (BitsAndBytesLayout(double=False), lambda w: quantize_torch(NF4, w, 64).weight),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_whole_checkpoints_load(name: str, tmp_path: Path) -> None:
    """A folder written in each layout answers as transformers does with the same numbers."""
    layout, quantize = CHECKPOINTS[name]
    example = {"model.layers.0.mlp.up_proj": quantize(torch.randn(256, 256))}

    def convert(w: Tensor) -> tuple[foreign.Parts, Tensor]:
        weight = quantize(w)
        parts = {n.removeprefix("x."): t for n, t in layout.tensors("x", weight).items()}
        return parts, weight.dequantize()

    model = foreign.replace_linears(tmp_path, layout.config(example), convert)
    ours, tokens = load(tmp_path, dtype="float32"), prompt(19, 1)
    got = Paged(ours, [tokens]).run([[len(tokens)]])[0]
    limit = 0.05 if name == "compressed-tensors" else 1e-3  # activations of 8 bits; of 16
    assert relative_error(got, logits(model, tokens)) <= limit


def test_transformers_reads_the_configs() -> None:
    from transformers.quantizers.auto import AutoQuantizationConfig

    w, dense = torch.randn(64, 128), {"lm_head": Weight("bf16", torch.ones(2, 2).bfloat16())}
    four = {"a": quantize_torch(QUANTIZERS["int4"], w, 64).weight} | dense
    for form in ("gptq", "gptq_v2"):
        gptq = AutoQuantizationConfig.from_dict(LAYOUTS[form].config(four))
        assert (gptq.bits, gptq.group_size, gptq.sym, gptq.desc_act, gptq.format) == (4, 64, True, False, form)
    awq = AutoQuantizationConfig.from_dict(LAYOUTS["awq"].config(four))
    assert (awq.bits, awq.group_size, awq.zero_point, awq.modules_to_not_convert) == (4, 64, True, ["lm_head"])
    nf4 = AutoQuantizationConfig.from_dict(
        LAYOUTS["bitsandbytes"].config({"a": quantize_torch(NF4, w, 64).weight} | dense)
    )
    assert nf4.load_in_4bit and nf4.bnb_4bit_quant_type == "nf4" and nf4.llm_int8_skip_modules == ["lm_head"]
    eight = AutoQuantizationConfig.from_dict(LAYOUTS["bitsandbytes"].config({"a": by_rows(w)}))
    assert eight.load_in_8bit and not eight.load_in_4bit and eight.llm_int8_threshold == 6.0
