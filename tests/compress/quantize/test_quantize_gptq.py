"""GPTQ against optimal brain quantization done column by column in f64, and what its options promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from often import one_of
from quire.compress.calibration.statistics import InputStatistics, output_error
from quire.compress.quantize import fp4, fp8
from quire.compress.quantize.gptq import FactoredHessian, gptq, gptq_all
from quire.compress.quantize.rounding import CodeBookGrid, Grid, IntegerGrid, QuantParams, in_groups, rtn
from quire.core.errors import ModelError
from quire.ops.weights import Weight
from quire.quant.codebook import MXFP4, NF4


def made(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix, and the Hessian of correlated inputs some of whose columns are large, f64."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn((n, k), generator=g) * 0.05
    mix = torch.eye(k) + torch.randn((k, k), generator=g) * (1.5 / k**0.5)
    x = (
        torch.randn((4 * k, k), generator=g) @ mix * torch.linspace(0.2, 4, k)[torch.randperm(k, generator=g)]
    ).double()
    return w, x.t() @ x * (2 / len(x))


def slow(w: Tensor, hessian: Tensor, grid: Grid, group: int, order: list[int], static: bool) -> Tensor:
    """The matrix that optimal brain quantization gives: after each column its row and column leave the inverse Hessian.

    Frantar and Alistarh 2022, equations 2 and 3, in the order `order`.
    """
    w, k = w.double().clone(), w.shape[1]
    h = hessian.clone()
    dead = h.diagonal() == 0
    w[:, dead] = 0
    h[dead, dead] = 1
    h += 0.01 * h.diagonal().mean() * torch.eye(k)
    fixed = grid.fit(in_groups(w, group))
    inverse, out, qparams = torch.linalg.inv(h), torch.zeros_like(w), QuantParams(torch.empty(0))
    left = list(order)
    for place, column in enumerate(order):
        if static:
            qparams = QuantParams.of(lambda t, column=column: t[:, column // group], fixed)
        elif place % group == 0:
            qparams = QuantParams.of(
                lambda t: t[:, 0], grid.fit(w[:, order[place : place + group]][:, None].contiguous())
            )
        out[:, column] = grid.snap(w[:, column], qparams)[1]
        error = (w[:, column] - out[:, column]) / inverse[column, column]
        w[:, left] -= torch.outer(error, inverse[column, left])
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        left.remove(column)
    return out


GRIDS: list[tuple[Grid, int]] = [
    (IntegerGrid(4), 32), (IntegerGrid(4), 256), (IntegerGrid(3), 64), (IntegerGrid(2, False), 16),
    (IntegerGrid(8, False), 24), (IntegerGrid(4), 8), (IntegerGrid(4, False), 192), (IntegerGrid(4), 384),
    (CodeBookGrid(NF4), 64), (CodeBookGrid(MXFP4), 32), (fp8.PER_ROW, 384), (fp8.PER_TENSOR, 384),
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("grid", "group", "options"),
    one_of(
        5, [(*grid, way) for grid in GRIDS for way in ("", "act_order", "static_groups", "act_order static_groups")]
    ),
)
def test_it_is_optimal_brain_quantization(grid: Grid, group: int, options: str) -> None:
    k = 256 if group == 256 else 384
    w, hessian = made(12, k)
    hessian[7], hessian[:, 7] = 0, 0
    act_order, static = "act_order" in options, "static_groups" in options
    order = hessian.diagonal().argsort(descending=True, stable=True).tolist() if act_order else list(range(k))
    wanted = slow(w, hessian, grid, group, order, static or group == k)
    found = gptq(w, hessian, grid, group, act_order=act_order, static_groups=static)
    assert torch.allclose(found.dequantize().double(), wanted, rtol=1e-5, atol=1e-7)
    assert (found.order is None) == (not act_order or static or group == k)


def test_in_f32_few_codes_differ() -> None:
    w, hessian = made(32, 256)
    a, b = gptq(w, hessian, IntegerGrid(4), 64), gptq(w, hessian.float(), IntegerGrid(4), 64)
    assert float((a.codes != b.codes).float().mean()) < 0.005
    assert output_error(b.dequantize() - w, hessian) == pytest.approx(
        output_error(a.dequantize() - w, hessian), rel=0.01
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_outputs_are_off_by_less_than_rounded_ones(bits: int) -> None:
    w, hessian = made(64, 256, 1)
    of = {"rtn": rtn(w, IntegerGrid(bits), 64), "gptq": gptq(w, hessian, IntegerGrid(bits), 64)}
    of["order"] = gptq(w, hessian, IntegerGrid(bits), 64, act_order=True)
    off = {name: output_error(q.dequantize() - w, hessian) for name, q in of.items()}
    assert off["gptq"] < 0.75 * off["rtn"] and off["order"] < off["gptq"]


def test_uncorrelated_inputs_leave_nothing_to_make_up_for() -> None:
    w, _ = made(16, 128)
    q, plain = gptq(w, torch.eye(128), IntegerGrid(4), 32), rtn(w, IntegerGrid(4), 32)
    assert torch.equal(q.codes, plain.codes) and torch.equal(q.dequantize(), plain.dequantize())


def test_static_groups_have_the_scales_of_rounding() -> None:
    w, hessian = made(16, 256)
    q = gptq(w, hessian.float(), IntegerGrid(4), 64, act_order=True, static_groups=True)
    plain = rtn(w, IntegerGrid(4), 64)
    assert q.scales is not None and plain.scales is not None and torch.equal(q.scales, plain.scales)
    assert q.order is None and not torch.equal(q.codes, plain.codes)


def test_columns_that_are_never_active_become_zero() -> None:
    w, hessian = made(16, 128)
    for column in (0, 50, 127):
        hessian[column], hessian[:, column] = 0, 0
    for act_order in (False, True):
        values = gptq(w, hessian, IntegerGrid(4), 32, act_order=act_order).dequantize()
        assert not bool(values[:, [0, 50, 127]].any()) and bool(values[:, 1].any())


def test_steps_may_be_the_callers_own() -> None:
    w, hessian = made(16, 128)
    qparams, nested = fp4.nf4_qparams(w)
    q: Weight = gptq(w, hessian, fp4.NF4_GRID, fp4.NF4_BLOCK, act_order=True, qparams=qparams)
    assert q.scales is not None
    assert torch.allclose(q.scales.float().flatten() * NF4.unit, nested.scales(), rtol=1e-6)
    assert output_error(q.dequantize() - w, hessian) < output_error(fp4.nf4(w)[0].dequantize() - w, hessian)


def test_a_hessian_is_its_factors() -> None:
    _, hessian = made(1, 200)
    for act_order in (False, True):
        found = FactoredHessian.of(hessian, 0.0, act_order)
        factor, turned = found.factor, hessian if found.order is None else hessian[found.order][:, found.order]
        assert torch.equal(factor, factor.triu()) and bool((factor.diagonal() == 1).all())
        squares = torch.linalg.solve(factor, torch.linalg.solve(factor, turned).t())
        assert torch.allclose(squares, squares.diagonal().diag(), atol=1e-10 * float(squares.max()))
        assert bool((squares.diagonal() > 0).all())


def test_what_cannot_be_worked_with_is_refused() -> None:
    w, hessian = made(4, 64)
    with pytest.raises(ModelError, match="nan, inf"):
        gptq(torch.full((4, 64), torch.inf), hessian, IntegerGrid(4), 32)
    with pytest.raises(ModelError, match="not positive definite; raise damping"):
        gptq(w, hessian - 100 * torch.eye(64), IntegerGrid(4), 32)
    with pytest.raises(ModelError, match="not positive definite"):
        gptq(w, torch.full((64, 64), torch.nan), IntegerGrid(4), 32)
    with pytest.raises(ValueError, match="the matrix has 64 columns"):
        gptq(w, hessian[:32, :32], IntegerGrid(4), 32)


def test_damping_zero_works_on_statistics_of_enough_rows() -> None:
    inputs = InputStatistics(32, ["hessian"])
    inputs.add(torch.randn((500, 32), generator=torch.Generator().manual_seed(0)))
    w, _ = made(8, 32)
    assert gptq(w, inputs.hessian, IntegerGrid(4), 32, damping=0.0).shape == (8, 32)


@pytest.mark.parametrize(("symmetric", "act_order"), [(True, False), (False, True)])
def test_what_was_pruned_stays_so_and_the_rest_makes_up_for_it(symmetric: bool, act_order: bool) -> None:
    w, hessian = made(24, 64, 3)
    w[:, ::2] = torch.where(torch.rand((24, 32), generator=torch.Generator().manual_seed(1)) < 0.6, 0.0, w[:, ::2])
    grid = IntegerGrid(4, symmetric)
    found = gptq(w, hessian, grid, 32, act_order=act_order).dequantize()
    assert bool((found[w == 0] == 0).all())
    assert output_error(found - w, hessian) < output_error(rtn(w, grid, 32).dequantize() - w, hessian)


def test_several_matrices_share_a_factor() -> None:
    """And the Hessian is used up."""
    x = torch.randn((300, 64), generator=torch.Generator().manual_seed(5)) @ torch.randn((64, 64))
    inputs = InputStatistics(64, ["hessian"])
    inputs.add(x)
    ws = [made(n, 64, n)[0] for n in (8, 24)]
    wanted = [gptq(w, inputs.hessian, IntegerGrid(4), 32, act_order=True).dequantize() for w in ws]
    found = [q.dequantize() for q in gptq_all(iter(ws), inputs, IntegerGrid(4), 32, act_order=True)]
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    with pytest.raises(KeyError):
        inputs.take_hessian()
