"""Sparse files of compressed-tensors: 2:4 and any pattern, of bf16, float8 and int8 numbers, and damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import foreign_weights as foreign
from oracle import BACKENDS, logits, relative_error
from paged_model import Paged, prompt
from quantized_checkpoints import load
from quire.core.errors import ModelError
from quire.model.describe import describe
from quire.quant.base import QuantScheme
from quire.quant.dense import Dense
from quire.quant.sparse import Sparse
from torch_weights import load_torch

NUMBERS = ("dense", "float8", "int8")
FORMATS = {True: "sparse-24-bitmask", False: "sparse-bitmask"}


def pruned(w: Tensor, halves: bool) -> Tensor:
    """The mask of the two largest of every four neighbours, or of the largest third of all."""
    if not halves:
        return w.abs() >= w.abs().flatten().kthvalue(w.numel() * 2 // 3).values
    best = w.abs().view(-1, 4).topk(2).indices
    return torch.zeros(w.numel() // 4, 4, dtype=torch.bool).scatter_(1, best, True).view(w.shape)


def packed(w: Tensor, halves: bool) -> foreign.Parts:
    """`w` as compressed-tensors' Sparse24BitMaskCompressor or BitmaskCompressor writes it."""
    mask = pruned(w.float(), halves)
    raw = w.view(torch.int8) if w.dtype.itemsize == 1 else w
    numbers = raw[mask].view(w.dtype)
    parts = {
        "compressed": numbers.view(w.shape[0], -1) if halves else numbers,
        "bitmask": torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little")),
        "shape": torch.tensor(w.shape).reshape(-1, 1),
    }
    return parts if halves else parts | {"row_offsets": mask.sum(1).cumsum(0) - mask.sum(1)}


def config(kind: str, halves: bool) -> dict[str, Any]:
    """`quantization_config` of such a file."""
    sparsity = {"format": FORMATS[halves], "sparsity_structure": "2:4" if halves else "unstructured", "ignore": []}
    if kind == "dense":
        groups = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense"}
    elif kind == "int8":
        groups = foreign.compressed_config("int-quantized", num_bits=8, symmetric=True, strategy="channel")
    else:
        groups = foreign.compressed_config("float-quantized", num_bits=8, type="float", strategy="channel")
    return groups | {"sparsity_config": sparsity}


def converted(w: Tensor, kind: str, halves: bool) -> tuple[foreign.Parts, Tensor]:
    """Tensors on disk, and their numbers."""
    if kind == "dense":
        return packed(w.bfloat16(), halves), w.bfloat16().float() * pruned(w.bfloat16().float(), halves)
    most = 127.0 if kind == "int8" else 448.0
    scales = w.abs().amax(1, keepdim=True) / most
    codes = (w / scales).round().to(torch.int8) if kind == "int8" else (w / scales).to(torch.float8_e4m3fn)
    mask = pruned(codes.float(), halves)
    return packed(codes, halves) | {"weight_scale": scales}, codes.float() * mask * scales


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("kind", NUMBERS)
def test_logits(kind: str, halves: bool, tmp_path: Path) -> None:
    oracle = foreign.replace_linears(tmp_path, config(kind, halves), lambda w: converted(w, kind, halves))
    tokens = prompt(19, 1)
    for name in BACKENDS:
        model = load(tmp_path, name, dtype="float32", **{"activations": "int16"} if kind == "int8" else {})
        (got,) = Paged(model, [tokens]).run([[19]])
        assert relative_error(got, logits(oracle, tokens)) < (1e-3 if kind == "int8" else 1e-5)
    assert any("run dense" in note for note in model.notes)
    facts = describe(str(tmp_path))
    assert facts.scheme.startswith("2:4 " if halves else "sparse ") and facts.parameters == oracle.num_parameters()


def test_damaged_parts_are_refused() -> None:
    w = torch.randn(8, 16)
    scheme: QuantScheme = Sparse(Dense(), True)
    parts = packed(w, True)
    assert torch.equal(load_torch(scheme, parts, torch.float32).dequantize(), w * pruned(w, True))
    uneven, fewer = parts["bitmask"].clone(), parts["bitmask"].clone()
    uneven[0, 0] = 0b00010111  # three of the first four, one of the next
    fewer[0, 0] &= 0b11110000
    for change, message in (
        ({"shape": torch.tensor([8, 24])}, "shape is"),
        ({"bitmask": fewer}, "places"),
        ({"bitmask": uneven}, "two places in every four"),
        ({"bitmask": parts["bitmask"].int()}, "bitmask is int32"),
    ):
        with pytest.raises(ModelError, match=message):
            load_torch(scheme, {**parts, **change}, torch.float32)
