"""Fake quantization: exactly the numbers that are served, with gradients as if nothing had been rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oracle import backend
from quire.compress.quantize.rounding import IntegerGrid, rtn
from quire.compress.train.qat import fake_cache, fake_fp8, fake_int8, straight_through
from quire.core.dtypes import F8, I8
from quire.ops.weights import Weight
from quire.quant.rtn import INT4, INT8, RoundToNearest
from torch_weights import quantize_torch

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "weights int4": lambda x: straight_through(x, rtn(x, IntegerGrid(4), 32).dequantize()),
    "activations int8": lambda x: fake_int8(x, 32),
    "activations fp8": lambda x: fake_fp8(x, 32),
    "cache int8": lambda x: fake_cache(x, I8),
    "cache fp8": lambda x: fake_cache(x, F8),
}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_go_straight_through(name: str, dtype: torch.dtype) -> None:
    x = normal(6, 64).to(dtype).requires_grad_()
    factors = normal(64, 6).t().to(dtype)
    y = KINDS[name](x)
    assert y.dtype is dtype and not torch.equal(y, x)
    (y * factors).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, factors)


@pytest.mark.parametrize("scheme", [INT4, INT8])
def test_weights_are_those_that_are_served(scheme: RoundToNearest) -> None:
    w = normal(8, 128)
    assert torch.equal(rtn(w, IntegerGrid(scheme.bits), 64).dequantize(), quantize_torch(scheme, w, 64).dequantize())


def test_activations_are_rounded_as_the_reference_does() -> None:
    ops = backend("reference")
    w, x = rtn(normal(16, 64), IntegerGrid(8), 32), normal(5, 64) * 3
    weight = Weight("int8", w.codes, w.scales, group=32, activation_bits=8)
    served = ops.linear(x, ops.pack(weight, narrow=True), None)
    assert torch.allclose(fake_int8(x, 32) @ w.dequantize().t(), served, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "largest", "bound"), [("int8", 127.0, 0.5 / 127), ("fp8", 448.0, 2.0**-4)])
def test_tokens_and_heads_have_scales_of_their_own(name: str, largest: float, bound: float) -> None:
    x = normal(3, 2, 16) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    y = fake_cache(x, I8 if name == "int8" else F8)
    top = x.abs().amax(-1, keepdim=True)
    assert bool(((y - x).abs() <= bound * top * 1.001).all())
    codes = y / (top / largest)
    if name == "int8":
        assert torch.allclose(codes, codes.round(), atol=1e-3)
    else:
        assert torch.allclose(codes, codes.to(torch.float8_e4m3fn).float(), rtol=1e-5)


def test_second_use_adds_gradients() -> None:
    x = normal(4).requires_grad_()
    (straight_through(x, x.round()) * x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, x.detach() + x.detach().round())


def test_a_least_squares_fit_trains_through_it() -> None:
    """Of weights that are rounded in the forward pass training finds better ones than rounding the exact solution."""
    x = normal(256, 32) @ torch.diag(torch.linspace(0.2, 3, 32)) @ (torch.eye(32) + 0.3 * normal(32, 32))
    exact = normal(8, 32)
    y, grid = x @ exact.t(), IntegerGrid(3)
    w = exact.clone().requires_grad_()
    optimizer = torch.optim.Adam([w], lr=3e-3)
    losses = []
    for _ in range(150):
        loss = (x @ straight_through(w, rtn(w, grid, 32).dequantize()).t() - y).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert min(losses) < 0.7 * losses[0]
