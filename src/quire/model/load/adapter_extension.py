"""The way from an adapter's file to what it changes beyond low-rank matrices of layers: numbers, computed once at its
load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32, F64, I32, Dtype
from quire.core.errors import ModelError
from quire.core.exclusions.features import ADAPTER_TOKEN_NORMS, TENSOR
from quire.core.exclusions.table import row_of
from quire.model.load.adapter_files import LowRank, TableChange
from quire.model.load.roles import DISK_ROLES, Share
from quire.model.net.lora import Change, Factors, LoraSlots, OwnRows, Shift
from quire.model.net.parts import Embed, Embedding, Linear
from quire.model.role import COLUMNS, ROWS
from quire.model.spec import ModelSpec
from quire.ops.arrays import AnyArray, Host, dtype_of, is_array, row_norms, to_numpy
from quire.ops.backend import Ops
from quire.ops.weights import PackedTable, PieceTable, StoredTable, Weight
from quire.quant.base import QWeight, float_kind

CHUNK = 4096
"""Rows of a matrix that are widened to f32 at one time."""
WHOLE_MODEL = Share()
Where = tuple[str, int]
"""A role and a layer."""
Weights = Callable[[], tuple[QWeight, AnyArray | None]]
"""A matrix as served, before packing, and its bias."""


@dataclass(frozen=True)
class Base:
    """The loaded model. `embed`: this rank's rows of the table of tokens; `weights`: `Weights` of a role and a layer,
    all ranks' together; `dtype`: of matrices that are not quantized; `share`: what this rank has of them."""

    ops: Ops
    spec: ModelSpec
    embed: Embed
    weights: Callable[[str, int | None], tuple[QWeight, AnyArray | None]]
    dtype: Dtype
    share: Share = WHOLE_MODEL

    @property
    def table(self) -> Embedding:
        """The rank's rows of the table of tokens."""
        assert isinstance(self.embed, Embedding), "as it was loaded"
        return self.embed

    @property
    def tokens(self) -> slice:
        """The tokens that this rank has rows of in the table, and in the output head."""
        return self.share.cut("head", self.spec, self.spec.vocab_size)

    @property
    def row_dtype(self) -> Dtype:
        """Dtype of rows between ops: a GPU's have that of the table of tokens."""
        table = self.table.table
        return F32 if isinstance(table, (PackedTable, StoredTable, PieceTable)) else self.ops.row_dtype(dtype_of(table))

    def kept_bytes(self, rows: int) -> int:
        """Bytes of `rows` rows that the head reads."""
        return rows * self.spec.embed_width * self.row_dtype.itemsize


@dataclass(frozen=True)
class HeadChange:
    """`changes`: what an adapter adds to the output head; `own`: the head in its place. mine [tokens] int32: 0 for the
    logits' rows that have the adapter, -1 for others."""

    mine: Any
    changes: tuple[Change, ...] = ()
    own: Linear | None = None


@dataclass(frozen=True)
class AdapterExtension:
    """What one adapter holds; `excess` and `shift` [n] f32 are those of `Factors` and `Shift`, by role."""

    excess: Mapping[Where, Host]
    shift: Mapping[Where, Host]
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


def _numbers(part: object) -> list[Any]:
    named = {name: t for name, t in vars(part).items() if is_array(t)}
    return [t for name, t in named.items() if name not in ("rows", "ones", "mine", "at")]


def table_bytes(base: Base, embed: TableChange, head: TableChange) -> int:
    """Bytes of the tables that an adapter has whole, which are known before they are made."""
    spec = base.spec
    numbers = spec.vocab_size * spec.embed_width
    return numbers * 4 * (embed.own is not None) + numbers * base.dtype.itemsize * (head.own is not None)


def settled(part: LowRank, weights: Weights, what: str) -> tuple[LowRank, Host | None, Host | None]:
    """(what rows add, excess, shift) of one matrix.

    DoRA's output is bias + g (W x + b a x), g = magnitude / norms of the rows of W + b a; ours is
    g (W x + bias) + g b a x + (1 - g) bias. `ModelError` for factors that are no numbers or below zero.
    """
    if part.magnitude is None:
        return part, None, part.bias
    weight, bias = weights()
    norms = [
        row_norms(weight.take_rows(slice(i, i + CHUNK)).dequantize() + part.b[i : i + CHUNK] @ part.a)
        for i in range(0, len(part.b), CHUNK)
    ]
    factor = _factor(part.magnitude, np.concatenate(norms), what)
    shift = None if bias is None else (1 - factor) * to_numpy(bias)
    return LowRank(part.a, factor[:, None] * part.b), factor - 1, shift


def cut(
    role: str, low: LowRank, added: tuple[Host | None, Host | None], spec: ModelSpec, share: Share
) -> tuple[LowRank, Host | None, Host | None]:
    """Cut out this rank's part of what `settled` gave, (low, *added), for a role, cut as its matrix is.

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


def _factor(magnitude: Host, norms: Host, what: str) -> Host:
    with np.errstate(divide="ignore", invalid="ignore"):
        factor: Host = magnitude / norms
    if not (np.isfinite(factor) & (factor >= 0)).all():
        raise ModelError(f"lora_magnitude_vector of {what}: has numbers below zero, or stands for rows of zeros")
    return factor


def own_rows(base: Base, slot: int, change: TableChange, rows: int) -> OwnRows | None:
    """The change of the table of tokens by the adapter in `slot`; `rows`: most of a step."""
    if change.nothing:
        return None
    ops = base.ops
    its, places = (ops.zeros((rows,), I32) for _ in range(2))
    found = OwnRows(slot, its, places)
    low, here = change.low, base.tokens
    if low is not None:
        excess = None
        if low.magnitude is not None:
            if base.share.world > 1:
                raise row_of(TENSOR, ADAPTER_TOKEN_NORMS).refusal({})
            factor = _factor(low.magnitude, _column_norms(base, low), "the table of tokens")
            low, excess = LowRank(low.a, factor[:, None] * low.b), ops.put((factor - 1)[None, None])
        a, b = (ops.put(np.ascontiguousarray(x)) for x in (low.a.T[here], low.b.T[None]))
        return replace(found, excess=excess, a=a, b=b, first=base.table.first)
    vocabulary = base.spec.vocab_size
    ids = np.array(change.tokens, I32) if change.own is None else np.arange(vocabulary, dtype=I32)
    own = change.rows if change.own is None else change.own
    assert own is not None
    mine = (ids >= here.start) & (ids < here.stop)
    ids, own = ids[mine], own[mine]
    added = np.empty((1 + len(ids), own.shape[1]), base.row_dtype)
    added[0] = -0.0  # x + -0 is x for every x
    for i in range(0, len(ids), CHUNK):
        part = slice(i, i + CHUNK)
        added[1 + i : 1 + i + CHUNK] = own[part].astype(F32) - _embedded(base, ids[part])
    place = np.zeros(vocabulary, I32)
    place[ids] = np.arange(1, 1 + len(ids), dtype=I32)
    return replace(found, added=ops.put(added), place=ops.put(place))


def _embedded(base: Base, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Rows of the model's table as they are served."""
    base.ops.begin_step()
    return base.ops.host(base.table(base.ops, base.ops.put(ids))).astype(F32)


def _column_norms(base: Base, low: LowRank) -> Host:
    """Norms [d] over all tokens of the table with what `low` adds."""
    total = np.zeros(len(low.b), F64)
    for i in range(0, base.spec.vocab_size, CHUNK):
        ids = np.arange(i, min(i + CHUNK, base.spec.vocab_size), dtype=I32)
        rows = _embedded(base, ids) + (low.b @ low.a[:, i : i + CHUNK]).T
        total += np.square(rows.astype(F64)).sum(0)
    return np.sqrt(total).astype(F32)


def head_change(base: Base, change: TableChange, rows: int, ones: Any) -> HeadChange | None:
    """The change of the output head; `rows` and `ones` as of `own_rows` and `Shift`.

    Rows of their own for m tokens are matrices of rank m: what these rows have more, and which tokens they are.
    """
    if change.nothing:
        return None
    scale, here = base.spec.logit_scale, base.tokens

    def put(x: Host) -> Any:
        return base.ops.put(np.ascontiguousarray(x))

    mine = base.ops.zeros((rows,), I32)
    if change.own is not None and base.share.rank:
        return None  # rank 0 makes these logits, of rows that it has whole
    if change.own is not None:
        own = change.own.astype(base.dtype, copy=False)
        packed = base.ops.pack(Weight(float_kind(base.dtype), own))
        bias = None if change.own_bias is None else base.ops.put(change.own_bias * scale)
        return HeadChange(mine, own=Linear(packed, bias))
    if change.rows is not None:
        ids = np.array(change.tokens, np.int64)
        added = change.rows - base.weights("head", None)[0].take_rows(ids).dequantize()
        chosen = np.zeros((len(ids), base.spec.vocab_size), F32)
        chosen[np.arange(len(ids)), ids] = 1.0
        return HeadChange(mine, (LoraSlots(put(added[None]), put(chosen[None, :, here]), mine, 0),))
    assert change.low is not None
    low, excess, shift = settled(change.low, lambda: base.weights("head", None), "the output head")
    piece = LoraSlots(put(low.a[None]), put(low.b.T[None, :, here]), mine, 0)
    before = () if excess is None else (Factors(put(excess[None, None, here]), mine),)
    after = () if shift is None else (Shift(put((shift * scale)[None, None, here]), mine, ones),)
    return HeadChange(mine, (*before, piece, *after))
