"""What layers have on disk beside attention and MLP: gates of norms, experts beside others, per-layer
embeddings, several streams, Laurel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from quire.model.role import Role
from quire.model.spec import ModelSpec


def _connections(spec: ModelSpec) -> int:
    """Gates of reading and writing of a sublayer, and of mixing where streams are mixed."""
    n = spec.streams.count
    return (2 + n) * n if spec.streams.rounds else 2 * n


def _matrix(rows: str, columns: str) -> Role:
    """A small matrix of a layer, kept as f32."""
    sizes: dict[str, Callable[[ModelSpec], int]] = {
        "n": lambda s: s.streams.count,
        "2n": _connections,
        "nn": lambda s: s.streams.count**2,
        "hidden": lambda s: s.hidden,
        "all": lambda s: s.streams.count * s.hidden,
    }
    return Role("dense", lambda s: (sizes[rows](s), sizes[columns](s)), optional=True)


def _square(spec: ModelSpec) -> tuple[int, ...]:
    return spec.hidden, spec.hidden


def _norm_gate(down: bool, sparse: bool) -> Role:
    """Either matrix of the gate of a norm, which layers have before attention, and `sparse` ones before experts."""
    shape = (lambda s: (s.norm_gate, s.hidden)) if down else (lambda s: (s.hidden, s.norm_gate))
    return Role("dense", shape, where=lambda s, i: not sparse or s.is_sparse(i), optional=True)


def _all(spec: ModelSpec) -> int:
    return spec.streams.count * spec.hidden


def _gates(part: str) -> Iterator[tuple[str, Role]]:
    """What makes a mean of streams by gates that go through few numbers."""
    yield f"residual_{part}_norm", Role("vector", lambda s: (_all(s),), optional=True)
    yield f"residual_{part}_down", Role("linear", lambda s: (s.streams.gate_rank, _all(s)), optional=True)
    yield f"residual_{part}_up", Role("linear", lambda s: (_all(s), s.streams.gate_rank), optional=True)


ROLES = {
    **{f"{norm}_norm_{way}": _norm_gate(way == "down", norm == "mlp") for norm in ("attn", "mlp")
       for way in ("down", "up")},
    "router_scale": Role("vector", lambda s: (s.hidden,), where=lambda s, i: s.is_sparse(i), optional=True),
    "expert_scale": Role(
        "vector", lambda s: (s.moe.routing.experts,), where=lambda s, i: s.is_sparse(i), optional=True
    ),
    "expert_norm": Role("vector", lambda s: (s.hidden,), where=lambda s, i: s.is_sparse(i), optional=True),
    "expert_post_norm": Role("vector", lambda s: (s.hidden,), where=lambda s, i: s.is_sparse(i), optional=True),
    "dense_post_norm": Role("vector", lambda s: (s.hidden,), where=lambda s, i: s.is_sparse(i), optional=True),
    "input_table": Role(
        "table", lambda s: (s.inputs.vocab_size, s.layers * s.inputs.width), layer=False, optional=True
    ),
    "input_rows": Role("linear", lambda s: (s.layers * s.inputs.width, s.hidden), layer=False, optional=True),
    "input_rows_norm": Role("vector", lambda s: (s.inputs.width,), layer=False, optional=True),
    "input_gate": Role("linear", lambda s: (s.inputs.width, s.hidden), optional=True),
    "input_project": Role("linear", lambda s: (s.hidden, s.inputs.width), optional=True),
    "input_norm": Role("vector", lambda s: (s.hidden,), optional=True),
    "stream_scale": Role("vector", lambda s: (1,), optional=True),
    **{f"enter_stream_{i}": Role("linear", _square, layer=False, optional=True) for i in (1, 2, 3)},
    **{f"leave_stream_{i}": Role("linear", _square, layer=False, optional=True) for i in (1, 2, 3)},
    "stream_norm": Role("vector", lambda s: (s.hidden,), optional=True),
    "stream_router": _matrix("n", "hidden"),
    "stream_predict": _matrix("nn", "n"),
    "stream_correct": _matrix("n", "n"),
    "stream_factors": Role("vector", lambda s: (s.hidden,), optional=True),
    **{f"hyper_{part}": _matrix("2n", "all") for part in ("attn", "mlp")},
    **{f"hyper_{part}_base": Role("vector", lambda s: (_connections(s),), optional=True)
       for part in ("attn", "mlp")},
    **{f"hyper_{part}_scale": Role("vector", lambda s: (3 if s.streams.rounds else 2,), optional=True)
       for part in ("attn", "mlp")},
    "hyper_head": replace(_matrix("n", "all"), layer=False),
    "hyper_head_base": Role("vector", lambda s: (s.streams.count,), layer=False, optional=True),
    "hyper_head_scale": Role("vector", lambda s: (1,), layer=False, optional=True),
    **{name: replace(role, layer=part != "head") for part in ("attn", "mlp", "head") for name, role in _gates(part)},
    **{f"residual_{part}_inject": _matrix("n", "all") for part in ("attn", "mlp")},
    "turn_start": Role("vector", lambda s: (s.hidden,), layer=False, optional=True),
    "laurel_left": Role("linear", lambda s: (s.streams.rank, s.hidden), optional=True),
    "laurel_right": Role("linear", lambda s: (s.hidden, s.streams.rank), optional=True),
    "laurel_norm": Role("vector", lambda s: (s.hidden,), optional=True),
}  # fmt: skip
"""Roles of layers, and the matrices that make streams of embedded tokens and of which the head's rows are made."""
IN_FILE = ("input_table", "ngram_table")
"""Tables of which only a few rows are ever in memory; tokens beyond the last row have the first one."""
