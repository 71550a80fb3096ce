"""The op registry: one definition per op, any number of implementations, one choice made at load.

An implementation receives exactly the arguments of the reference. `select` builds the table of chosen callables once;
a missing implementation is an error, never a silent fall-back, unless the caller names the reference for that op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.core.errors import ConfigError
from quire.ops.choice import choose_ops

F = TypeVar("F", bound=Callable[..., Any])
Case = dict[str, Any]
"""An op's arguments, by name."""


@dataclass
class Op:
    """A named operation: `reference` defines it, `tolerance` of its implementations is relative."""

    name: str
    reference: Callable[..., Any]
    tolerance: float
    impls: dict[str, Callable[..., Any]] = field(default_factory=dict)


REGISTRY: dict[str, Op] = {}


def op(tolerance: float) -> Callable[[F], F]:
    """Register the decorated torch function as the definition of the op of that name."""

    def register(fn: F) -> F:
        REGISTRY[fn.__name__] = Op(fn.__name__, fn, tolerance, impls={"reference": fn})
        return fn

    return register


def impl(name: str, backend: str) -> Callable[[F], F]:
    """Register the decorated function as op `name` of `backend`; its first argument is the backend's state.

    A backend "triton:cublas" is an implementation of the backend "triton" that `--ops name=cublas` asks for.
    """

    def register(fn: F) -> F:
        REGISTRY[name].impls[backend] = fn
        return fn

    return register


def implementations(
    backend: str, own: dict[str, Callable[..., Any]], overrides: tuple[str, ...]
) -> dict[str, tuple[str, Any]]:
    """For each op its (implementation name, callable), as `choose_ops` has it.

    `own`: the backend's by the op's name, and others by "op:implementation".
    """
    table: dict[str, tuple[str, Any]] = {}
    for name, which in choose_ops(backend, overrides).items():
        key = name if which == backend else f"{name}:{which}"
        fn = REGISTRY[name].reference if which == "reference" else own.get(key)
        if fn is None:
            raise ConfigError(
                f"op {name} has no {backend} implementation; pass --ops {name}=reference to accept the slow one"
            )
        table[name] = (which, fn)
    return table
