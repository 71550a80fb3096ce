"""Rounding to grids: against brute force, torch's casts, bitsandbytes' own files and the quantizers at load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from oracle import BACKENDS, backend, relative_error
from over_torch import over_torch
from paths import DATA
from quire.compress.quantize import fp4, fp8
from quire.compress.quantize.gptq import gptq
from quire.compress.quantize.rounding import (
    CodeBookGrid,
    Grid,
    IntegerGrid,
    clip_candidates,
    for_kernels,
    in_groups,
    output_error_measure,
    rtn,
    weighted_squares,
)
from quire.core.errors import ConfigError, ModelError
from quire.ops.arrays import to_numpy
from quire.ops.weights import Weight
from quire.quant.codebook import MXFP4, NF4
from quire.quant.packed import powers_of_two
from quire.quant.rtn import INT4, INT8, RoundToNearest
from torch_weights import quantize_torch

MADE = load_file(DATA / "four_bit_formats.safetensors")
"""By bitsandbytes and compressed-tensors themselves: data/make_four_bit_formats.py."""
THEIRS = torch.randn(12, 128, generator=torch.Generator().manual_seed(0)) * 0.05
"""What they were made of."""


def normal(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn((n, k), generator=torch.Generator().manual_seed(seed)) * 0.05


def scales_of(weight: Weight) -> Tensor:
    assert weight.scales is not None
    return weight.scales


def squared(weight: Weight, w: Tensor, group: int) -> Tensor:
    return (weight.dequantize() - w).square().view(len(w), -1, group).sum(-1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_every_code_is_the_nearest(bits: int, symmetric: bool) -> None:
    grid, w = IntegerGrid(bits, symmetric), normal(9, 96) + 0.02
    q = rtn(w, grid, 32)
    zeros = torch.zeros_like(scales_of(q)) if q.zeros is None else q.zeros
    all_codes = torch.arange(grid.low, grid.high + 1)
    numbers = (all_codes - zeros.float()[..., None]) * scales_of(q).float()[..., None]  # [n, g, codes]
    off = (w.view(9, 3, 32, 1) - numbers[:, :, None]).abs()
    chosen = (q.dequantize() - w).abs().view(9, 3, 32)
    assert torch.allclose(chosen, off.amin(-1), atol=1e-6)
    assert int(q.codes.min()) >= grid.low and int(q.codes.max()) <= grid.high
    assert q.kind == ("int4" if bits <= 4 else "int8")


@pytest.mark.parametrize("scheme", [INT4, INT8])
@pytest.mark.parametrize("group", [32, 128])
def test_numbers_are_those_of_the_quantizers_at_load(scheme: RoundToNearest, group: int) -> None:
    w, grid = normal(70, 256), IntegerGrid(scheme.bits)
    theirs = quantize_torch(scheme, w, group).weight
    fast, slow = rtn(w, grid, group), rtn(w, grid, group, lambda errors: errors.square().sum(-1))
    assert torch.equal(fast.codes, slow.codes) and torch.equal(scales_of(fast), scales_of(slow))
    assert torch.equal(fast.dequantize(), theirs.dequantize())
    assert scheme is INT4 or bool((scales_of(fast) > 0).all())


def test_asymmetric_groups_hold_their_extremes_and_zero() -> None:
    w = normal(8, 64).abs() + 1.0  # no number near 0, which must have a code all the same
    q = rtn(w, IntegerGrid(4, symmetric=False), 32)
    assert q.zeros is not None and bool((q.zeros == -8).all())
    assert float((q.dequantize() - w).abs().max()) <= float(scales_of(q).max()) * 0.51
    assert torch.equal(rtn(torch.zeros(2, 32), IntegerGrid(4, False), 32).dequantize(), torch.zeros(2, 32))


def test_a_search_finds_the_best_of_its_scales_for_every_group() -> None:
    w, clips = normal(16, 128, 1), clip_candidates(1.0, 0.5, 11)
    alone = torch.stack([squared(rtn(w, IntegerGrid(3, clips=(clip,)), 32), w, 32) for clip in clips])
    together = squared(rtn(w, IntegerGrid(3, clips=clips), 32), w, 32)
    assert torch.allclose(together, alone.amin(0), rtol=1e-5)
    assert float(together.sum()) < 0.9 * float(alone[0].sum())


def test_damage_may_be_that_of_columns_or_of_outputs() -> None:
    w, x = normal(16, 64, 2), normal(40, 64, 3) * torch.linspace(0.1, 5, 64)
    grid = IntegerGrid(3, clips=clip_candidates())
    errors = torch.randn((16, 2, 32), generator=torch.Generator().manual_seed(9))
    outputs = torch.stack([(errors[:, g] @ x[:, 32 * g : 32 * g + 32].t()).square().sum(1) for g in range(2)], 1)
    assert torch.allclose(output_error_measure(x, 32)(errors), outputs, rtol=1e-4)
    assert torch.allclose(
        weighted_squares(x.square().sum(0), 32)(errors).sum(), (errors.flatten(1).square() * x.square().sum(0)).sum()
    )

    def off(q: Weight) -> float:
        return float(((q.dequantize() - w) @ x.t()).square().sum())

    assert (
        off(rtn(w, grid, 32, output_error_measure(x, 32)))
        < off(rtn(w, grid, 32))
        < off(rtn(w, IntegerGrid(3, clips=(1.0,)), 32))
    )


def test_whole_rows_are_a_group_and_kernels_get_theirs() -> None:
    w = normal(6, 192)
    q = rtn(w, IntegerGrid(8), -1)
    assert (q.group, scales_of(q).shape) == (192, (6, 1))
    served = for_kernels(q)
    assert served.group == 64 and torch.equal(served.dequantize(), q.dequantize())


def test_what_cannot_be_rounded_is_refused() -> None:
    bad = normal(2, 64)
    bad[1, 3] = torch.nan
    for grid in (IntegerGrid(4), IntegerGrid(4, False), IntegerGrid(3), CodeBookGrid(NF4), fp8.PER_ROW):
        with pytest.raises(ModelError, match="nan"):
            rtn(bad, grid, 64)
    with pytest.raises(ModelError, match="nan"):
        fp4.nf4(bad)
    with pytest.raises(ModelError, match="nan"):
        fp8.per_block(bad)
    with pytest.raises(ConfigError, match="64 columns are not a multiple of group_size 48"):
        rtn(normal(2, 64), IntegerGrid(4), 48)
    with pytest.raises(ConfigError, match="codes of 9 bits"):
        IntegerGrid(9)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def mx_number(value: float, scale: float) -> float:
    """The nearest number of e2m1, ties to the even code, beyond 6 that (Microscaling Formats 1.0, 5.3.3 and 6.3)."""
    near = sorted(range(8), key=lambda code: (abs(abs(value) / scale - E2M1[code]), code % 2))
    return (E2M1[near[0]] if value >= 0 else -E2M1[near[0]]) * scale


@pytest.mark.parametrize("make", [fp4.mxfp4, lambda w: quantize_torch(MXFP4, w, 32).weight])
def test_mxfp4_is_the_definition(make: Callable[[Tensor], Weight]) -> None:
    w = normal(6, 64, 5)
    w[0, :32] = torch.arange(-16, 16) * 0.25  # every tie, largest magnitude 4: the scale is 1
    w[1, :32] = 0
    w[2, :32] = torch.arange(32) * 0.01
    w[2, 3] = torch.tensor(8.0).nextafter(torch.tensor(0.0))  # just below a power of two
    w[3, :32] *= 2.0**-120
    q = make(w)
    codes = fp4.mxfp4_exponents(q)
    assert codes.dtype is torch.uint8 and int(codes[2, 0]) == 127
    for row in range(6):
        for block in range(2):
            part = w[row, 32 * block : 32 * block + 32]
            top = float(part.abs().max())
            scale = 2.0 ** max(-127, (int(torch.tensor(top).frexp().exponent) - 1) - 2) if top else 0.0
            found = q.dequantize()[row, 32 * block : 32 * block + 32].tolist()
            assert found == [mx_number(x, scale) if top else 0.0 for x in part.tolist()]
            if top:
                assert float(powers_of_two(to_numpy(codes[row, block]))) == scale


def test_mxfp4_is_what_compressed_tensors_makes() -> None:
    q = fp4.mxfp4(THEIRS)
    assert torch.equal(q.dequantize(), MADE["mxfp4.values"])
    assert torch.equal(fp4.mxfp4_exponents(q), MADE["mxfp4.weight_scale"])


def test_the_better_power_of_two() -> None:
    w = normal(32, 128, 6)
    plain, searched = squared(fp4.mxfp4(w), w, 32), squared(fp4.mxfp4(w, search=True), w, 32)
    assert bool((searched <= plain).all()) and float(searched.sum()) < 0.97 * float(plain.sum())


def test_nf4_is_what_bitsandbytes_makes() -> None:
    packed = MADE["nf4.weight"].flatten()
    codes = torch.stack((packed >> 4, packed & 15), -1).view(12, 128)
    q = rtn(THEIRS, fp4.NF4_GRID, fp4.NF4_BLOCK)
    assert torch.equal(q.codes, codes.to(torch.int8))
    assert torch.allclose(scales_of(q).flatten() * NF4.unit, MADE["nf4.weight.absmax"], rtol=1e-6)
    assert torch.allclose(q.dequantize(), MADE["nf4.values"], atol=2e-5 * float(THEIRS.abs().max()))


def test_nf4_doubly_quantized_is_what_bitsandbytes_makes() -> None:
    q, nested = fp4.nf4(THEIRS)
    packed = MADE["nf4-nested.weight"].flatten()
    assert torch.equal(q.codes, torch.stack((packed >> 4, packed & 15), -1).view(12, 128).to(torch.int8))
    assert torch.allclose(fp4.nested_map(), MADE["nf4-nested.weight.nested_quant_map"], rtol=0, atol=1e-7)
    assert torch.equal(nested.codes, MADE["nf4-nested.weight.absmax"])
    assert torch.allclose(nested.absmax, MADE["nf4-nested.weight.nested_absmax"], rtol=1e-5)
    assert torch.allclose(q.dequantize(), MADE["nf4-nested.values"], atol=3e-5 * float(THEIRS.abs().max()))


def test_nested_scales_are_in_blocks_of_256() -> None:
    scales = normal(700, 1, 7).abs().flatten()
    nested = fp4.nest_scales(scales)
    assert (nested.codes.shape, nested.absmax.shape) == ((700,), (3,))
    numbers, left = fp4.nested_map().tolist(), (scales - scales.mean()).tolist()
    for at in (0, 255, 256, 511, 512, 699):
        block = left[at // 256 * 256 : at // 256 * 256 + 256]
        top = max(abs(x) for x in block)
        nearest = min(range(256), key=lambda code: abs(numbers[code] - left[at] / top))
        assert int(nested.codes[at]) == nearest
    assert float((nested.scales() - scales).abs().max()) < 0.02 * float(scales.max())
    assert fp4.nest_scales(torch.full((3,), 0.5)).scales().tolist() == [0.5] * 3


def test_steps_of_doubly_quantized_nf4_are_what_readers_see() -> None:
    w = normal(10, 128, 8)
    qparams, nested = fp4.nf4_qparams(w)
    assert torch.equal(qparams.scale.flatten(), nested.scales())
    q, _ = fp4.nf4(w)
    assert torch.allclose(scales_of(q) * NF4.unit, qparams.scale, rtol=1e-6)


@pytest.mark.parametrize("rows", [0, 1])
def test_fp8_codes_are_torch_casts(rows: int) -> None:
    w = normal(10, 96, 9)
    q = fp8.per_tensor(w) if rows == 0 else fp8.per_row(w)
    top = w.abs().max().expand(10, 1) if rows == 0 else w.abs().amax(1, keepdim=True)
    assert torch.equal(scales_of(q), top / 448)
    assert torch.equal(q.codes.view(torch.uint8), (w / (top / 448)).to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(fp8.per_row(torch.zeros(2, 32)).dequantize(), torch.zeros(2, 32))


@pytest.mark.parametrize("shape", [(256, 256), (200, 192), (130, 320)])
def test_fp8_blocks_of_128_by_128(shape: tuple[int, int]) -> None:
    w = normal(*shape, seed=10)
    q, (n, k) = fp8.per_block(w), shape
    narrow = fp8.block_columns(k)
    for i in range(0, n, 128):
        for j in range(0, k, 128):
            block = w[i : i + 128, j : j + 128]
            scale = block.abs().max() / 448
            assert float(scales_of(q)[i, j // narrow]) == float(scale)
            wanted = (block / scale).to(torch.float8_e4m3fn).float() * scale
            assert torch.equal(q.dequantize()[i : i + 128, j : j + 128], wanted)


def test_static_scale_of_activations() -> None:
    assert float(fp8.activation_scale(torch.tensor([1.0, 896.0, 3.0]))) == 2.0


GRIDS: list[tuple[Grid, int]] = [
    (IntegerGrid(4), 32), (IntegerGrid(3, False), 32), (IntegerGrid(8), -1), (CodeBookGrid(NF4), 64),
    (CodeBookGrid(MXFP4), 32), (fp8.PER_ROW, -1),
]  # fmt: skip


@pytest.mark.parametrize(("grid", "group"), GRIDS)
def test_numbers_of_codes_are_those_of_the_weight(grid: Grid, group: int) -> None:
    groups = in_groups(normal(8, 128, 11), group)
    _, numbers = grid.snap(groups, grid.fit(groups).by_column)
    assert torch.allclose(rtn(groups.flatten(1), grid, group).dequantize(), numbers.flatten(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("grid", "group"), [*GRIDS, (IntegerGrid(2), 128), (IntegerGrid(4, False), 128), (IntegerGrid(6), 64)]
)
def test_backends_serve_what_is_made(grid: Grid, group: int, name: str) -> None:
    """Packed as weights of files are, also in an order of columns of their own, which GPTQ gives."""
    ops, w, x = over_torch(backend(name)), normal(48, 256, 12), normal(5, 256, 13) * 20
    for q in (rtn(w, grid, group), gptq(w, x.t() @ x, grid, group, act_order=True)):
        served = replace(for_kernels(q), activation_bits=16)
        y = ops.linear(x, ops.pack(served, narrow=True), None)
        assert relative_error(y, x @ q.dequantize().t()) < 3e-3  # fp8: x is rounded to bfloat16
