"""The launches of products, experts and sampling that `benchmarks/compile_kernels.py` compiles: as the launchers make
them for matrices of Llama-3.1-8B's size, written down instead of run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.gpu import Gpu
from quire.ops.moe import Grouped, Routing
from quire.ops.runtime import Immediate
from quire.ops.sampling import DRAW, QUERY, RowEdits
from quire.ops.triton import linear, linear_kernels, moe, moe_kernels, sampling, sampling_kernels
from quire.ops.triton.pack import E2M1_TABLE, pack
from quire.ops.triton.variants import Variant
from quire.ops.weights import Weight

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.uint8: "*u8", torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
KERNELS: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (linear_kernels, ("dense_kernel", "grouped_kernel", "scaled_kernel")),
    (linear_kernels, ("sum_segments", "quantize_kernel", "sum_groups")),
    (moe_kernels, ("route_kernel", "sort_kernel", "combine_kernel", "swiglu_kernel", "sigmoid_kernel")),
    (sampling_kernels, ("sample_kernel", "logprobs_kernel", "penalize_kernel")),
)  # fmt: skip


FORMS_OF_TILES = ("f32", "bf16", "int4 g128", "int8 g128", "fp8 g128")
"""One form for each file of tiles in `configs`."""
SMALL = ("sum_segments", "sum_groups")
"""Kernels that are the same for all forms."""


class _Launch:
    """Stands for a kernel and writes its launches down."""

    def __init__(self, kernel: Any, label: list[str], found: dict[str, Variant]) -> None:
        self._kernel, self._label, self._found = kernel, label, found

    def __getitem__(self, grid: tuple[int, ...]) -> _Launch:
        return self

    def __call__(self, *args: Any, **named: Any) -> None:
        warps, stages = named.pop("num_warps", 4), named.pop("num_stages", 3)
        values = dict(zip(self._kernel.arg_names, args, strict=False)) | named
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        aligned = []
        for p in self._kernel.params:
            value = values[p.name]
            if p.is_constexpr or value is None or (type(value) is int and value == 1 and not p.do_not_specialize):
                constants[p.name] = value
                continue
            signature[p.name] = TYPES[value.dtype] if isinstance(value, Tensor) else _scalar(value)
            if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0 and not p.do_not_specialize):
                aligned.append(p.name)
        name = self._kernel.__name__.removesuffix("_kernel")
        name = name if name in SMALL else f"{name} {self._label[0]}"
        targets = ("sm_90",) if "*fp8e4nv" in signature.values() else ()
        made = Variant(name, self._kernel, signature, constants, warps, stages, tuple(aligned), targets)
        self._found.setdefault(name, made)


def _scalar(value: float) -> str:
    return "fp32" if isinstance(value, float) else "i32"


@contextmanager
def _written_down(label: list[str], found: dict[str, Variant]) -> Iterator[None]:
    kept = [(module, name, getattr(module, name)) for module, names in KERNELS for name in names]
    for module, name, kernel in kept:
        setattr(module, name, _Launch(kernel, label, found))
    try:
        yield
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)


def weights(n: int, k: int) -> Iterator[tuple[str, Weight]]:
    """A matrix [n, k] in every form, with all parts that the form can have."""

    def codes(dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.zeros((n, k), dtype=dtype)

    def parts(group: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.zeros((n, k // group), dtype=dtype)

    table = torch.arange(16, dtype=torch.int16)
    yield "f32", Weight("f32", codes(torch.float32))
    yield "bf16", Weight("bf16", codes(torch.bfloat16))
    for group in (32, 128):
        yield f"int4 g{group}", Weight("int4", codes(), parts(group), group=group)
    yield "int4 g128 zeros", Weight("int4", codes(), parts(128), parts(128, torch.int8), 128)
    yield "int4 g32 mins", Weight("int4", codes(), parts(32), group=32, mins=parts(32))
    yield "table4 g64", Weight("table4", codes(), parts(64, torch.float32), group=64, table=table)
    powers = torch.tensor(E2M1_TABLE, dtype=torch.int16)
    yield "e2m1 g32", Weight("table4", codes(), parts(32, torch.float32), group=32, table=powers)
    yield "int8 g128", Weight("int8", codes(), parts(128), group=128, activation_bits=16)
    yield "int8 both g128", Weight("int8", codes(), parts(128), group=128)
    yield "int8 both rows", Weight("int8", codes(), parts(k), group=k)
    yield "fp8 g128", Weight("fp8", codes(torch.float8_e4m3fn), parts(128, torch.float32), group=128)
    yield "fp8 rows", Weight("fp8", codes(torch.float8_e4m3fn), parts(k, torch.float32), group=k)


def VARIANTS() -> list[Variant]:
    """Every kernel of products, experts and sampling, with each tile of `configs`."""
    gpu, label, found = Gpu(torch.device("cpu"), "", False, Immediate()), [""], dict[str, Variant]()
    with _written_down(label, found):
        for name, weight in weights(4096, 4096):
            packed = pack(gpu, weight)
            for m in (1, 64, 1024) if name in FORMS_OF_TILES else (1, 1024):
                label[0] = f"{name} m{m}"
                x = torch.zeros((m, 4096), dtype=torch.float32 if name == "f32" else torch.bfloat16)
                linear.linear(gpu, x, packed, None)
        for name, weight in weights(8 * 256, 1024):
            if name not in FORMS_OF_TILES:
                continue
            label[0] = f"experts {name}"
            offsets, tokens = torch.zeros((1, 9), dtype=torch.int32), torch.zeros((16, 2), dtype=torch.int32)
            grouped = Grouped(pack(gpu, replace(weight)), 8, 256, torch.zeros(8, 256))
            linear.grouped_linear(gpu, torch.zeros((16, 1024), dtype=torch.bfloat16), grouped, tokens, offsets)
        _others(gpu, label)
    return list(found.values())


def _others(gpu: Gpu, label: list[str]) -> None:
    """Kernels without weights."""
    for routing in (Routing(128, 8, renormalize=True), Routing(256, 8, "sigmoid", True, 2.5, 8, 4, 2),
                    Routing(16, 2, "sparsemixer", jitter=0.01)):  # fmt: skip
        label[0] = f"{routing.score} {routing.experts}"
        moe.route(gpu, torch.zeros(4, routing.experts), torch.zeros(routing.experts), routing)
    label[0] = "bf16"
    ids = torch.zeros((32, 8), dtype=torch.int32)
    moe.sort_by_expert(gpu, ids, 128)
    wide = torch.zeros((256, 4096), dtype=torch.bfloat16)
    moe.combine(gpu, wide, ids, torch.zeros(32, 8))
    moe.clamped_swiglu(gpu, wide, 1.702, 7.0)
    moe.scale_by_sigmoid(gpu, wide, torch.zeros(256, 1, dtype=torch.bfloat16))
    label[0] = "128k"
    logits = torch.zeros(1, 128256)
    sampling.sample(gpu, logits, np.zeros(1, DRAW))
    sampling.top_logprobs(gpu, logits, np.zeros(1, QUERY), 5)
    sampling.penalize(gpu, logits, [RowEdits(0, banned=np.zeros(1, np.int32))])
