"""Products of the GPU backend under the interpreter: rows alone and in batches, float8, what is refused, tiles."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from often import one_of
from op_cases.weights import normal, random_weight
from quire.core.errors import ConfigError
from quire.ops.op import REGISTRY
from quire.ops.triton.backend import GpuOps
from quire.ops.triton.gpu import CONFIGS
from quire.ops.weights import Weight, plain_packed
from quire.quant.float8 import FP8
from quire.quant.fp8 import Fp8
from torch_weights import load_torch, quantize_torch
from triton_ops import HAS_TRITON, TRITON_OPS, close, gpu_ops, needs_triton, reference

pytestmark = needs_triton
if HAS_TRITON:
    from quire.ops.triton.backend import GpuOps
N, K = 75, 2304
"""Few enough rows that columns are walked in two runs, which programs of small batches share."""


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def weight(form: str) -> Weight:
    g, (kind, *options) = generator(), form.split()
    if kind == "fp8":
        w = quantize_torch(FP8, normal(g, N, K), 128).weight
        rows = Weight("fp8", w.codes, w.scales[:, :1].contiguous(), group=K) if w.scales is not None else w
        return rows if "rows" in options else w
    group = K if "rows" in options else 64
    return random_weight(g, kind, N, K, group, "zeros" in options, 16 if "a16" in options else 8)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "form", one_of(3, ["bf16", "f32", "table4", "int4 zeros", "int8 a16", "int8", "fp8 rows", "int8 rows", "fp8"])
)
def test_a_row_does_not_depend_on_the_batch(form: str) -> None:
    ops, g, w = gpu_ops(), generator(), weight(form)
    packed, x, bias = ops.pack(w), normal(g, 66, K), normal(g, N).to(ops.gpu.device)
    x = x.to(ops.gpu.device)
    whole = ops.linear(x, packed, bias)
    for m in (1, 17, 65):
        for first in {0, 66 - m}:
            part = ops.linear(x[first : first + m].contiguous(), packed, bias)
            assert torch.equal(part, whole[first : first + m]), (m, first)


@pytest.mark.parametrize("form", ["fp8", "fp8 rows", "int8 rows"])
def test_rounded_activations_equal_the_definition(form: str) -> None:
    ops, w, x = gpu_ops(), weight(form), normal(generator(), 9, K)
    found = ops.linear(x.to(ops.gpu.device), ops.pack(w), None).cpu()
    close(form, found, reference().linear(x, plain_packed(w), None), 2e-5)


@pytest.mark.parametrize(("block", "shape"), [(None, (200, 1)), (None, (1,)), ((128, 64), (2, 4))])
def test_float8_files_keep_their_numbers(block: tuple[int, int] | None, shape: tuple[int, ...]) -> None:
    g, scheme = generator(), Fp8("scale", block)
    raw = {"weight": normal(g, 200, 256).to(torch.float8_e4m3fn), "scale": torch.rand(shape, generator=g) + 0.1}
    kept = load_torch(scheme, raw, torch.bfloat16, 8)
    assert kept.weight.kind == "fp8" and torch.equal(
        kept.dequantize(), load_torch(scheme, raw, torch.float32).dequantize()
    )
    assert load_torch(scheme, raw, torch.bfloat16, 0).weight.kind == "bf16"
    assert (
        load_torch(Fp8("scale", (128, 48)), raw | {"scale": torch.ones(2, 6)}, torch.bfloat16, 8).weight.kind == "bf16"
    )


def test_float16_matrices_are_multiplied_in_float16() -> None:
    ops, g = gpu_ops(), generator()
    w, x = Weight("f16", normal(g, 40, 100).half()), normal(g, 5, 100).half()
    found = ops.linear(x.to(ops.gpu.device), ops.pack(w), None).cpu()
    close("f16", found.float(), reference().linear(x.float(), plain_packed(w), None), 1e-3)


def test_nan_activations_stay_visible() -> None:
    ops, x = gpu_ops(), torch.ones(2, K)
    x[1, 5] = torch.nan
    for form in ("bf16", "int4 zeros", "int8", "fp8 rows"):
        out = ops.linear(x.to(ops.gpu.device), ops.pack(weight(form)), None)
        assert not out[0].isnan().any() and out[1].isnan().all(), form


def test_float8_of_a_weight_is_within_an_eighth_of_its_size() -> None:
    w = normal(generator(), 20, 256)
    made = quantize_torch(FP8, w, 64).dequantize()
    assert ((made - w).abs() <= w.abs() / 16 + w.abs().max() / 448 / 2**6).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "int3"}, "known kinds"),
        ({"group": 48}, "not in groups of one of"),
        ({"codes": torch.full((4, 64), 9, dtype=torch.int8)}, "outside -8..7"),
        ({"kind": "fp8", "group": 48}, "a scale for 48"),
        ({"kind": "bf16"}, "its values are torch.int8"),
    ],
)
def test_a_weight_that_cannot_be_packed_is_refused(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"kind": "int4", "codes": torch.zeros(4, 64, dtype=torch.int8), "group": 32}
    with pytest.raises(ConfigError, match=message):
        gpu_ops().pack(Weight(**(fields | {"scales": torch.ones(4, 2).half()} | change)))


@pytest.mark.parametrize("form", ["f32", "f16", "int4", "int8", "scaled"])
def test_steps_along_the_columns_are_the_same_for_all_batches(form: str) -> None:
    devices: dict[str, set[int]] = {}
    for row in json.loads((CONFIGS / f"linear_{form}.json").read_text()):
        devices.setdefault(row.get("device", ""), set()).add(row["use"].get("bk", 0))
    assert all(len(steps) == 1 for steps in devices.values())


def test_the_vendors_library_can_multiply_unquantized_matrices() -> None:
    missing = tuple(f"{name}=reference" for name in REGISTRY if name not in TRITON_OPS)
    ops, g = GpuOps(gpu_ops().gpu, ("linear=cublas", *missing)), generator()
    for form in ("f32", "bf16", "int4 zeros"):
        packed, x, bias = ops.pack(weight(form)), normal(g, 3, K).to(ops.gpu.device), normal(g, N).to(ops.gpu.device)
        close(form, ops.linear(x, packed, bias).cpu(), gpu_ops().linear(x, packed, bias).cpu(), 2e-3)
    assert ops.chosen["linear"] == "cublas"
    with pytest.raises(ConfigError, match="not on the triton backend, where embedding is reference or triton"):
        GpuOps(gpu_ops().gpu, ("embedding=cublas",))
