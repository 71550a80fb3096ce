"""The op registry: one definition per op, any number of implementations, one choice made at load.
See docs/design/ops.md.

An implementation receives exactly the arguments of the definition. `implementations` builds the table of chosen
callables once; a missing implementation is an error, never a silent fall-back, unless the caller names the reference
for that op. The definitions of layers are torch's (`quire.ops.reference`) and imported only by who calls them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.core.errors import ConfigError
from quire.ops.choice import choose_ops
from quire.ops.lazy import require_torch

F = TypeVar("F", bound=Callable[..., Any])
Case = dict[str, Any]
"""An op's arguments, by name."""


@dataclass
class Op:
    """A named operation: `reference` defines it, `tolerance` of its implementations is relative.

    `pure` is the function that was written down: the same, but for what it returns new where `reference` writes it.
    """

    name: str
    reference: Callable[..., Any]
    tolerance: float
    pure: Callable[..., Any]


REGISTRY: dict[str, Op] = {}
"""The definitions that were imported; all of them after `load_definitions`."""
IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {}
"""Op -> backend -> function; "triton:cublas" is one of the backend "triton" that `--ops name=cublas` asks for."""


def op(tolerance: float, into: str = "") -> Callable[[F], F]:
    """Register the decorated function as the definition of the op of that name.

    `into`: the argument in whose place the op has what the function returns, or the first of it.
    """

    def register(fn: F) -> F:
        REGISTRY[fn.__name__] = Op(fn.__name__, in_place(fn, into) if into else fn, tolerance, fn)
        return fn

    return register


def in_place(fn: Callable[..., Any], into: str) -> Callable[..., Any]:
    """`fn`, whose first result is copied into the argument `into`, and is that argument then."""
    position = list(inspect.signature(fn).parameters).index(into)

    @functools.wraps(fn)
    def call(*args: Any, **named: Any) -> Any:
        target = named[into] if into in named else args[position]
        found = fn(*args, **named)
        if not isinstance(found, tuple):
            return target.copy_(found)
        return target.copy_(found[0]), *found[1:]

    return call


def impl(name: str, backend: str) -> Callable[[F], F]:
    """Register the decorated function as op `name` of `backend`; its first argument is the backend's state."""

    def register(fn: F) -> F:
        IMPLEMENTATIONS.setdefault(name, {})[backend] = fn
        return fn

    return register


def load_modules(package: str) -> None:
    """Import every module of `package`, which registers what it has."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


def load_definitions() -> None:
    """Import every definition, and with them torch."""
    load_modules("quire.ops.reference")
    importlib.import_module("quire.ops.sampling")


def implementations(
    backend: str, own: dict[str, Callable[..., Any]], overrides: tuple[str, ...]
) -> dict[str, tuple[str, Callable[..., Any]]]:
    """Give for each op its (implementation name, callable), as `choose_ops` has it.

    `own`: the backend's by the op's name, and others by "op:implementation".
    """
    table: dict[str, tuple[str, Callable[..., Any]]] = {}
    chosen = choose_ops(backend, overrides)
    if first := next((name for name, which in chosen.items() if which == "reference"), ""):
        require_torch(f"--ops {first}=reference", "train")
        load_definitions()  # once: that looks through folders
    for name, which in chosen.items():
        if which == "reference":
            table[name] = (which, REGISTRY[name].reference)
            continue
        fn = own.get(name if which == backend else f"{name}:{which}")
        if fn is None:
            raise ConfigError(
                f"op {name} has no {backend} implementation; pass --ops {name}=reference to accept the slow one"
            )
        table[name] = (which, fn)
    return table
