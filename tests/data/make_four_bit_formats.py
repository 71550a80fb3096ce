"""Make four_bit_formats.safetensors with bitsandbytes and compressed-tensors: one matrix per format.

    pip install bitsandbytes==0.50.2 compressed-tensors==0.20.0 && python tests/data/make_four_bit_formats.py OUTPUT

Each matrix comes with the float32 values that its maker's own dequantization gives (`NAME.values`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor

ROWS, COLUMNS = 12, 128


def four_bits(w: Tensor, kind: str, nested: bool) -> dict[str, Tensor]:
    """What a Linear4bit saves, and its values."""
    codes, state = bnb.quantize_4bit(w, blocksize=64, compress_statistics=nested, quant_type=kind)
    parts = {f"weight.{name}": t for name, t in state.as_dict(packed=True).items()}
    return {"weight": codes, **parts, "values": bnb.dequantize_4bit(codes, state)}


def eight_bits(w: Tensor) -> dict[str, Tensor]:
    """What a Linear8bitLt saves, and its values."""
    codes, scales, _ = bnb.int8_vectorwise_quant(w.half())
    return {"weight": codes, "SCB": scales, "values": bnb.int8_vectorwise_dequant(codes, scales).float()}


def floats(w: Tensor, group: int) -> dict[str, Tensor]:
    """What compressed-tensors packs as MXFP4 (groups of 32) or NVFP4 (of 16), and its values."""
    strategy = "group" if group == 32 else "tensor_group"
    dtype = torch.uint8 if group == 32 else torch.float8_e4m3fn
    args = QuantizationArgs(
        num_bits=4, type="float", strategy=strategy, group_size=group, symmetric=True, scale_dtype=dtype
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    top = w.view(ROWS, -1, group).abs().amax(-1)
    state = {"weight": w}
    if group == 32:
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(top)) - 2)
        maker = MXFP4PackedCompressor
    else:
        state["weight_global_scale"] = (448.0 * 6.0 / w.abs().max()).reshape(1)
        state["weight_scale"] = (top / 6.0 * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        maker = NVFP4PackedCompressor
    parts = maker.compress(state, scheme)
    return {**parts, "values": maker.decompress(dict(parts), scheme)["weight"].float()}


def main() -> None:
    """Write the file named on the command line."""
    w = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.05
    made = {
        "nf4": four_bits(w, "nf4", False), "nf4-nested": four_bits(w, "nf4", True), "fp4": four_bits(w, "fp4", False),
        "fp4-nested": four_bits(w, "fp4", True), "int8": eight_bits(w), "mxfp4": floats(w, 32), "nvfp4": floats(w, 16),
    }  # fmt: skip
    tensors = {f"{name}.{part}": t.contiguous() for name, parts in made.items() for part, t in parts.items()}
    save_file(tensors, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
