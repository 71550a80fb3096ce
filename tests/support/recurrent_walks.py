"""Sequences that go through layers with a recurrent state in steps of any size, with the bits of one call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_cases.recurrent import delta_case, delta_spec, scan_case, scan_spec, state_batch
from quire.ops.op import Case
from quire.ops.recurrent import StateBatch

ROWS = {"delta_rule": ("qkv", "gates", "decay"), "ssm_scan": ("x", "bc", "dt")}
"""Arguments that have a row for each of the batch."""
KINDS: dict[str, tuple[str, Callable[[torch.Generator, list[int]], Case]]] = {
    "delta": ("delta_rule", lambda g, rows: delta_case(g, delta_spec(g, 1, 2, 16, 40), rows)),
    "channels": ("delta_rule", lambda g, rows: delta_case(g, delta_spec(g, 2, 2, 20, 64, True), rows, True)),
    "mamba2": ("ssm_scan", lambda g, rows: scan_case(g, scan_spec(g, 4, 24, 16, 2), rows)),
    "mamba1": ("ssm_scan", lambda g, rows: scan_case(g, scan_spec(g, 1, 70, 8, selective=True), rows, apart=True)),
}
"""Kind of layer -> its op, and a case of it of some rows a sequence."""


@dataclass
class Walk:
    """A sequence on its way: its first `at` rows are done and their state is in `slot`, -1: none is stored yet."""

    inputs: Case
    count: int
    outputs: Tensor
    final: Tensor
    at: int = 0
    slot: int = -1


def step(ops: Any, kind: str, spec: Any, inputs: list[Case], states: Tensor, batch: StateBatch) -> Tensor:
    """Outputs of the rows of all sequences; `states` is written."""
    name = KINDS[kind][0]
    rows = {part: None if inputs[0][part] is None else torch.cat([one[part] for one in inputs]) for part in ROWS[name]}
    ops.begin_step()
    outputs: Tensor = getattr(ops, name)(**rows, states=states, batch=batch, spec=spec)[1]
    return outputs.clone()


def walks_alone(ops: Any, kind: str, seed: int, counts: list[int]) -> tuple[list[Walk], Any, Tensor]:
    """Sequences, each computed in one call by itself; the layer; a state of its shape."""
    g, found = torch.Generator().manual_seed(seed), list[Walk]()
    name, case_of = KINDS[kind]
    spec = case_of(g, [1])["spec"]
    for count in counts:
        case = case_of(g, [count])
        inputs, state = {part: case[part] for part in ROWS[name]}, torch.full_like(case["states"][:1], torch.nan)
        outputs = step(ops, kind, spec, [inputs], state, state_batch([count], [-1], [[(count, 0)]]))
        found.append(Walk(inputs, count, outputs, state[0]))
    return found, spec, state


def check_history(ops: Any, kind: str, seed: int, most: int) -> None:
    """Up to four sequences of up to `most` rows; rows behind a stored state are computed again, as drafts are."""
    rng = random.Random(seed)
    counts = [rng.randrange(1, most) for _ in range(rng.randrange(1, 5))]
    walks, spec, empty = walks_alone(ops, kind, seed % 5, counts)
    states = torch.full((3 * len(walks), *empty.shape[1:]), torch.nan)
    free = rng.sample(range(len(states)), len(states))
    while todo := [walk for walk in walks if walk.at < walk.count]:
        now, rows, kept, stores, left = rng.sample(todo, rng.randrange(len(todo)) + 1), [], [], [], list[int]()
        for walk in now:
            rows.append(rng.randrange(walk.count - walk.at + 1))
            kept.append((rng.randrange(rows[-1] + 1) if rng.random() < 0.5 else rows[-1], place_of(walk, rng, free)))
            other = (rng.randrange(rows[-1] + 1), free.pop() if rng.random() < 0.4 else -1)
            left += {walk.slot, other[1]} - {-1, kept[-1][1]}
            stores.append(rng.sample([kept[-1], other], 2))
        ends = [walk.at + n for walk, n in zip(now, rows, strict=True)]
        inputs = [
            {part: x if x is None else x[walk.at : end] for part, x in walk.inputs.items()}
            for walk, end in zip(now, ends, strict=True)
        ]
        batch = state_batch(rows, [walk.slot for walk in now], stores)
        outputs = step(ops, kind, spec, inputs, states, batch).split(rows)
        for walk, found, end, (count, slot) in zip(now, outputs, ends, kept, strict=True):
            assert torch.equal(found, walk.outputs[walk.at : end])
            walk.at, walk.slot = walk.at + count, slot
        free += left
    assert all(torch.equal(states[walk.slot], walk.final) for walk in walks)


def place_of(walk: Walk, rng: random.Random, free: list[int]) -> int:
    """Where a sequence's state goes: to its own slot, or to another."""
    return walk.slot if walk.slot >= 0 and rng.random() < 0.5 else free.pop()
