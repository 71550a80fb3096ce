"""Cases of the ops of `quire.ops.reference.experts`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from op_cases.registry import cases
from op_cases.weights import normal, random_weight
from quire.ops.experts import ACTIVATIONS, Choices, Clamp, ExpertActivation, Grouped, Routing, padded_rows
from quire.ops.op import Case
from quire.ops.reference.experts import sort_by_expert
from quire.ops.weights import plain_packed

ROUTINGS = (
    Routing(4, 2, renormalize=True),
    Routing(8, 8),
    Routing(16, 1, scale=2.5),
    Routing(60, 4, "sigmoid", renormalize=True, scale=0.5),
    Routing(64, 6, groups=8, top_groups=3, scale=16.0),
    Routing(32, 8, "sigmoid", True, 2.5, 8, 4, 2),
    Routing(60, 4, "late_sigmoid", scale=2.5),
    Routing(32, 8, "late_sigmoid", renormalize=True),
    Routing(16, 2, "sparsemixer", jitter=0.01),
    Routing(4, 2, "sparsemixer", jitter=0.2),
)


@cases("route_by_token")
def route_by_token_cases(g: Generator) -> Iterator[Case]:
    for score, renormalize, scale in (("sqrtsoftplus", True, 1.5), ("sigmoid", False, 1.0)):
        for t in (0, 1, 90):
            yield {
                "logits": 5 * normal(g, t, 8), "tokens": torch.randint(20, (t,), generator=g, dtype=torch.int32),
                "table": random_ids(g, 20, 3, 8), "routing": Routing(8, 3, score, renormalize, scale),
            }  # fmt: skip


@cases("route")
def route_cases(g: Generator) -> Iterator[Case]:
    for routing in ROUTINGS:
        for t in (0, 1, 7, 90):
            bias = normal(g, routing.experts) if routing.score.endswith("sigmoid") else None
            yield {"logits": normal(g, t, routing.experts), "bias": bias, "routing": routing}
    yield {"logits": torch.zeros(3, 8), "bias": None, "routing": Routing(8, 3)}
    for bias in (None, normal(g, 8)):
        yield {"logits": 20 * normal(g, 7, 8), "bias": bias, "routing": Routing(8, 3, "sqrtsoftplus", True, 1.5)}
    ties = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0, 0.0, 2.0], [-1e4, 1e4, 1e4, 0.0, 0.0, 0.0, 0.0, 0.0]])
    yield {"logits": ties, "bias": None, "routing": Routing(8, 3, renormalize=True)}
    yield {"logits": ties, "bias": None, "routing": Routing(8, 3, "sigmoid", groups=4, top_groups=2, group_best=2)}
    for low in (-45.0, -60.0, -1e4):  # sums beside which LEAST_SUM counts, and that are 0
        for routing in (Routing(8, 3, "sigmoid", renormalize=True, scale=2.5), Routing(8, 2, renormalize=True)):
            yield {"logits": normal(g, 5, 8) + low, "bias": None, "routing": routing}
            yield {"logits": normal(g, 5, 8) + low, "bias": normal(g, 8), "routing": routing}


def random_ids(g: Generator, t: int, top_k: int, experts: int) -> Tensor:
    """Distinct experts of each of t tokens, int32 [t, top_k]."""
    if not t:
        return torch.zeros(0, top_k, dtype=torch.int32)
    return torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(t)]).int()


@cases("scale_choices")
def scale_choices_cases(g: Generator) -> Iterator[Case]:
    for t, top_k, experts in ((0, 2, 4), (1, 1, 1), (7, 8, 128)):
        yield {
            "weights": normal(g, t, top_k), "ids": random_ids(g, t, top_k, experts), "scales": normal(g, experts)
        }  # fmt: skip


@cases("sort_by_expert")
def sort_cases(g: Generator) -> Iterator[Case]:
    for t, top_k, experts in ((1, 1, 1), (1, 2, 8), (40, 4, 16), (300, 2, 5), (0, 2, 4)):
        yield {"ids": random_ids(g, t, top_k, experts), "experts": experts}
    yield {"ids": torch.full((9, 1), 3, dtype=torch.int32), "experts": 5}


def plain_grouped(g: Generator, kind: str, experts: int, n: int, k: int, group: int, biased: bool) -> Grouped:
    """Random experts in plain form; whoever runs the case packs them for its backend."""
    weight = random_weight(g, kind, experts * len(padded_rows(n)), k, group)
    return Grouped(plain_packed(weight), experts, n, normal(g, experts, n) if biased else None)


@cases("grouped_linear")
def grouped_linear_cases(g: Generator) -> Iterator[Case]:
    for kind in ("f32", "bf16", "int8", "int4"):
        for t, top_k, experts, n, k, group in (
            (1, 2, 4, 16, 64, 32),
            (21, 3, 7, 40, 128, 64),
            (70, 2, 4, 33, 128, 128),
        ):
            w = plain_grouped(g, kind, experts, n, k, group, biased=t > 1)
            tokens, _, offsets = sort_by_expert(random_ids(g, t, top_k, experts), experts)
            yield {"x": normal(g, t, k), "w": w, "tokens": tokens, "offsets": offsets}
            yield {"x": normal(g, t * top_k, k), "w": w, "tokens": None, "offsets": offsets}
    empty = torch.zeros(1, 5, dtype=torch.int32)
    w = plain_grouped(g, "f32", 4, 8, 8, 0, False)
    yield {"x": normal(g, 0, 8), "w": w, "tokens": torch.zeros(0, 2, dtype=torch.int32), "offsets": empty}


@cases("expert_mlp")
def expert_mlp_cases(g: Generator) -> Iterator[Case]:
    kinds = (
        ("f32", "f32"),
        ("bf16", "bf16"),
        ("int8", "int8"),
        ("int4", "int8"),
        ("fp8", "int4"),
        ("table4", "table4"),
    )
    for i, (first, last) in enumerate(kinds):
        for t, top_k, experts, hidden, f, group in (
            (1, 2, 4, 64, 32, 32),
            (9, 3, 5, 128, 192, 64),
            (200, 2, 3, 40, 32, 32),
        ):
            hidden = hidden if first in ("f32", "bf16") else -(-hidden // group) * group
            biased = t == 9
            yield {
                "x": normal(g, t, hidden),
                "gate_up": plain_grouped(g, first, experts, 2 * f, hidden, group, biased),
                "down": plain_grouped(g, last, experts, hidden, f, group, biased),
                "between": ExpertActivation(
                    list(ACTIVATIONS)[(i + t) % len(ACTIVATIONS)],
                    Clamp(*((1.702, 7.0), (1.0, 2.0, 0.0, 2.27))[i % 2]) if biased else None,
                ),
                "choices": random_choices(g, t, top_k, experts),
            }


def random_choices(g: Generator, t: int, top_k: int, experts: int) -> Choices:
    """Distinct experts of each of t tokens, and weights."""
    return *sort_by_expert(random_ids(g, t, top_k, experts), experts), torch.rand(t, top_k, generator=g)


@cases("combine")
def combine_cases(g: Generator) -> Iterator[Case]:
    for t, top_k, d in ((1, 1, 16), (5, 2, 33), (40, 8, 128), (0, 2, 16)):
        _, places, _ = sort_by_expert(random_ids(g, t, top_k, 9), 9)
        yield {"y": normal(g, t * top_k, d), "places": places, "weights": normal(g, t, top_k)}
    y, weights = normal(g, 21, 33), normal(g, 7, 3)
    weights[2:, 1], weights[4] = 0.0, 0.0
    y[2] = float("nan")  # what nobody has computed
    yield {"y": y, "places": torch.where(weights == 0, 2, torch.arange(21).view(7, 3) % 2).int(), "weights": weights}


@cases("clamped_swiglu")
def clamped_swiglu_cases(g: Generator) -> Iterator[Case]:
    for t, f in ((1, 16), (3, 1025), (40, 7), (0, 8)):
        yield {"gate_up": normal(g, t, 2 * f) * 8, "alpha": 1.702, "limit": 7.0}
        yield {"gate_up": normal(g, t, 2 * f) * 8, "alpha": 1.0, "limit": 3.0, "shift": 0.0, "most": 3.14}


@cases("scale_by_sigmoid")
def scale_by_sigmoid_cases(g: Generator) -> Iterator[Case]:
    for t, d in ((1, 16), (3, 33), (200, 64), (0, 8)):
        yield {"x": normal(g, t, d), "gate": normal(g, t, 1) * 5}


@cases("scale_by_softplus")
def scale_by_softplus_cases(g: Generator) -> Iterator[Case]:
    for t, d, runs in ((1, 16, 1), (3, 66, 2), (200, 64, 64), (5, 2400, 2), (0, 8, 4)):
        yield {"x": normal(g, t, d), "gate": normal(g, t, runs) * 15}
