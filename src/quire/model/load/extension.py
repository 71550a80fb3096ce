"""From an adapter's file to what it changes beyond low-rank matrices of layers: numbers, computed once at its load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.core.errors import ConfigError, ModelError
from quire.model.load.adapter_files import LowRank, TableChange
from quire.model.load.roles import COLUMNS, DISK_ROLES, ROWS, Share
from quire.model.net.linear import Linear
from quire.model.net.lora import Change, Factors, OwnRows, Piece, Shift
from quire.model.net.parts import Embed, Embedding
from quire.model.spec import ModelSpec
from quire.ops.arrays import to_torch
from quire.ops.backend import Ops
from quire.ops.lazy import array_dtype
from quire.ops.weights import Weight
from quire.quant.base import QWeight, float_kind

CHUNK = 4096
"""Rows of a matrix that are widened to f32 at one time."""
WHOLE_MODEL = Share()
Where = tuple[str, int]
"""A role and a layer."""
Weights = Callable[[], tuple[QWeight, Tensor | None]]
"""A matrix as served, before packing, and its bias."""


@dataclass(frozen=True)
class Base:
    """The loaded model. `embed`: this rank's rows of the table of tokens; `weights`: `Weights` of a role and a layer,
    all ranks' together; `dtype`: of matrices that are not quantized; `share`: what this rank has of them."""

    ops: Ops
    spec: ModelSpec
    embed: Embed
    weights: Callable[[str, int | None], tuple[QWeight, Tensor | None]]
    dtype: torch.dtype
    share: Share = WHOLE_MODEL

    @property
    def table(self) -> Embedding:
        """This rank's rows of the table of tokens."""
        assert isinstance(self.embed, Embedding), "as it was loaded"
        return self.embed

    @property
    def tokens(self) -> slice:
        """The tokens that this rank has rows of in the table, and in the output head."""
        return self.share.cut("head", self.spec, self.spec.vocab_size)

    @property
    def row_dtype(self) -> torch.dtype:
        """Of rows between ops: a GPU's have that of the table of tokens."""
        table = self.table.table
        return table.dtype if self.ops.gpu is not None and isinstance(table, Tensor) else torch.float32

    def kept_bytes(self, rows: int) -> int:
        """Bytes of `rows` rows that the head reads."""
        return rows * self.spec.embed_width * self.row_dtype.itemsize


@dataclass(frozen=True)
class HeadChange:
    """`changes`: what an adapter adds to the output head; `own`: the head in its place. mine [tokens] int32: 0 for the
    logits' rows that have the adapter, -1 for others."""

    mine: Tensor
    changes: tuple[Change, ...] = ()
    own: Linear | None = None


@dataclass(frozen=True)
class Extension:
    """What one adapter holds; `excess` and `shift` [n] f32 are those of `Factors` and `Shift`, by role."""

    excess: Mapping[Where, Tensor]
    shift: Mapping[Where, Tensor]
    embed: OwnRows | None
    head: HeadChange | None

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers, the step's arrays aside."""
        head = () if self.head is None else self.head.changes
        held = [*self.excess.values(), *self.shift.values()]
        held += [t for part in (self.embed, *head) for t in ([] if part is None else _numbers(part))]
        own = None if self.head is None else self.head.own
        return sum(t.nbytes for t in held) + (0 if own is None else own.weight.nbytes)


def _numbers(part: object) -> list[Tensor]:
    named = {name: t for name, t in vars(part).items() if isinstance(t, Tensor)}
    return [t for name, t in named.items() if name not in ("rows", "ones", "mine", "at")]


def table_bytes(base: Base, embed: TableChange, head: TableChange) -> int:
    """Bytes of the tables that an adapter has whole, which are known before they are made."""
    spec = base.spec
    numbers = spec.vocab_size * spec.embed_width
    return numbers * 4 * (embed.own is not None) + numbers * base.dtype.itemsize * (head.own is not None)


def settled(part: LowRank, weights: Weights, what: str) -> tuple[LowRank, Tensor | None, Tensor | None]:
    """(what rows add, excess, shift) of one matrix.

    DoRA's output is bias + g (W x + b a x), g = magnitude / norms of the rows of W + b a; ours is
    g (W x + bias) + g b a x + (1 - g) bias. `ModelError` for factors that are no numbers or below zero.
    """
    if part.magnitude is None:
        return part, None, part.bias
    weight, bias = weights()
    squares = [
        torch.linalg.vector_norm(
            to_torch(weight.take_rows(slice(i, i + CHUNK)).dequantize()) + part.b[i : i + CHUNK] @ part.a, dim=1
        )
        for i in range(0, len(part.b), CHUNK)
    ]
    factor = _factor(part.magnitude, torch.cat(squares), what)
    shift = None if bias is None else (1 - factor) * bias
    return LowRank(part.a, factor[:, None] * part.b), factor - 1, shift


def cut(
    role: str, low: LowRank, added: tuple[Tensor | None, Tensor | None], spec: ModelSpec, share: Share
) -> tuple[LowRank, Tensor | None, Tensor | None]:
    """This rank's part of what `settled` gave, (low, *added), for a role, cut as its matrix is.

    Rows of partial sums are scaled by every rank; what is added to all sums is rank 0's.
    """
    (excess, shift), axis = added, DISK_ROLES[role].shard
    if share.world == 1 or axis not in (ROWS, COLUMNS):
        return low, excess, shift
    if axis == COLUMNS:
        part = share.cut(role, spec, low.a.shape[1])
        return replace(low, a=low.a[:, part]), excess, None if share.rank else shift
    part = share.cut(role, spec, len(low.b))
    of = [None if vector is None else vector[part] for vector in (excess, shift)]
    return replace(low, b=low.b[part]), of[0], of[1]


def _factor(magnitude: Tensor, norms: Tensor, what: str) -> Tensor:
    factor = magnitude / norms
    if not bool((factor.isfinite() & (factor >= 0)).all()):
        raise ModelError(f"lora_magnitude_vector of {what}: has numbers below zero, or stands for rows of zeros")
    return factor


def own_rows(base: Base, slot: int, change: TableChange, rows: int) -> OwnRows | None:
    """The change of the table of tokens by the adapter in `slot`; `rows`: most of a step."""
    if change.nothing:
        return None
    device = base.ops.device
    its, places = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
    found = OwnRows(slot, its, places)
    low, here = change.low, base.tokens
    if low is not None:
        excess = None
        if low.magnitude is not None:
            if base.share.world > 1:
                raise ConfigError(
                    "--tensor-parallel-size: magnitudes (DoRA) of the table of tokens are norms over the rows of all "
                    "ranks, which each has a part of; use one rank",
                    param="tensor_parallel_size",
                )
            factor = _factor(low.magnitude, _column_norms(base, low), "the table of tokens")
            low, excess = LowRank(low.a, factor[:, None] * low.b), (factor - 1)[None, None].to(device)
        a, b = low.a.t()[here].contiguous().to(device), low.b.t()[None].contiguous().to(device)
        return replace(found, excess=excess, a=a, b=b, first=base.table.first)
    vocabulary = base.spec.vocab_size
    ids = (
        torch.tensor(change.tokens, dtype=torch.int32)
        if change.own is None
        else torch.arange(vocabulary, dtype=torch.int32)
    )
    own = change.rows if change.own is None else change.own
    assert own is not None
    mine = (ids >= here.start) & (ids < here.stop)
    ids, own = ids[mine], own[mine]
    added = torch.empty(1 + len(ids), own.shape[1], dtype=base.row_dtype, device=device)
    added[0] = -0.0  # x + -0 is x for every x
    for i in range(0, len(ids), CHUNK):
        part = slice(i, i + CHUNK)
        added[1 + i : 1 + i + CHUNK] = own[part].float().to(device) - _embedded(base, ids[part]).float()
    place = torch.zeros(vocabulary, dtype=torch.int32)
    place[ids.long()] = torch.arange(1, 1 + len(ids), dtype=torch.int32)
    return replace(found, added=added, place=place.to(device))


def _embedded(base: Base, ids: Tensor) -> Tensor:
    """Rows of the model's table as they are served."""
    base.ops.begin_step()
    return base.table(base.ops, ids.to(base.ops.device))


def _column_norms(base: Base, low: LowRank) -> Tensor:
    """Norms [d] over all tokens of the table with what `low` adds."""
    total = torch.zeros(len(low.b), dtype=torch.float64)
    for i in range(0, base.spec.vocab_size, CHUNK):
        ids = torch.arange(i, min(i + CHUNK, base.spec.vocab_size), dtype=torch.int32)
        rows = _embedded(base, ids).float().cpu() + (low.b @ low.a[:, i : i + CHUNK]).t()
        total += rows.double().square().sum(0)
    return total.sqrt().float()


def head_change(base: Base, change: TableChange, rows: int, ones: Tensor) -> HeadChange | None:
    """The change of the output head; `rows` and `ones` as of `own_rows` and `Shift`.

    Rows of their own for m tokens are matrices of rank m: what these rows have more, and which tokens they are.
    """
    if change.nothing:
        return None
    device, scale, here = base.ops.device, base.spec.logit_scale, base.tokens
    mine = torch.zeros(rows, dtype=torch.int32, device=device)
    if change.own is not None and base.share.rank:
        return None  # rank 0 makes these logits, of rows that it has whole
    if change.own is not None:
        packed = base.ops.pack(Weight(float_kind(array_dtype(base.dtype)), change.own.to(base.dtype)))
        bias = None if change.own_bias is None else (change.own_bias * scale).to(device)
        return HeadChange(mine, own=Linear(packed, bias))
    if change.rows is not None:
        ids = torch.tensor(change.tokens)
        added = change.rows - to_torch(base.weights("head", None)[0].take_rows(ids).dequantize())
        chosen = torch.zeros(len(ids), base.spec.vocab_size)
        chosen[torch.arange(len(ids)), ids] = 1.0
        return HeadChange(
            mine, (Piece(added[None].to(device), chosen[None, :, here].contiguous().to(device), mine, 0),)
        )
    assert change.low is not None
    low, excess, shift = settled(change.low, lambda: base.weights("head", None), "the output head")
    piece = Piece(low.a[None].to(device), low.b.t()[None, :, here].contiguous().to(device), mine, 0)
    before = () if excess is None else (Factors(excess[None, None, here].contiguous().to(device), mine),)
    after = () if shift is None else (Shift((shift * scale)[None, None, here].contiguous().to(device), mine, ones),)
    return HeadChange(mine, (*before, piece, *after))
