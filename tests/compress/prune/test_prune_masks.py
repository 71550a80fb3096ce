"""Masks are those that definition by brute force gives; scores are their formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.compress.prune.masks import Pattern, apply_mask, ratio_mask, sparsity_of
from quire.compress.prune.scores import (
    activation_gradient,
    block_influence,
    magnitude,
    sum_by_unit,
    sum_coupled,
    taylor,
    wanda,
)
from quire.core.errors import ConfigError, ModelError

EXAMPLES = settings(max_examples=60, deadline=None)


@st.composite
def few_values(draw: st.DrawFn, columns: int = 0) -> Tensor:
    """Scores [n, k] of few distinct values, so that ties abound."""
    n, k = draw(st.integers(1, 4)), columns or draw(st.integers(1, 9))
    values = draw(st.lists(st.integers(0, 3), min_size=n * k, max_size=n * k))
    return torch.tensor(values, dtype=torch.float32).view(n, k)


def largest(row: list[float], keep: int) -> list[bool]:
    """Which of a row are among the `keep` largest, the further left first among equals."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    return [i in order[:keep] for i in range(len(row))]


@EXAMPLES
@given(few_values(), st.floats(0, 0.99))
def test_rows_keep_their_largest(scores: Tensor, sparsity: float) -> None:
    k = scores.shape[1]
    want = [largest(row, k - round(k * sparsity)) for row in scores.tolist()]
    assert ratio_mask(scores, sparsity).tolist() == want


@EXAMPLES
@given(few_values(), st.floats(0, 0.99))
def test_matrices_keep_their_largest(scores: Tensor, sparsity: float) -> None:
    total = scores.numel()
    want = largest(scores.flatten().tolist(), total - round(total * sparsity))
    assert ratio_mask(scores, sparsity, per_row=False).flatten().tolist() == want


@EXAMPLES
@given(st.data(), st.integers(2, 8), st.integers(1, 3))
def test_groups_keep_their_largest(data: st.DataObject, of: int, groups: int) -> None:
    pattern = Pattern.parse(f"{data.draw(st.integers(1, of - 1))}:{of}")
    scores = data.draw(few_values(columns=of * groups))
    want = [[b for g in range(groups) for b in largest(row[g * of : g * of + of], pattern.keep)]
            for row in scores.tolist()]  # fmt: skip
    mask = pattern.mask(scores)
    assert mask.tolist() == want
    assert pattern.holds(mask) and pattern.holds(apply_mask(scores, mask))


@pytest.mark.parametrize("text", ["2:4", "4:8"])
def test_known_patterns_drop_exactly_half(text: str) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    pattern = Pattern.parse(text)
    pruned = apply_mask(weight, pattern.mask(magnitude(weight)))
    assert str(pattern) == text and sparsity_of(pruned) == 0.5
    assert ((pruned != 0).view(64, -1, pattern.of).sum(-1) == pattern.keep).all()
    assert not pattern.holds(weight) and not pattern.holds(pruned[:, :-1])


@pytest.mark.parametrize("text", ["", "2", "4:4", "0:4", "5:4", "2:64", "2:4:8", "-1:4", "2 : 4", "\uff12:\uff14"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not N:M"):
        Pattern.parse(text)


def test_bad_input_is_refused() -> None:
    ones, broken = torch.ones(2, 6), torch.full((2, 8), torch.nan)
    with pytest.raises(ConfigError, match="6 columns has no whole number of groups of 4"):
        Pattern(2, 4).mask(ones)
    for sparsity in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="sparsity"):
            ratio_mask(ones, sparsity)
    with pytest.raises(ModelError, match="NaN"):
        Pattern(2, 4).mask(broken)
    with pytest.raises(ModelError, match="NaN"):
        ratio_mask(broken, 0.5)
    with pytest.raises(ConfigError, match="does not fit"):
        apply_mask(ones, torch.ones(6, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("score", "arguments"),
    [
        (wanda, (torch.ones(2, 6), torch.ones(2))),
        (taylor, (torch.ones(2, 6), torch.ones(6, 2))),
        (sum_by_unit, (torch.ones(2, 6), 4, 1)),
        (sum_coupled, ([torch.ones(6), torch.ones(5)],)),
        (sum_coupled, ([],)),
        (block_influence, (torch.ones(2, 6), torch.ones(1, 6))),
        (activation_gradient, (torch.ones(0, 6), torch.ones(0, 6))),
    ],
)
def test_scores_of_what_does_not_fit_are_refused(score: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        score(*arguments)


def test_what_a_mask_drops_is_plus_zero_whatever_it_was() -> None:
    weight = torch.tensor([[-1.0, torch.inf, -0.0, 2.0]], dtype=torch.bfloat16)
    pruned = apply_mask(weight, torch.tensor([[False, False, False, True]]))
    assert pruned.dtype == torch.bfloat16 and pruned.tolist() == [[0, 0, 0, 2]] and not pruned.signbit().any()
    assert weight[0, 0] == -1


def test_scores_are_their_formulas() -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(5, 4)
    norms = rows.norm(dim=0)
    for i in range(3):
        for j in range(4):
            assert magnitude(weight)[i, j] == abs(float(weight[i, j]))
            assert wanda(weight, norms)[i, j] == pytest.approx(
                abs(float(weight[i, j])) * sum(float(x) ** 2 for x in rows[:, j]) ** 0.5
            )
    assert sum_by_unit(weight, 3).tolist() == pytest.approx(weight.float().sum(1).tolist())
    assert sum_by_unit(weight, 2, 1).tolist() == pytest.approx(
        [float(weight[:, :2].float().sum()), float(weight[:, 2:].float().sum())]
    )
    assert sum_coupled([norms, norms, norms]).tolist() == pytest.approx((3 * norms).tolist())


def test_taylor_scores_are_what_the_loss_loses_to_first_order() -> None:
    """A product is linear in each weight and each input, so first order is all there is."""
    torch.manual_seed(0)
    weight = torch.randn(3, 4, requires_grad=True)
    x = torch.randn(1, 4, requires_grad=True)

    def loss(w: Tensor, inputs: Tensor) -> Tensor:
        return (inputs @ w.T) @ torch.tensor([1.0, -2.0, 3.0])

    whole = loss(weight, x)
    gradients = torch.autograd.grad(whole.sum(), (weight, x))
    scores, channels = taylor(weight.detach(), gradients[0]), activation_gradient(x.detach(), gradients[1])
    weight, x, whole = weight.detach(), x.detach(), whole.detach()
    for j in range(4):
        for i in range(3):
            without = weight.clone()
            without[i, j] = 0
            assert scores[i, j] == pytest.approx(abs(float(loss(without, x) - whole)), abs=1e-5)
        silent = x.clone()
        silent[0, j] = 0
        assert channels[j] == pytest.approx(abs(float(loss(weight, silent) - whole)), abs=1e-5)


def test_activations_by_gradients_do_not_cancel_over_rows() -> None:
    assert activation_gradient(torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [-2.0]])).tolist() == [2.0]


def test_block_influence_is_how_far_rows_turn() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert block_influence(rows, 3 * rows) == pytest.approx(0)
    assert block_influence(rows, -rows) == pytest.approx(2)
    assert block_influence(rows, rows.flip(1)) == pytest.approx(1)
    assert block_influence(rows, torch.stack((rows[0], -rows[1]))) == pytest.approx(1)
    assert block_influence(rows, 0 * rows) == pytest.approx(1)
