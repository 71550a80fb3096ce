"""Which cases each op has: arguments of the sizes and values where implementations differ.

A case is the dict of an op's arguments. `linear` takes a `Weight` in one; whoever runs it packs it for its backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Generator

from quire.ops.op import REGISTRY, Case, load_definitions

load_definitions()

Cases = Callable[[Generator], Iterator[Case]]
CASES: dict[str, Cases] = {}


def cases(name: str) -> Callable[[Cases], Cases]:
    """Register the decorated generator function as the cases of op `name`."""
    assert name in REGISTRY, f"there is no op {name}"

    def register(fn: Cases) -> Cases:
        CASES[name] = fn
        return fn

    return register


def of_module(name: str) -> list[str]:
    """The ops whose cases are in `op_cases.name`, sorted."""
    return sorted(op for op, fn in CASES.items() if fn.__module__ == f"op_cases.{name}")
