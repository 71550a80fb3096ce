"""Latent attention of a layer, from what the checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from quire.model.load.reader import WeightReader
from quire.model.load.roles import DISK_ROLES
from quire.model.net.latent import LatentAttention, LowRankQuery, Project, WideQuery
from quire.model.net.parts import Linear, NormSpans, RmsNorm, RowChange
from quire.ops.arrays import Array, cast_to
from quire.ops.experts import padded_rows
from quire.ops.latents import LatentHeads
from quire.ops.weights import Packed, Weight
from quire.quant.base import float_kind


def load_latent(reader: WeightReader, index: int) -> tuple[Linear, LatentAttention]:
    """`qkv` and attention of layer `index`, packed."""
    spec = reader.local.at(index)
    mla = spec.mla
    turn = halves(mla.rope) if mla.interleaved else np.arange(mla.rope, dtype=np.int64)
    down = reader.linear(("kv_a",), index, np.concatenate((np.arange(mla.rank, dtype=np.int64), mla.rank + turn)))
    per_head = np.concatenate((np.arange(mla.nope, dtype=np.int64), mla.nope + turn))
    rows = (np.arange(spec.heads, dtype=np.int64)[:, None] * spec.head_dim + per_head).flatten()
    norm = reader.vector("kv_a_norm", index)
    assert norm is not None
    norm = norm * np.float32(mla.factor)

    def matrices(role: str) -> Array:
        return reader.matrix((role,), index)[0].dequantize().reshape(spec.heads, -1, DISK_ROLES[role].shape(spec)[1])

    @cache
    def parts() -> tuple[Array, Array]:
        if not reader.opened.claim.get("kv_b", index):
            return matrices("k_b"), matrices("v_b")
        both = matrices("kv_b")
        return both[:, : mla.nope].swapaxes(1, 2), both[:, mla.nope :]

    into = _per_head(reader, f"{index}.kv_b.into", (spec.heads, mla.rank, mla.nope), lambda: parts()[0])
    out = _per_head(reader, f"{index}.kv_b.out", (spec.heads, mla.value, mla.rank), lambda: parts()[1])
    reader.count("kv_b", into.kind, into.nbytes + out.nbytes)
    heads, changes = LatentHeads(spec.heads, norm, mla.eps), _key_norm(reader, index, turn)
    return down, LatentAttention(
        _query(reader, index, rows), heads, into, out, mla.rank, mla.value, key_changes=changes
    )


def _key_norm(reader: WeightReader, index: int, turn: NDArray[np.int64]) -> tuple[RowChange, ...]:
    """The norm of the part of a key that turns, where the checkpoint has one; `turn`: where its numbers lie there."""
    weight, mla = reader.vector("turned_key_norm", index), reader.local.at(index).mla
    return () if weight is None else (NormSpans(weight[turn], mla.rank, mla.rope, False, mla.eps),)


def halves(dim: int) -> NDArray[np.int64]:
    """Order in which pairs (2i, 2i + 1) of `dim` numbers become pairs (i, i + dim / 2)."""
    return np.concatenate((np.arange(0, dim, 2, dtype=np.int64), np.arange(1, dim, 2, dtype=np.int64)))


def _query(reader: WeightReader, index: int, rows: NDArray[np.int64]) -> Project:
    weight = reader.vector("q_a_norm", index)
    if weight is None:
        return reader.linear(("q",), index, rows)
    mla = reader.local.at(index).mla
    weight = weight * np.float32(mla.q_factor)
    if reader.opened.claim.get(reader.opened.claim.holder("latent_q", index), index):
        return WideQuery(
            reader.linear(("q_a",), index), RmsNorm(weight, mla.eps), reader.linear(("latent_q",), index, rows)
        )
    return LowRankQuery(reader.linear(("q_a",), index), RmsNorm(weight, mla.eps), reader.linear(("q_b",), index, rows))


def _per_head(reader: WeightReader, name: str, shape: tuple[int, int, int], make: Callable[[], Array]) -> Packed:
    """Matrices [heads, n, k], their `shape`, in the compute dtype below each other, as `head_linear` wants them:
    `make`'s, or kept."""
    heads, n, k = shape
    rows = padded_rows(n)
    kept = reader.cache.get(name, heads * len(rows), k) if reader.cache is not None else None
    if kept is not None:
        return kept.packed
    dtype = reader.ops.head_dtype(reader.form.dtype)
    numbers = cast_to(make()[:, rows].reshape(-1, k), dtype)
    packed = reader.ops.pack(Weight(float_kind(dtype), numbers))
    if reader.cache is not None:
        reader.cache.put(name, packed, None)
    return packed
