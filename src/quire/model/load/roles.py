"""All roles of a model, those of mixers from their own files, and what each rank has of them.

The tables are the only source of shard axes. Experts have a second axis, their number: where a `Division` gives each
rank some of them, a share has fewer and, over the same ranks, whole ones. `local_spec` is the shape of a rank's share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import ConfigError
from quire.core.exclusions.features import EXPERT_RANKS, NO_EXPERTS, WHOLE_EXPERTS
from quire.core.exclusions.table import row_of
from quire.model import audio_roles, draft_roles, mlp_roles, stream_roles, tower_roles
from quire.model.layer_sizes import LayerSizes
from quire.model.mixers import attention, delta, latent, lightning
from quire.model.mixers.layer_mixers import ROLES as MIXED
from quire.model.mixers.layer_mixers import of_rank
from quire.model.role import COLUMNS, EVEN, FIRST, ROWS, SHARED, STEPS, WHOLE, Role
from quire.model.spec import ModelSpec
from quire.ops.arrays import AnyArray, contiguous
from quire.parallel.experts import Division
from quire.quant.base import QWeight

A = TypeVar("A", bound=AnyArray)


def _norm(name: str, where: Callable[[ModelSpec, int], bool] = lambda s, layer: True, optional: bool = False) -> Role:
    """A norm of whole rows, which layers may lack that others have beside them."""
    return Role(
        "vector",
        lambda s: (s.hidden,),
        where=lambda s, layer: where(s, layer) and (name, layer) not in s.bare,
        optional=optional,
    )


ROLES: dict[str, Role] = {
    "embed": Role(
        "table", lambda s: (s.vocab_size, s.embed_width), ROWS, lambda s: s.vocab_size, layer=False, spread=FIRST
    ),
    "positions": Role("table", lambda s: (s.max_position + s.position_offset, s.hidden), layer=False, optional=True),
    "token_types": Role("table", lambda s: (s.token_types, s.hidden), layer=False, optional=True),
    "project_in": Role("linear", lambda s: (s.hidden, s.embed_width), layer=False, optional=True),
    "embed_norm": Role("vector", lambda s: (s.hidden,), layer=False, optional=True),
    "attn_norm": _norm("attn_norm", lambda s, layer: s.has_norm(layer)),
    **MIXED,
    "attn_post_norm": _norm("attn_post_norm", optional=True),
    "mlp_norm": _norm("mlp_norm", lambda s, layer: s.has_mlp(layer)),
    **mlp_roles.ROLES,
    "mlp_post_norm": _norm("mlp_post_norm", optional=True),
    **stream_roles.ROLES,
    "final_norm": Role("vector", lambda s: (s.hidden,), layer=False),
    "head_dense": Role("linear", lambda s: (s.hidden, s.hidden), layer=False, optional=True, partner="head_norm"),
    "head_norm": Role("vector", lambda s: (s.hidden,), layer=False, optional=True, partner="head_dense"),
    "project_out": Role("linear", lambda s: (s.embed_width, s.hidden), layer=False, optional=True),
    "head": Role(
        "linear", lambda s: (s.vocab_size, s.embed_width), ROWS, lambda s: s.vocab_size, layer=False, spread=FIRST
    ),
    "head_bias": Role(
        "vector", lambda s: (s.vocab_size,), ROWS, lambda s: s.vocab_size, layer=False, optional=True, spread=FIRST
    ),
}

ROLES |= draft_roles.ROLES


def _encoder(name: str) -> Role:
    """Role of the same part of the encoder, none of whose layers has experts."""
    return replace(ROLES[name], encoder=True, where=lambda s, layer: True, optional=not ROLES[name].layer)


_ENCODED = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down", "relative_bias", "final_norm")
ROLES |= {f"encoder_{name}": _encoder(name) for name in _ENCODED}
ROLES |= audio_roles.ROLES
ROLES |= tower_roles.ROLES

ADAPTED = frozenset(
    {"q", "k", "v", "o", "gate", "up", "down", "conv_write", "conv_read", "conv_x", "conv_out", "attn_gate",
     "head_gate", "delta_q", "delta_k", "delta_v", "delta_z", "delta_out", "scan_z", "scan_x", "scan_b", "scan_c",
     "scan_dt", "scan_out", "channel_x", "channel_z", "channel_dt", "channel_b", "channel_c", "channel_steps",
     "channel_out", "lightning_q", "lightning_k", "lightning_v", "lightning_gate", "lightning_out"}
)  # fmt: skip
"""Roles of layers that an adapter may change: not those of experts, routers and latents."""

GROUPED = attention.GROUPED | latent.GROUPED | delta.GROUPED | lightning.GROUPED
"""Fused matrices whose roles take turns by heads: name -> how many heads, and rows of each role for one."""
FUSED = {
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "up_gate": ("up", "gate"),
    "conv_in": ("conv_write", "conv_read", "conv_x"),
    "delta_qkv": ("delta_q", "delta_k", "delta_v"),
    "pooled_index_qk": ("pooled_index_q", "pooled_index_k"),
    "scan_in": ("scan_z", "scan_x", "scan_b", "scan_c", "scan_dt"),
    "channel_in": ("channel_x", "channel_z"),
    "channel_read": ("channel_dt", "channel_b", "channel_c"),
    "block_gate_up": ("block_gate", "block_up"),
    "shared_gate_up": ("shared_gate", "shared_up"),
    **{name: tuple(parts) for name, (_, parts) in GROUPED.items()},
}
"""Matrices that some families keep as one on disk: name -> the roles whose rows they hold."""


def _fused(parts: tuple[str, ...]) -> Role:
    def shape(spec: ModelSpec) -> tuple[int, ...]:
        return sum(ROLES[p].shape(spec)[0] for p in parts), ROLES[parts[0]].shape(spec)[1]

    return replace(ROLES[parts[0]], shape=shape)


DISK_ROLES = ROLES | {name: _fused(parts) for name, parts in FUSED.items()}
"""What a checkpoint may hold: the roles, and the fused matrices that are cut into roles at load."""


def disk_rows(role: str, holder: str, spec: ModelSpec, grouped: bool, rotated: int) -> NDArray[np.int64] | None:
    """Rows of the matrix `holder` on disk that are `role`, in our order; None when they are all of it as they lie.

    A fused matrix holds its roles below each other, or, `grouped`, per key/value head its query heads, key and value.
    Interleaved rope turns pairs (2i, 2i + 1) of the first `rotated` numbers of a head; we turn pairs (i, i + r / 2), so
    the rows of queries and keys are permuted instead (0 = they need not be).
    """
    d, n = spec.head_dim, ROLES[role].shape(spec)[0]
    if holder == role:
        rows = np.arange(n, dtype=np.int64)
    elif holder in GROUPED:
        count, parts = GROUPED[holder]
        turns = np.arange(DISK_ROLES[holder].shape(spec)[0], dtype=np.int64).reshape(count(spec), -1)
        first = sum(size(spec) for name, size in list(parts.items())[: list(parts).index(role)])
        rows = turns[:, first : first + parts[role](spec)].flatten()
    elif grouped:
        grid = np.arange(DISK_ROLES[holder].shape(spec)[0], dtype=np.int64).reshape(spec.kv_heads, -1, d)
        rows = {"q": grid[:, :-2], "k": grid[:, -2], "v": grid[:, -1]}[role].flatten()
    else:
        before = FUSED[holder][: FUSED[holder].index(role)]
        rows = np.arange(n, dtype=np.int64) + sum(ROLES[p].shape(spec)[0] for p in before)
    if rotated and role in ("q", "k"):
        heads = rows.reshape(-1, d)
        rows = np.concatenate((heads[:, 0:rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]), 1).flatten()
    elif holder == role:
        return None
    return rows


def parameter_count(spec: ModelSpec, roles: dict[str, Role] = ROLES) -> int:
    """Numbers in the non-optional matrices and vectors of a model, a tied head counted once; biases are not counted."""
    counted = (role for name, role in roles.items() if not role.optional and not (name == "head" and spec.tied_head))
    return sum(role.numbers(spec) for role in counted)


@dataclass(frozen=True)
class Share:
    """One rank's part of a model: number `rank` of `world` of each matrix. `experts`: how they are divided, or None.

    `layers`: those of its stage, None: all. `head`: (number, of how many) of the head's rows, where the first and the
    last stage share them.

    `step`: columns of an MLP that stay together, as they have a scale in common.
    """

    rank: int = 0
    world: int = 1
    experts: Division | None = None
    layers: range | None = None
    head: tuple[int, int] | None = None
    step: int = 1

    @property
    def whole(self) -> bool:
        """Whether it is all of a model."""
        return self.world == 1 and self.experts is None and self.layers is None

    def of_role(self, name: str) -> Share:
        """Which part it has of one role."""
        return Share(*self.head) if name in ("head", "head_bias") and self.head is not None else self

    def span(self, spec: ModelSpec) -> range:
        """Layers of the share."""
        return range(spec.layers) if self.layers is None else self.layers

    def cuts(self, name: str) -> bool:
        """Whether a rank has a part of each matrix or vector of the role."""
        given = ROLES[name].experts and self.experts is not None and self.experts.plan.axis == "tensor"
        return self.world > 1 and ROLES[name].shard != WHOLE and not given

    def held(self, layer: int, spec: ModelSpec) -> tuple[int, ...]:
        """The experts of `layer` that this rank has, ascending."""
        count = spec.moe.routing.experts
        return tuple(range(count)) if self.experts is None else self.experts.held(layer, count)[self.experts.rank]

    def copies(self, name: str, spec: ModelSpec) -> int:
        """How many of a role this rank has."""
        role, whole = ROLES[name], ROLES[name].copies(spec)
        return whole // spec.moe.routing.experts * len(self.held(0, spec)) if role.experts else whole

    def of(self, units: int, what: str, spread: str = EVEN) -> tuple[int, int]:
        """(first, stop) of `units` that stay whole.

        `ConfigError` naming `what` when they cannot be `spread` so.
        """
        rank, world = self.rank, self.world
        if spread == FIRST:
            most = -(-units // world)
            return min(units, rank * most), min(units, (rank + 1) * most)
        steps = (self.step, 32, 1) if spread == STEPS and units else (1,)
        step = next(s for s in steps if s == 1 or (units % s == 0 and units // s >= world))
        if units % world == 0 or (spread == STEPS and units >= world):
            return rank * (units // step) // world * step, (rank + 1) * (units // step) // world * step
        if spread == SHARED and world % units == 0:
            return rank * units // world, rank * units // world + 1
        possible = [str(n) for n in range(1, units + 1) if units % n == 0 or spread == STEPS]
        several = f"{', '.join(possible[:-1])} and {possible[-1]}" if len(possible) > 1 else "only 1"
        can = f"1 to {units}" if spread == STEPS else several
        raise ConfigError(
            f"{units} {_units_of(what)} cannot be split over --tensor-parallel-size {world}; {can} can",
            param="tensor_parallel_size",
        )

    def role(self, name: str, spec: ModelSpec) -> tuple[int, int]:
        """(first, stop) of the units of a split role; `spec`: the whole model's, here and below."""
        units = ROLES[name].units(spec)
        return self.of(units, name, ROLES[name].spread) if self.cuts(name) else (0, units)

    def cut(self, name: str, spec: ModelSpec, length: int) -> slice:
        """The part of the split axis, `length` numbers long, of a role."""
        (first, stop), units = self.role(name, spec), ROLES[name].units(spec)
        return slice(first * length // units, stop * length // units)

    def shape(self, name: str, spec: ModelSpec) -> tuple[int, ...]:
        """The shape of this rank's part of a role."""
        shape = list(ROLES[name].shape(spec))
        if self.cuts(name):
            axis = 0 if ROLES[name].shard == ROWS else 1
            part = self.cut(name, spec, shape[axis])
            shape[axis] = part.stop - part.start
        return tuple(shape)


def _units_of(name: str) -> str:
    """What the units of a role are, in words."""
    own = name.removeprefix("encoder_")
    if own in ("k", "v", "k_row_norm", "k_head_norms"):
        return "key/value heads"
    if own.startswith("scan_"):
        return "groups of scanned heads" if own in ("scan_b", "scan_c") else "scanned heads"
    if own in ("gate", "up", "down", "down_norm") or own.startswith(("expert_", "shared_")):
        return "columns of an MLP"
    return "attention heads" if own in MIXED or own == "relative_bias" else f"rows of {name}"


def local_spec(spec: ModelSpec, share: Share, heads: bool = True) -> ModelSpec:
    """The spec of one rank's share: heads, widths of MLPs, experts and their widths, rows of the head.

    Not `heads`: of MLPs and experts alone. Errors as of `Share.of` and `Division.held`.
    """
    if share.whole:
        return spec
    if share.experts is not None and not any(spec.moe.sparse):
        asked = EXPERT_RANKS if share.experts.plan.axis == "expert" else WHOLE_EXPERTS
        raise row_of(asked, NO_EXPERTS).refusal({"family": spec.family})

    def count(name: str) -> int:
        first, stop = share.role(name, spec)
        return stop - first

    moe = replace(
        spec.moe,
        routing=replace(spec.moe.routing, experts=len(share.held(0, spec))),
        intermediate=count("expert_gate"),
        shared=count("shared_gate"),
    )
    wide = replace(spec, intermediate=count("gate"), moe=moe, sizes=_local_sizes(spec, share, heads))
    if not heads:
        return wide
    return replace(of_rank(wide, lambda name: share.role(name, spec)), vocab_size=count("head"))


def _local_sizes(spec: ModelSpec, share: Share, heads: bool) -> tuple[LayerSizes, ...]:
    """Sizes of the layers of a rank's share; not `heads`: with those of MLPs alone cut."""
    made = []
    for layer, size in enumerate(spec.sizes):
        own = local_spec(spec.at(layer), share, heads)
        made.append(
            replace(size, heads=own.heads, kv_heads=own.kv_heads, head_dim=own.head_dim, intermediate=own.intermediate)
        )
    return tuple(made)


def shard(weight: QWeight, bias: A | None, name: str, spec: ModelSpec, share: Share) -> tuple[QWeight, A | None]:
    """A rank's part of a linear role: the identity where it has all.

    Heads are never cut. Fewer key/value heads than ranks are replicated. The bias of a column shard stays on rank 0, so
    that the reduction adds it once. `ConfigError` when the units do not divide.
    """
    role = ROLES[name]
    if not share.cuts(name):
        return weight, bias
    part = share.cut(name, spec, weight.shape[0 if role.shard == ROWS else 1])
    if role.shard == COLUMNS:
        return weight.slice_cols(part.start, part.stop), bias if share.rank == 0 else None
    return weight.take_rows(part), None if bias is None else cast(A, bias[part])


def shard_vector(vector: A, name: str, spec: ModelSpec, share: Share) -> A:
    """Cut out this rank's part of a vector role, or of the table [., units] that a column shard has."""
    role = ROLES[name]
    if not share.cuts(name):
        return vector
    if role.shard == COLUMNS:
        return cast(A, contiguous(vector[:, share.cut(name, spec, vector.shape[1])]))
    return cast(A, vector[share.cut(name, spec, len(vector))])
