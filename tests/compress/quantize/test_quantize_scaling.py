"""AWQ, SmoothQuant, LLM.int8() and factors between layers: products stay what they were, outliers stop to hurt."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paths import DATA
from quire.compress.calibration.statistics import InputStatistics
from quire.compress.quantize import fp4, fp8
from quire.compress.quantize.awq import awq
from quire.compress.quantize.int8 import (
    llm_int8,
    scale_columns,
    smooth_scales,
    smoothquant,
    unscale_norm,
    unscale_rows,
    w8a8_product,
)
from quire.compress.quantize.kv_cache import KvCachePeaks
from quire.compress.quantize.rounding import IntegerGrid, rtn
from quire.core.dtypes import I8
from quire.core.errors import ConfigError, ModelError
from quire.ops.weights import Weight

MADE = load_file(DATA / "four_bit_formats.safetensors")
OUTLIERS = [3, 40, 77]


def made(seed: int = 0, k: int = 128) -> tuple[list[Tensor], Tensor]:
    """Two matrices that read the same input, and its rows, in which a few columns are large."""
    g = torch.Generator().manual_seed(seed)
    ws = [torch.randn((n, k), generator=g) * 0.05 for n in (48, 32)]
    x = torch.randn((200, k), generator=g)
    x[:, OUTLIERS] *= 30
    return ws, x


def off(q: Weight, w: Tensor, x: Tensor, scales: Tensor | float = 1.0) -> float:
    return float((x / scales @ q.dequantize().t() - x @ w.t()).square().mean())


@pytest.mark.parametrize("grid", [IntegerGrid(4), IntegerGrid(4, symmetric=False), IntegerGrid(3)])
def test_awq_beats_rounding_where_activations_have_outliers(grid: IntegerGrid) -> None:
    ws, x = made()
    found = awq(ws, x, grid, 32)
    assert found.error < 0.5 * found.plain_error
    for w, q in zip(ws, found.weights, strict=True):
        assert off(q, w, x, found.scales) < 0.5 * off(rtn(w, grid, 32), w, x)


def test_the_errors_awq_tells_are_those_of_the_outputs() -> None:
    ws, x = made(1)
    grid = IntegerGrid(4, symmetric=False)
    found = awq(ws, x, grid, 32)
    rows = sum(len(w) for w in ws)
    plain = sum(off(rtn(w, grid, 32), w, x) * len(w) for w in ws) / rows
    scaled = [rtn(scale_columns(w, found.scales), grid, 32) for w in ws]
    assert found.plain_error == pytest.approx(plain, rel=1e-4)
    assert found.error == pytest.approx(
        sum(off(q, w, x, found.scales) * len(w) for q, w in zip(scaled, ws, strict=True)) / rows, rel=1e-3
    )


def test_awq_clips_where_that_helps_and_spares_whom_it_is_told_to() -> None:
    ws, x = made(2)
    grid = IntegerGrid(3, symmetric=False)
    found, spared = awq(ws, x, grid, 32), awq(ws, x, grid, 32, unclipped=[0])
    clips = found.clips[0]
    assert clips is not None and clips.shape == (48, 4) and 0.5 <= float(clips.min()) < 1.0
    assert spared.clips[0] is None and spared.clips[1] is not None
    assert off(found.weights[0], ws[0], x, found.scales) < off(spared.weights[0], ws[0], x, spared.scales)
    assert torch.equal(spared.weights[0].codes, rtn(scale_columns(ws[0], found.scales), grid, 32).codes)


def test_awq_for_other_grids_keeps_their_scales() -> None:
    ws, x = made(9)
    mx = awq(ws, x, fp4.MXFP4_GRID, fp4.MXFP4_BLOCK)
    mantissas = mx.weights[0].dequantize()[mx.weights[0].dequantize() != 0].abs().frexp().mantissa
    assert set(mantissas.tolist()) == {0.5, 0.75}
    assert off(mx.weights[0], ws[0], x, mx.scales) < 0.8 * off(rtn(ws[0], fp4.MXFP4_GRID, fp4.MXFP4_BLOCK), ws[0], x)
    floats = awq(ws, x, fp8.PER_ROW, -1)
    assert floats.clips == (None, None)
    assert torch.equal(floats.weights[0].dequantize(), fp8.per_row(scale_columns(ws[0], floats.scales)).dequantize())


def test_awq_keeps_what_is_best_as_it_is() -> None:
    """Where every column is the same there is nothing to gain; a column that is never active has a factor too."""
    w, x = torch.full((4, 32), 0.5), torch.ones(10, 32)
    x[:, 5] = 0
    found = awq([w], x, IntegerGrid(4), 32)
    assert torch.isfinite(found.scales).all() and bool((found.scales > 0).all())
    assert found.error <= found.plain_error
    with pytest.raises(ModelError, match="nan"):
        awq([torch.full((4, 32), torch.nan)], x, IntegerGrid(4), 32)
    with pytest.raises(ModelError, match="activations"):
        awq([w], torch.full((4, 32), torch.inf), IntegerGrid(4), 32)


def test_factors_leave_products_as_they_were() -> None:
    ws, x = made(3)
    scales = torch.linspace(0.01, 30, 128)
    norm, bias = torch.randn(128), torch.randn(128)
    normed, wanted = x * unscale_norm(norm, scales) + unscale_norm(bias, scales), (x * norm + bias) @ ws[0].t()
    assert torch.allclose(normed @ scale_columns(ws[0], scales).t(), wanted, rtol=1e-4, atol=1e-4)
    before = torch.randn(128, 16)
    hidden = x[:, :16] @ unscale_rows(before, scales).t() + unscale_rows(bias, scales)
    wanted = (x[:, :16] @ before.t() + bias) @ ws[0].t()
    assert torch.allclose(hidden @ scale_columns(ws[0], scales).t(), wanted, rtol=1e-4, atol=1e-4)
    assert unscale_rows(before.bfloat16(), scales).dtype is torch.bfloat16


def test_smoothing_gives_both_sides_the_same_peaks() -> None:
    ws, x = made(4)
    scales = smooth_scales(x.abs().amax(0), ws, 0.5)
    peaks = torch.stack([scale_columns(w, scales).abs().amax(0) for w in ws]).amax(0)
    assert torch.allclose((x / scales).abs().amax(0), peaks, rtol=1e-4)
    assert torch.allclose((x / scales) @ scale_columns(ws[0], scales).t(), x @ ws[0].t(), atol=1e-4)
    assert torch.allclose(smooth_scales(x.abs().amax(0), ws, 1.0), x.abs().amax(0))
    with pytest.raises(ConfigError, match="alpha is 2"):
        smooth_scales(x.abs().amax(0), ws, 2)


def test_a_column_that_is_never_active_or_never_read_has_a_factor() -> None:
    ws, x = made(5)
    for w in ws:
        w[:, 1] = 0
    x[:, 2] = 0
    scales = smooth_scales(x.abs().amax(0), ws)
    assert torch.isfinite(scales).all() and bool((scales > 0).all())


def test_smoothquant_helps_eight_bits_on_both_sides() -> None:
    ws, x = made(6)
    scales, smooth = smoothquant(x.abs().amax(0), ws)
    for w, q in zip(ws, smooth, strict=True):
        assert (q.kind, q.activation_bits, q.group) == ("int8", 8, 128)
        plain = w8a8_product(rtn(w, IntegerGrid(8), -1), x)
        assert float((w8a8_product(q, x / scales) - x @ w.t()).square().mean()) < 0.2 * float(
            (plain - x @ w.t()).square().mean()
        )


def test_w8a8_is_integer_arithmetic() -> None:
    (w, _), x = made(7)
    q = rtn(w, IntegerGrid(8), -1)
    assert q.scales is not None
    scale = x.double().abs().amax(1, keepdim=True) / 127
    whole = (x.double() / scale).round().long() @ q.codes.long().t()
    assert torch.allclose(w8a8_product(q, x).double(), whole * scale * q.scales.double().t(), rtol=1e-4, atol=1e-3)


def test_outlier_columns_are_exact_and_the_rest_is_int8() -> None:
    (w, _), x = made(8)
    inputs = InputStatistics(128, ["peak"])
    inputs.add(x)
    columns = inputs.outlier_columns(12.0)
    assert columns.tolist() == OUTLIERS
    q = llm_int8(w.bfloat16(), columns)
    exact = w.bfloat16().float()
    assert torch.equal(q.dequantize()[:, columns], exact[:, columns]) and torch.equal(q.kept, w.bfloat16()[:, columns])
    assert not bool(q.weight.codes[:, columns].any())
    alone = torch.zeros_like(x)
    alone[:, columns] = x[:, columns]
    assert torch.allclose(q.product(alone), alone @ exact.t(), rtol=1e-5, atol=1e-5)
    plain = w8a8_product(rtn(exact, IntegerGrid(8), -1), x)
    assert float((q.product(x) - x @ exact.t()).square().mean()) < 0.02 * float((plain - x @ exact.t()).square().mean())


def test_without_outliers_it_is_what_bitsandbytes_makes() -> None:
    w = (torch.randn(12, 128, generator=torch.Generator().manual_seed(0)) * 0.05).half()
    q = llm_int8(w, torch.empty(0, dtype=torch.int64))
    assert q.weight.scales is not None
    assert torch.equal(q.weight.codes, MADE["int8.weight"])
    assert torch.allclose(q.weight.scales.flatten() * 127, MADE["int8.SCB"], rtol=1e-6)
    with pytest.raises(ModelError, match="nan"):
        llm_int8(torch.full((2, 32), torch.nan), torch.empty(0, dtype=torch.int64))


def test_scales_of_keys_and_values() -> None:
    peaks = KvCachePeaks()
    assert [float(s) for s in peaks.scales()] == [1.0, 1.0]
    peaks.add(torch.tensor([[1.0, -896.0]]), torch.tensor([0.5]))
    peaks.add(torch.tensor([448.0]), torch.tensor([-127.0, 3.0]))
    key, value = peaks.scales()
    assert key.shape == (1,) and float(key) == 2.0 and float(value) == pytest.approx(127 / 448)
    assert float(peaks.scales(I8)[1]) == 1.0
    with pytest.raises(ModelError, match="nan or inf"):
        peaks.add(torch.tensor([torch.nan]), torch.tensor([0.0]))
