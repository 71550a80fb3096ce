"""SparseGPT is optimal brain surgery one column after another, and loses less than what does not make up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compress.prune.masks import Pattern, apply_mask, ratio_mask, sparsity_of
from quire.compress.prune.scores import magnitude, wanda
from quire.compress.prune.sparsegpt import Quantize, sparsegpt
from quire.core.errors import ConfigError, ModelError

DAMPING = 0.01
TARGETS: list[float | Pattern] = [0.5, 0.3, 0.0, Pattern(2, 4), Pattern(4, 8), Pattern(1, 4)]


def correlated(n: int, k: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix [n, k], and inputs [rows, k] with few directions and outlier features."""
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, k // 4, generator=g) @ torch.randn(k // 4, k, generator=g)
    inputs = inputs + 0.5 * torch.randn(rows, k, generator=g)
    inputs[:, torch.randperm(k, generator=g)[: k // 16]] *= 20
    return torch.randn(n, k, generator=g), inputs


def surgery(
    weight: Tensor, hessian: Tensor, target: float | Pattern, block: int, quantize: Quantize | None
) -> tuple[Tensor, Tensor]:
    """The definition, f64: each column goes or is rounded, and the best change of all columns behind follows.

    Hassibi and Stork 1993: change = -(error / inverse_00) inverse_0, with the inverse of what is still free, afresh
    for each column. Which weights go is decided a block or a group at a time, by error^2 / inverse_00.
    """
    w, k = weight.double().clone(), weight.shape[1]
    h = hessian.double() + DAMPING * hessian.double().diagonal().mean() * torch.eye(k, dtype=torch.float64)
    kept = torch.ones(w.shape, dtype=torch.bool)
    free = [torch.linalg.inv(h[j:, j:]) for j in range(k)]
    unit = target.of if isinstance(target, Pattern) else block
    for j in range(k):
        if j % unit == 0:
            span = range(j, min(j + unit, k))
            loss = torch.stack([w[:, i] ** 2 / free[i][0, 0] for i in span], 1)
            if isinstance(target, Pattern):
                lost = loss.argsort(1)[:, : target.of - target.keep]
                kept[:, j : j + unit].scatter_(1, lost, False)
            else:
                lost = loss.flatten().argsort()[: round(loss.numel() * target)]
                flat = torch.ones(loss.numel(), dtype=torch.bool)
                flat[lost] = False
                kept[:, j : j + unit] = flat.view_as(loss)
        new = w[:, j] if quantize is None else quantize(w[:, j], j)
        new = new * kept[:, j]
        w[:, j:] -= torch.outer((w[:, j] - new) / free[j][0, 0], free[j][0])
        w[:, j] = new
    return w, kept


def halves(values: Tensor, column: int) -> Tensor:
    """A grid that depends on the column."""
    step = 0.5 if column % 2 else 0.25
    return (values / step).round() * step


@pytest.mark.parametrize("quantize", [None, halves], ids=["pruned", "quantized"])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_it_is_surgery_column_by_column(target: float | Pattern, quantize: Quantize | None) -> None:
    weight, inputs = correlated(12, 40, 200)
    hessian = (inputs.T @ inputs).double()
    want, kept = surgery(weight, hessian, target, 16, quantize)
    got, mask = sparsegpt(weight, hessian.float(), target, damping=DAMPING, block=16, quantize=quantize)
    assert torch.equal(mask, kept)
    assert got.dtype == torch.float32 and (got[~mask] == 0).all()
    assert float((got.double() - want).abs().max()) <= 1e-4 * float(want.abs().max())


@pytest.mark.parametrize("target", [0.5, 0.7, Pattern(2, 4), Pattern(4, 8)], ids=str)
def test_making_up_loses_less_than_inputs_and_these_less_than_size(target: float | Pattern) -> None:
    weight, inputs = correlated(64, 256, 2048)

    def loss(pruned: Tensor) -> float:
        return float(((pruned - weight) @ inputs.T).square().sum())

    def masked(scores: Tensor) -> Tensor:
        mask = target.mask(scores) if isinstance(target, Pattern) else ratio_mask(scores, target)
        return apply_mask(weight, mask)

    by_size, by_input = masked(magnitude(weight)), masked(wanda(weight, inputs.norm(dim=0)))
    made_up, mask = sparsegpt(weight, inputs.T @ inputs, target)
    assert loss(made_up) < 0.7 * loss(by_input) and loss(by_input) < 0.7 * loss(by_size)
    assert sparsity_of(made_up) == pytest.approx(sparsity_of(by_size), abs=1e-3)
    assert not isinstance(target, Pattern) or (target.holds(made_up) and target.holds(mask))


def test_the_scale_of_the_second_moments_changes_nothing() -> None:
    weight, inputs = correlated(16, 64, 500)
    hessian = inputs.T @ inputs
    (one, kept), (other, same) = sparsegpt(weight, hessian, 0.5), sparsegpt(weight, hessian * 2**-10, 0.5)
    assert torch.equal(kept, same) and torch.equal(one, other)


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_groups_are_whole_whatever_the_block(block: int) -> None:
    weight, inputs = correlated(16, 64, 500)
    hessian = inputs.T @ inputs
    want, kept = sparsegpt(weight, hessian, Pattern(2, 4))
    got, mask = sparsegpt(weight, hessian, Pattern(2, 4), block=block)
    assert torch.equal(kept, mask) and torch.allclose(got, want, atol=1e-4)


def test_columns_that_no_row_used_go_and_the_source_stays() -> None:
    weight, inputs = correlated(8, 32, 200)
    inputs[:, [3, 17]] = 0
    before, hessian = weight.clone(), inputs.T @ inputs
    seen = hessian.clone()
    pruned, mask = sparsegpt(weight, hessian, 0.25)
    assert not mask[:, [3, 17]].any() and (pruned[:, [3, 17]] == 0).all()
    assert torch.equal(weight, before) and torch.equal(hessian, seen)
    pruned, mask = sparsegpt(weight, hessian, 0.0)
    assert mask.sum(0).tolist() == [0 if i in (3, 17) else 8 for i in range(32)] and torch.equal(mask, pruned != 0)
    assert (sparsegpt(weight, 0 * hessian, 0.25)[0] == 0).all()


def test_bad_input_is_refused() -> None:
    weight, inputs = correlated(4, 32, 8)
    hessian = inputs.T @ inputs
    with pytest.raises(ModelError, match="raise the damping"):
        sparsegpt(weight, hessian - 10 * torch.eye(32) * hessian.diagonal().mean(), 0.5)
    with pytest.raises(ModelError, match="hessian holds NaN"):
        sparsegpt(weight, hessian * torch.nan, 0.5)
    with pytest.raises(ModelError, match="matrix holds NaN"):
        sparsegpt(weight / 0, hessian, 0.5)
    with pytest.raises(ConfigError, match=r"hessian \[8, 8\] does not fit"):
        sparsegpt(weight, hessian[:8, :8], 0.5)
    with pytest.raises(ConfigError, match="damping"):
        sparsegpt(weight, hessian, 0.5, damping=-1)
    with pytest.raises(ConfigError, match="sparsity"):
        sparsegpt(weight, hessian, 1.5)
    with pytest.raises(ConfigError, match="30 columns"):
        sparsegpt(weight[:, :30], hessian[:30, :30], Pattern(2, 4))
