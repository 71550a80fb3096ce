"""What layers have on disk for their MLP: the dense one, routed experts, and those that every token takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.model.role import COLUMNS, ROWS, STEPS, Role
from quire.model.spec import ModelSpec


def _sparse(spec: ModelSpec, layer: int) -> bool:
    return spec.is_sparse(layer)


def _plain(spec: ModelSpec, layer: int) -> bool:
    return spec.has_mlp(layer) and (not spec.is_sparse(layer) or spec.moe.beside or spec.moe.late)


def _with_latent(spec: ModelSpec, layer: int) -> bool:
    return spec.is_sparse(layer) and spec.moe.latent > 0


def _with_shared(spec: ModelSpec, layer: int) -> bool:
    return spec.is_sparse(layer) and spec.moe.shared > 0


def _hidden(spec: ModelSpec) -> int:
    return spec.hidden


def _mlp(
    rows: bool,
    width: Callable[[ModelSpec], int],
    where: Callable[[ModelSpec, int], bool],
    read: Callable[[ModelSpec], int] = _hidden,
) -> Role:
    """Up ([width, read], `rows`) or down ([read, width]) of an MLP."""
    shape = (lambda s: (width(s), read(s))) if rows else (lambda s: (read(s), width(s)))
    return Role("linear", shape, ROWS if rows else COLUMNS, width, where=where, spread=STEPS)


def _expert(rows: bool) -> Role:
    return replace(_mlp(rows, lambda s: s.moe.intermediate, _sparse, lambda s: s.moe.latent or s.hidden), experts=True)


def _intermediate(spec: ModelSpec) -> int:
    return spec.intermediate


def _shared(spec: ModelSpec) -> int:
    return spec.moe.shared


ROLES = {
    "gate": _mlp(True, _intermediate, _plain),
    "up": _mlp(True, _intermediate, _plain),
    "down_norm": Role(
        "vector", lambda s: (s.intermediate,), ROWS, _intermediate, optional=True, where=_plain, spread=STEPS
    ),
    "down": _mlp(False, _intermediate, _plain),
    **{
        f"xielu_{name}": Role("vector", lambda s: (1,), optional=True, where=_plain)
        for name in ("positive", "negative", "beta", "eps")
    },
    "router": Role("dense", lambda s: (s.moe.choices, s.hidden), where=_sparse),
    "experts_bias": Role("vector", lambda s: (s.hidden,), where=_sparse, optional=True),
    "router_bias": Role(
        "vector",
        lambda s: (s.moe.choices,),
        where=lambda s, i: _sparse(s, i) and not s.moe.chosen_by_token(i),
        optional=True,
    ),
    "token_experts": Role(
        "vector",
        lambda s: (s.vocab_size, s.moe.routing.top_k),
        where=lambda s, i: s.moe.chosen_by_token(i),
        optional=True,
        integers=True,
    ),
    "expert_enter": Role("linear", lambda s: (s.moe.latent, s.hidden), where=_with_latent),
    "expert_leave": Role("linear", lambda s: (s.hidden, s.moe.latent), where=_with_latent),
    "expert_gate": _expert(True),
    "expert_up": _expert(True),
    "expert_down": _expert(False),
    "shared_gate": _mlp(True, _shared, _with_shared),
    "shared_up": _mlp(True, _shared, _with_shared),
    "shared_down": _mlp(False, _shared, _with_shared),
    "shared_switch": Role("dense", lambda s: (1, s.hidden), where=_with_shared, optional=True),
}
