"""The definitions of ops of rows that hold several streams side by side, and of gates that few numbers pass."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.op import op


@op(tolerance=2e-6)
def mix_streams(x: Tensor, m: Tensor, weight: Tensor, bias: Tensor, out: int) -> Tensor:
    """Mixtures of the streams of each row (AltUp, Baykal et al. 2023): f32 [T, out * h] of x [T, n * h] f32.

    Stream i of row t is sum_j c[i, j] * stream j of x, with c = bias + weight m[t], as [out, n]. m [T, p], weight
    [out * n, p], bias [out * n] f32.
    """
    n = len(bias) // out
    coefficients = (m @ weight.T + bias).view(len(x), out, n)
    streams = x.view(len(x), n, x.shape[1] // n)
    return (coefficients[..., None] * streams[:, None]).sum(2).flatten(1)


@op(tolerance=4e-6, into="x")
def sinkhorn_gates(x: Tensor, streams: int, turns: int, most: float, least: float) -> Tensor:
    """Gates of hyper-connections (Xie et al. 2026, "mHC") from logits x [T, (2 + n) n] f32, in place, n = `streams`.

    The first n are least + sigmoid(x), the next most * sigmoid(x). Behind these lie n rows of n: least + softmax(row),
    whose columns, and then in `turns` - 1 turns rows and columns, are divided by their sums + least (Sinkhorn and Knopp
    1967).
    """
    n = streams
    comb = x[:, 2 * n :].view(len(x), n, n).softmax(-1) + least
    comb = comb / (comb.sum(1, keepdim=True) + least)
    for _ in range(turns - 1):
        comb = comb / (comb.sum(2, keepdim=True) + least)
        comb = comb / (comb.sum(1, keepdim=True) + least)
    return torch.cat((x[:, :n].sigmoid() + least, most * x[:, n : 2 * n].sigmoid(), comb.flatten(1)), 1)


@op(tolerance=2e-6, into="x")
def match_lengths(x: Tensor, streams: int, least: float) -> Tensor:
    """x [T, streams * h] f32, in place: streams behind the first are scaled to its root mean square; their own counts
    as sqrt(least) at least."""
    parts = x.view(len(x), streams, x.shape[1] // streams)
    length = parts.pow(2).mean(-1, keepdim=True)
    own = length.clamp(min=least).sqrt()
    return torch.cat((parts[:, :1], parts[:, 1:] * (length[:, :1].sqrt() / own[:, 1:])), 1).flatten(1)


@op(tolerance=2e-6, into="x")
def sparse_gate(x: Tensor, factor: float) -> Tensor:
    """x [T, 2 f] f32, in place: the gates, its first f columns, less mean + factor * deviation of a row's, and 0 where
    that is below: few pass, as many as a normal distribution has that far out (Gemma 3n)."""
    gate, up = x.chunk(2, 1)
    mean = gate.mean(1, keepdim=True)
    cut = mean + factor * (gate - mean).square().mean(1, keepdim=True).sqrt()
    return torch.cat(((gate - cut).relu(), up), 1)


@op(tolerance=0.0, into="x")
def scale_columns(x: Tensor, factors: Tensor) -> Tensor:
    """x [T, d] f32 times factors [d] f32, in place."""
    return x * factors
