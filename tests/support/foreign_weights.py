"""Packers of other programs' weight formats, written from their sources, and checkpoints made with them.

A packer takes codes [n, k] and zeros [n, groups], both unsigned int64, and scales [n, groups]; it returns a linear
layer's tensors on disk. Slow loops on purpose: nothing here is shared with the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from oracle import edit_config, write

Parts = dict[str, Tensor]
Packer = Callable[[Tensor, Tensor, Tensor], Parts]
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}


def quantize(w: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, zeros, scales) of w [n, k] f32: group minima and maxima at the ends of the range."""
    groups = w.reshape(w.shape[0], -1, w.shape[1] if group == -1 else group)
    top, half = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        scales = (groups.abs().amax(-1) / (half - 1)).to(dtype)
        zeros = torch.full(scales.shape, half)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / top).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, top).long()
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, top).long().flatten(1), zeros, scales


def dequantize(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """(codes - zeros) * scales in float64, rounded once to float32."""
    groups = codes.view(*zeros.shape, -1) - zeros[..., None]
    return (groups.double() * scales.double()[..., None]).flatten(1).float()


def words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned values [r, c] as int32 [r, c * bits / 32]; slot i of a word takes value `order[i]` of its own."""
    per = 32 // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % per))
    out = torch.zeros((values.shape[0], values.shape[1] // per), dtype=torch.int64)
    for word in range(out.shape[1]):
        for slot, at in enumerate(order or range(per)):
            out[:, word] |= values[:, word * per + at] << (bits * slot)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).int()


def gptq(bits: int, group: int, first: bool = True) -> Packer:
    """auto-gptq's QuantLinear.pack; `first`: checkpoint format v1 (zeros less one)."""

    def pack(codes: Tensor, zeros: Tensor, scales: Tensor) -> Parts:
        k = codes.shape[1]
        return {
            "qweight": words(codes, bits).t().contiguous(),
            "qzeros": words(zeros.t() - int(first), bits),
            "scales": scales.t().contiguous(),
            "g_idx": (torch.arange(k) // (k if group == -1 else group)).int(),
        }

    return pack


def awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> Parts:
    """AutoAWQ's WQLinear_GEMM.from_linear."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(codes.t(), 4, order),
        "qzeros": words(zeros.t(), 4, order),
        "scales": scales.t().contiguous(),
    }


def packed(bits: int, symmetric: bool) -> Packer:
    """compressed-tensors' PackedQuantizationCompressor."""

    def pack(codes: Tensor, zeros: Tensor, scales: Tensor) -> Parts:
        parts = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
        return parts if symmetric else parts | {"weight_zero_point": words(zeros.t(), bits).t().contiguous()}

    return pack


def plain(bits: int, symmetric: bool) -> Packer:
    """compressed-tensors' IntQuantizationCompressor."""

    def pack(codes: Tensor, zeros: Tensor, scales: Tensor) -> Parts:
        half = 1 << (bits - 1)
        parts = {"weight": (codes - half).to(torch.int8), "weight_scale": scales}
        return parts if symmetric else parts | {"weight_zero_point": (zeros - half).to(torch.int8)}

    return pack


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    """A compressed-tensors quantization_config with one group of layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}  # fmt: skip


def replace_linears(
    folder: Path,
    config: dict[str, Any],
    convert: Callable[[Tensor], tuple[Parts, Tensor]],
    dense: tuple[str, ...] = (),
    family: str = "llama",
) -> PreTrainedModel:
    """Write a tiny model of `family`; its projections but `dense` are what `convert(w)` gives: (tensors, values).

    Returns transformers' model with these values.
    """
    model = write(folder, family, **SHAPE)
    file, own = folder / "model.safetensors", model.state_dict()
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith("_proj.weight") and n not in dense]:
        parts, values = convert(tensors.pop(name).float())
        tensors |= {name.removesuffix("weight") + suffix: t.contiguous() for suffix, t in parts.items()}
        own[name].copy_(values)
    save_file(tensors, file, metadata={"format": "pt"})
    edit_config(folder, quantization_config=config)
    return model
