"""Checkpoints as programs that quantize write them, beside the plain models with the same numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import foreign_weights as foreign
from oracle import backend
from quire.core.config import flat_config
from quire.model.build import Model, load_model
from quire.model.disk.hf_config import HfConfig
from quire.quant.codebook import CodeBook
from quire.quant.registry import detect
from torch_weights import quantize_torch

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Format:
    """A way to quantize, its packer, its quantization_config, and the kernels' format it must become."""

    label: str
    bits: int
    group: int
    symmetric: bool
    pack: foreign.Packer
    config: dict[str, Any]
    dtype: torch.dtype = F16

    @property
    def becomes(self) -> str:
        """The kernels' format; no recipe here rounds activations, so they keep 16 bits."""
        return f"int{self.bits} g{128 if self.group == -1 else self.group} a16"

    def convert(self, w: Tensor) -> tuple[foreign.Parts, Tensor]:
        codes = foreign.quantize(w, self.bits, self.group, self.symmetric, self.dtype)
        return self.pack(*codes), foreign.dequantize(*codes)


def gptq(bits: int, group: int, symmetric: bool, form: str, **fields: Any) -> Format:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    pack = foreign.gptq(bits, group, form != "gptq_v2")
    return Format(
        f"gptq {bits} {group} {form}", bits, group, symmetric, pack, config | {"checkpoint_format": form} | fields
    )


def awq(group: int) -> Format:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Format(f"awq {group}", 4, group, False, foreign.awq, config)


def compressed(form: str, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> Format:
    pack = (foreign.packed if form == "pack-quantized" else foreign.plain)(bits, symmetric)
    how = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    config = foreign.compressed_config(form, num_bits=bits, type="int", symmetric=symmetric, **how)
    return Format(f"{form} {bits} {group} {symmetric}", bits, group, symmetric, pack, config, dtype)


FORMATS = [
    gptq(4, 128, True, "gptq"),
    gptq(4, 64, False, "gptq_v2"),
    gptq(4, 32, True, "gptq_v2"),
    gptq(8, 32, False, "gptq_v2"),
    gptq(8, 128, True, "gptq"),
    gptq(4, -1, True, "gptq"),
    awq(128),
    awq(64),
    awq(32),
    compressed("pack-quantized", 4, 128, True, BF16),
    compressed("pack-quantized", 4, 32, False, F16),
    compressed("pack-quantized", 8, -1, True, F32),
    compressed("pack-quantized", 8, 64, False, BF16),
    compressed("int-quantized", 8, -1, True, BF16),
    compressed("int-quantized", 8, -1, False, F16),
    compressed("int-quantized", 4, 64, True, F16),
]


def scheme_of(config: dict[str, Any], *names: str) -> Any:
    return detect(names, HfConfig(config, "config.json: quantization_config"))


def load(folder: Path, name: str = "reference", **options: Any) -> Model:
    return load_model(flat_config(model=str(folder), **options), backend(name))


def normal(n: int = 48, k: int = 256) -> Tensor:
    return torch.randn((n, k), generator=torch.Generator().manual_seed(n)) * 0.05


COMPRESSED = FORMATS[9].config
REFUSED = [
    ({"quant_method": "bitsandbytes"}, "load_in_4bit: and load_in_8bit are both false"),
    ({"quant_method": "quip"}, "quant_method: 'quip' cannot be read; known: gptq, awq"),
    ({"bits": 4}, "quant_method: is missing"),
    (FORMATS[0].config | {"bits": 9}, "bits: is 9, needs an integer from 2 to 8"),
    (FORMATS[0].config | {"bits": "4"}, "bits: is '4'"),
    (FORMATS[0].config | {"group_size": 0}, "group_size: is 0"),
    (FORMATS[0].config | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
    (FORMATS[6].config | {"bits": 8}, "bits: is 8, only 4"),
    (FORMATS[6].config | {"version": "gemv"}, "version: 'gemv'"),
    (FORMATS[6].config | {"version": None, "format": "gemv_fast"}, "version: 'gemv_fast'"),
    (FORMATS[6].config | {"zero_point": "no"}, "zero_point: is 'no'"),
    (COMPRESSED | {"format": "marlin-24"}, "format: 'marlin-24' of int"),
    (COMPRESSED | {"config_groups": {}}, "config_groups: is empty"),
    (COMPRESSED | {"transform_config": {"config_groups": {}}}, "transform_config"),
    (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: format: 'sparse-24"),
    (COMPRESSED | {"config_groups": {"a": {"input_activations": {"num_bits": 8}}}}, "weights: is missing"),
    (foreign.compressed_config("pack-quantized", num_bits=1, strategy="channel"), "weights: num_bits: is 1"),
    (foreign.compressed_config("int-quantized", num_bits=8, strategy="token"), "strategy: 'token'"),
    (foreign.compressed_config("mxfp9-quantized", num_bits=8, type="float", strategy="group"), "format"),
    (foreign.compressed_config("float-quantized", num_bits=4, type="float", strategy="group"), "float of 4 bits"),
]  # fmt: skip


def float8(w: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, scales per block, values) of w [n, k]."""
    n, k = w.shape
    scales = torch.empty(-(-n // rows), -(-k // columns))
    values, codes = torch.empty(n, k), torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = w[at].abs().max() / 448
            codes[at] = (w[at] / scales[i, j]).to(torch.float8_e4m3fn)
            values[at] = (codes[at].double() * scales[i, j].double()).float()
    return codes, scales, values


def bits_and_bytes(book: CodeBook, w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix as bitsandbytes keeps it, and its values."""
    q = quantize_torch(book, w, 64).weight
    values = q.dequantize()
    assert q.scales is not None
    state = {"quant_type": book.name, "blocksize": 64, "shape": list(w.shape), "dtype": "float32"}
    return {
        "weight": (q.codes[:, 0::2] << 4 | q.codes[:, 1::2]).view(torch.uint8).reshape(-1, 1),
        "weight.absmax": q.scales.float().flatten() * book.unit,
        "weight.quant_map": q.table.float() / book.unit,  # type: ignore[union-attr]
        f"weight.quant_state.bitsandbytes__{book.name}": torch.tensor(list(json.dumps(state).encode())).byte(),
    }, values
