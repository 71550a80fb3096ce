"""Cases of the ops of `quire.ops.reference.recurrent`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor

from op_cases.registry import cases
from op_cases.weights import normal
from quire.ops.op import Case
from quire.ops.recurrent import DeltaSpec, ScanSpec, StateBatch


def ints(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def state_batch(
    rows: Sequence[int], source: Sequence[int], stores: Sequence[Sequence[tuple[int, int]]] = ()
) -> StateBatch:
    """`rows` of each sequence, the slot each reads, and up to two stores of each: (rows, slot)."""
    filled = [[*own, (0, -1), (0, -1)][:2] for own in stores or [()] * len(rows)]
    counts, target = ([[store[i] for store in own] for own in filled] for i in (0, 1))
    ends = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    return StateBatch(ends, ints(source), ints(counts).view(-1, 2), ints(target).view(-1, 2))


def random_batch(g: Generator, rows: Sequence[int]) -> tuple[StateBatch, int]:
    """Each sequence reads a slot of its own or zeros, and stores twice, once or never; and the number of slots."""
    source, stores, slots = [], [], torch.randperm(3 * len(rows) + 2, generator=g).tolist()
    for s, count in enumerate(rows):
        own, kind = slots[3 * s : 3 * s + 3], int(torch.randint(5, (), generator=g))
        source.append(-1 if kind == 0 else own[0])
        at = sorted(torch.randint(count + 1, (2,), generator=g).tolist())
        targets = {0: (own[1], own[2]), 1: (own[1], own[0]), 2: (-1, own[0]), 3: (-1, -1)}.get(kind, (own[0], own[1]))
        stores.append([(at[0], targets[0]), (count if kind == 2 else at[1], targets[1])])
    return state_batch(rows, source, stores), len(slots)


def delta_spec(g: Generator, nk: int, nv: int, dk: int, dv: int, channels: bool = False, **extra: float) -> DeltaSpec:
    bias = normal(g, nv * dk if channels else nv) * 2
    return DeltaSpec(nk, nv, dk, dv, -torch.rand(nv, generator=g).mul(2.8).exp(), bias, **extra)


def delta_case(g: Generator, spec: DeltaSpec, rows: Sequence[int], channels: bool = False) -> Case:
    t, nv = sum(rows), spec.value_heads
    batch, slots = random_batch(g, rows)
    return {
        "qkv": normal(g, t, spec.width),
        "gates": normal(g, t, nv if channels else 2 * nv) * 2,
        "decay": normal(g, t, nv * spec.key_dim) * 2 if channels else None,
        "states": normal(g, slots, nv, spec.key_dim, spec.value_dim),
        "batch": batch,
        "spec": spec,
    }


@cases("delta_rule")
def delta_rule_cases(g: Generator) -> Iterator[Case]:
    for rows, *sizes in (((1,), 1, 1, 16, 16), ((1, 1, 1), 2, 4, 32, 64), ((5, 0, 17, 1), 1, 3, 24, 40),
                         ((18,), 1, 1, 128, 128), ((2, 18), 2, 2, 7, 9), ((0,), 1, 1, 8, 8)):  # fmt: skip
        for channels in (False, True):
            for extra in ({}, {"lower_bound": -5.0}) if channels else ({}, {"beta_scale": 2.0}):
                yield delta_case(g, delta_spec(g, *sizes, channels, **extra), rows, channels)


def scan_spec(g: Generator, heads: int, head_dim: int, state: int, groups: int = 1, selective: bool = False,
              plain: bool = False, **limits: float) -> ScanSpec:  # fmt: skip
    a = -torch.rand((state, head_dim) if selective else (heads,), generator=g).mul(2.8).exp()
    d, bias = (None if plain else normal(g, head_dim if selective else heads) for _ in range(2))
    return ScanSpec(heads, head_dim, state, a, d, bias, groups, **limits)


def scan_case(g: Generator, spec: ScanSpec, rows: Sequence[int], apart: bool = False) -> Case:
    """`apart`: B and C are an argument of their own."""
    t, pairs = sum(rows), 2 * spec.groups * spec.state
    batch, slots = random_batch(g, rows)
    return {
        "x": normal(g, t, spec.inner + (0 if apart else pairs)),
        "bc": normal(g, t, pairs) if apart else None,
        "dt": normal(g, t, spec.steps) * 2,
        "states": normal(g, slots, spec.heads, spec.state, spec.head_dim),
        "batch": batch,
        "spec": spec,
    }


@cases("ssm_scan")
def ssm_scan_cases(g: Generator) -> Iterator[Case]:
    for rows, *sizes in (((1,), 1, 16, 16, 1), ((1, 1, 1), 4, 64, 32, 2), ((5, 0, 17, 1), 6, 24, 20, 3),
                         ((18,), 1, 64, 128, 1), ((2, 18), 2, 9, 7, 2), ((0,), 1, 8, 8, 1)):  # fmt: skip
        yield scan_case(g, scan_spec(g, *sizes), rows)
        yield scan_case(g, scan_spec(g, *sizes, plain=True, low=0.01, high=1.5), rows, apart=True)
        yield scan_case(g, scan_spec(g, *sizes, plain=True), rows) | {"dt": None}
    for rows, inner, state in (((1, 1), 64, 16), ((3, 20), 90, 16), ((2,), 600, 4), ((1,), 5, 3)):
        yield scan_case(g, scan_spec(g, 1, inner, state, selective=True), rows, apart=True)
        yield scan_case(g, scan_spec(g, 1, inner, state, selective=True, plain=True), rows)


@cases("gated_rmsnorm")
def gated_rmsnorm_cases(g: Generator) -> Iterator[Case]:
    for t, width, span in ((1, 64, 64), (5, 96, 24), (40, 33, 11), (0, 16, 8), (2, 9000, 4500), (3, 7, 1)):
        for gate, first, weights in (
            ("silu", False, span), ("sigmoid", False, width), ("silu", True, width), ("silu", False, 0)
        ):  # fmt: skip
            rows = {"x": normal(g, t, width), "z": normal(g, t, width) * 3}
            weight = normal(g, weights) if weights else None
            yield rows | {"weight": weight, "span": span, "gate": gate, "gate_first": first, "eps": 1e-5}
