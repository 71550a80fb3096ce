"""A backend whose ops are out of place and keep autograd's graph: the decoder as a function that has gradients.

In f32, over sequences of any number at once, without a paged cache and without an arena. It is for training and
calibration, not for `--device`: nothing here is fast at one token.

Its ops are the functions that the definitions were written down as (`Op.pure`), which write to no argument: keys and
values go to an `AutogradCache`. What is here besides: products, which observers see and which round no activations, and
attention. Its definition takes one sequence after the other; here those of one shape are one call of torch's, which
keeps no scores for the way back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.ops.arrays import Array
from quire.ops.attention_spec import AttentionSpec
from quire.ops.autograd_cache import KeySpan, attend, held, spans
from quire.ops.choice import READ_WEIGHTS
from quire.ops.experts import Grouped
from quire.ops.latents import LatentHeads, LatentReads, rank_of
from quire.ops.layout import KVCache
from quire.ops.op import REGISTRY
from quire.ops.reference.backend import ReferenceOps
from quire.ops.reference.experts import grouped_linear
from quire.ops.reference.latents import head_linear, turned_latents, unchosen, with_sinks
from quire.ops.reference.layers import linear
from quire.ops.weights import Packed, StoredMatrix, Weight


@dataclass(frozen=True)
class MatrixSite:
    """Which matrices of a model a packed one holds, from top to bottom."""

    roles: tuple[str, ...]
    layer: int | None


Observer = Callable[[str, int | None, int | None, Tensor], None]
"""(role, layer, expert, the input rows x [T, k] f32 of the matrix, cut from the graph)."""


def unrounded(part: Any) -> Any:
    """A packed matrix, or experts', whose definition of a product rounds no activations; anything else as it is."""
    if isinstance(part, Grouped):
        return replace(part, packed=unrounded(part.packed))
    if not isinstance(part, Packed) or part.plain is None:
        return part
    kind = "bf16_f32" if part.kind == "bf16" else part.kind
    return replace(part, kind=kind, plain=replace(part.plain, kind=kind, activation_bits=0))


def with_unrounded(definition: Callable[..., Any]) -> Callable[..., Any]:
    """`definition` over `unrounded` arguments."""

    @functools.wraps(definition)
    def call(*args: Any, **named: Any) -> Any:
        return definition(*map(unrounded, args), **{name: unrounded(part) for name, part in named.items()})

    return call


def attention(
    qkv: Tensor, cache: KVCache, cu_q: Tensor, context: Tensor, block_tables: Tensor, spec: AttentionSpec,
    tree: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention as the definition does, over an `AutogradCache`. Drafts that branch are of serving:
    `ValueError`."""
    if tree is not None and bool(tree.any()):
        raise ValueError("a draft that branches has no gradients here")
    d, hk = cache.layout.head_dim, cache.layout.kv_heads
    q = qkv.view(len(qkv), qkv.shape[1] // d, d)[:, : -2 * hk]
    batch = spans(cu_q, context, block_tables, cache.layout.block_size)
    return attend(q, held(cache).rows(), batch, spec).flatten(1)


def latent_attention(
    latent: Tensor, q: Tensor, cache: KVCache, cu_q: Tensor, context: Tensor, block_tables: Tensor, reads: LatentReads
) -> Tensor:
    """Compute latent attention as the definition does, over an `AutogradCache`: attention of one head of keys, whose
    values are a part of them."""
    rank, r = rank_of(cache), cache.layout.head_dim
    heads = latent.shape[1] // rank
    turned = q.view(len(q), heads, q.shape[1] // heads)[..., q.shape[1] // heads - r :]
    place, keys, values = held(cache).rows()
    rows = place, torch.cat((values, keys), -1)[:, None], values[:, None]
    batch = spans(cu_q, context, block_tables, cache.layout.block_size)
    queries = torch.cat((latent.view(len(q), heads, rank), turned), -1)
    if reads.chosen is not None:
        return attend_chosen(queries, rows, batch, reads, reads.chosen).flatten(1)
    return attend(queries, rows, batch, AttentionSpec(reads.scale, reads.window, sinks=reads.sinks)).flatten(1)


def attend_chosen(
    q: Tensor, rows: tuple[Tensor, Tensor, Tensor], batch: list[KeySpan], reads: LatentReads, chosen: Tensor
) -> Tensor:
    """`attend` over the tokens alone that `chosen` [T, most] has for each row, of one head of keys."""
    place, keys, values = rows
    parts = [q.new_zeros((0, q.shape[1], values.shape[-1]))]
    for span in batch:
        at, n = place[span.keys], len(span.keys)
        seen = ~unchosen(chosen[span.begin : span.end], n)
        scores = torch.einsum("thd,sd->hts", q[span.begin : span.end], keys[at, 0]) * reads.scale
        scores = with_sinks(scores.masked_fill(~seen, -torch.inf), reads.sinks)
        parts.append(torch.einsum("hts,sr->thr", scores.softmax(-1)[..., :n], values[at, 0]))
    return torch.cat(parts)


class Differentiable(ReferenceOps):
    """The backend. `site` is what the next matrices that are packed are; `observers` see the input of every product.

    Products take matrices as f32, quantized ones dequantized and without rounding of activations: gradients flow to
    the numbers of plain matrices, others are frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "differentiable"
        self.site: MatrixSite | None = None
        self.observers: list[Observer] = []
        self._latents: Tensor | None = None
        table: dict[str, Callable[..., Any]] = {name: op.pure for name, op in REGISTRY.items()}
        table |= {name: with_unrounded(table[name]) for name in READ_WEIGHTS}
        table |= {"attention": attention, "latent_attention": latent_attention}
        seen = ("linear", "grouped_linear", "head_linear", "latent_rope_and_cache")
        table |= {name: getattr(self, f"_{name}") for name in seen}
        self.chosen |= dict.fromkeys(table, self.name)
        for name, fn in table.items():
            setattr(self, name, fn)

    def pack(self, weight: Weight | StoredMatrix, narrow: bool = False) -> Packed:
        """`weight` as it is, with its site."""
        return replace(super().pack(weight), handle=self.site)

    def pack_exact(self, numbers: Array) -> Packed:
        """`numbers` [n, k] f32 as they are: a copy in fewer bits would round gradients."""
        return self.pack(Weight("f32", numbers))

    def fuses_mlp(self, gate_up: Packed, down: Packed) -> bool:
        """No: every product is an op of its own, which observers see."""
        return False

    def fuses_experts(self, down: Grouped) -> bool:
        """No, as `fuses_mlp`."""
        return False

    def _seen(self, w: Packed, x: Tensor, expert: int | None = None) -> None:
        if isinstance(w.handle, MatrixSite):
            for observer in self.observers:
                for role in w.handle.roles:
                    observer(role, w.handle.layer, expert, x.detach())

    def _linear(self, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
        self._seen(w, x)
        return linear(x, unrounded(w), bias)

    def _grouped_linear(self, x: Tensor, w: Grouped, tokens: Tensor | None, offsets: Tensor) -> Tensor:
        rows = x if tokens is None else x[tokens.flatten().long()]
        ends = offsets[0].tolist()
        for e in range(w.experts):
            if ends[e] < ends[e + 1]:
                self._seen(w.packed, rows[ends[e] : ends[e + 1]], e)
        return grouped_linear(rows, unrounded(w), None, offsets)

    def _head_linear(self, x: Tensor, w: Packed, heads: int, n: int) -> Tensor:
        if self._latents is not None:  # the first of a layer's two follows the op that made them
            self._seen(w, self._latents)
            self._latents = None
        return head_linear(x, w, heads, n)

    def _latent_rope_and_cache(
        self, q: Tensor, kv: Tensor, positions: Tensor, table: Tensor, slots: Tensor, cache: KVCache, heads: LatentHeads
    ) -> Tensor:
        turned, normed = turned_latents(q, kv, positions, table, slots, held(cache), heads)
        if self.observers:
            self._latents = normed[:, : rank_of(cache)]
        return turned


def differentiable() -> Differentiable:
    """A backend for training and calibration, on the CPU in f32."""
    return Differentiable()
