"""A backend whose ops are out of place and keep autograd's graph: the decoder as a function that has gradients.

In f32, over sequences of any number at once, without a paged cache and without an arena. It is for training and
calibration, not for `--device`: nothing here is fast at one token. Ops that the definitions compute out of place
anyhow are the definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.ops.arrays import Array
from quire.ops.attention_spec import AttentionSpec
from quire.ops.experts import Between, Choices, Grouped
from quire.ops.held import Held, attend, spans
from quire.ops.latents import EPS, Heads, rank_of
from quire.ops.layout import KVCache
from quire.ops.reference.backend import ReferenceOps
from quire.ops.reference.experts import clamped_swiglu, combine, one_expert
from quire.ops.reference.latents import head_linear as head_product
from quire.ops.reference.layers import activation, gated_activation, rmsnorm
from quire.ops.reference.rowwise import layernorm
from quire.ops.weights import Packed, Stored, Weight


@dataclass(frozen=True)
class Site:
    """Which matrices of a model a packed one holds, from top to bottom."""

    roles: tuple[str, ...]
    layer: int | None


Observer = Callable[[str, int | None, int | None, Tensor], None]
"""(role, layer, expert, the input rows x [T, k] f32 of the matrix, cut from the graph)."""


def held(cache: KVCache) -> Held:
    """`cache`, which must be one that keeps the graph."""
    if not isinstance(cache, Held):
        raise TypeError("the differentiable backend writes to Held caches only")
    return cache


def add_rmsnorm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the definition; x stays as it is."""
    x = x + delta
    return x, rmsnorm(x, weight, eps)


def add_layernorm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """As the definition; x stays as it is."""
    x = x + delta
    return x, layernorm(x, weight, bias, eps)


def norm_spans(x: Tensor, weight: Tensor, start: int, span: int, centered: bool, eps: float) -> Tensor:
    """As the definition; x stays as it is."""
    end = start + len(weight)
    runs = x[:, start:end].reshape(len(x), len(weight) // span, span)
    ones = torch.ones(span)
    normed = (layernorm(runs, ones, None, eps) if centered else rmsnorm(runs, ones, eps)) * weight.view(-1, span)
    return torch.cat((x[:, :start], normed.flatten(1), x[:, end:]), 1)


def place_columns(out: Tensor, x: Tensor, at: int) -> Tensor:
    """As the definition; `out` stays as it is."""
    rows = torch.cat((out[: len(x), :at], x, out[: len(x), at + x.shape[1] :]), 1)
    return torch.cat((rows, out[len(x) :]))


def add(x: Tensor, delta: Tensor) -> Tensor:
    """x + delta."""
    return x + delta


def add_positions(x: Tensor, positions: Tensor, table: Tensor, offset: int) -> Tensor:
    """x + table[positions + offset]."""
    return x + table[positions.long() + offset].float()


def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor."""
    return x * factor


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


def clip(x: Tensor, limit: float) -> Tensor:
    """x limited to [-limit, limit]."""
    return x.clamp(-limit, limit)


def scale_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate)."""
    return x * gate.sigmoid()


def lora(x: Tensor, y: Tensor, a: Tensor, b: Tensor, rows: Tensor, start: int) -> Tensor:
    """As the definition; y stays as it is."""
    slots = rows[: len(x)].long()
    changes = [(slots == s)[:, None] * (x @ a[s].t() @ b[s]) for s in range(len(a)) if bool((slots == s).any())]
    return _changed(y, changes, start)


def lora_expand(h: Tensor, y: Tensor, b: Tensor, rows: Tensor, start: int) -> Tensor:
    """As the definition; y stays as it is."""
    slots = rows[: len(y)].long()
    changes = [(slots == s)[:, None] * (h @ b[s]) for s in range(len(b)) if bool((slots == s).any())]
    return _changed(y, changes, start)


def _changed(y: Tensor, changes: list[Tensor], start: int) -> Tensor:
    if not changes:
        return y
    change = torch.stack(changes).sum(0)
    return y + torch.nn.functional.pad(change, (start, y.shape[1] - start - change.shape[1]))


def lora_scale(y: Tensor, excess: Tensor, rows: Tensor) -> Tensor:
    """As the definition; y stays as it is."""
    slots = rows[: len(y)].long()
    return torch.where((slots >= 0)[:, None], y * (1 + excess[slots.clamp(min=0), 0]), y)


def rotated(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """x [T, heads, d] with the first r numbers of each head turned; `table` as of `rope_and_cache`."""
    half = table.shape[2]
    cos, sin = table[positions.long()].unsqueeze(1).unbind(2)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def rope_and_cache(
    qkv: Tensor, positions: Tensor, table: Tensor, slots: Tensor, cache: KVCache,
    norms: tuple[Tensor, Tensor] | None, eps: float,
) -> Tensor:  # fmt: skip
    """As the definition, into a `Held` cache; qkv stays as it is."""
    d, hk = cache.layout.head_dim, cache.layout.kv_heads
    heads = qkv.view(len(qkv), qkv.shape[1] // d, d)
    q, k, v = heads[:, : -2 * hk], heads[:, -2 * hk : -hk], heads[:, -hk:]
    if norms is not None:
        q, k = rmsnorm(q, norms[0], eps), rmsnorm(k, norms[1], eps)
    q, k = rotated(q, positions, table), rotated(k, positions, table)
    held(cache).put(slots, k, v)
    return torch.cat((q, k, v), 1).flatten(1)


def attention(
    qkv: Tensor, cache: KVCache, cu_q: Tensor, context: Tensor, block_tables: Tensor, spec: AttentionSpec,
    tree: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As the definition, over a `Held` cache. Drafts that branch are of serving: `ValueError`."""
    if tree is not None and bool(tree.any()):
        raise ValueError("a draft that branches has no gradients here")
    d, hk = cache.layout.head_dim, cache.layout.kv_heads
    q = qkv.view(len(qkv), qkv.shape[1] // d, d)[:, : -2 * hk]
    batch = spans(cu_q, context, block_tables, cache.layout.block_size)
    return attend(q, held(cache).rows(), batch, spec).flatten(1)


def latent_attention(
    latent: Tensor, q: Tensor, cache: KVCache, cu_q: Tensor, context: Tensor, block_tables: Tensor, scale: float
) -> Tensor:
    """As the definition, over a `Held` cache: attention of one head of keys, whose values are a part of them."""
    rank, r = rank_of(cache), cache.layout.head_dim
    heads = latent.shape[1] // rank
    turned = q.view(len(q), heads, q.shape[1] // heads)[..., -r:]
    place, keys, values = held(cache).rows()
    rows = place, torch.cat((values, keys), -1)[:, None], values[:, None]
    batch = spans(cu_q, context, block_tables, cache.layout.block_size)
    queries = torch.cat((latent.view(len(q), heads, rank), turned), -1)
    return attend(queries, rows, batch, AttentionSpec(scale)).flatten(1)


OUT_OF_PLACE: dict[str, Callable[..., object]] = {
    fn.__name__: fn
    for fn in (
        add, add_layernorm, add_positions, add_rmsnorm, attention, clip, latent_attention, lora, lora_expand,
        lora_scale, norm_spans, place_columns, rope_and_cache, scale, scale_by_sigmoid, softcap,
    )
}  # fmt: skip


class Differentiable(ReferenceOps):
    """The backend. `site` is what the next matrices that are packed are; `observers` see the input of every product.

    Products take matrices as f32, quantized ones dequantized and without rounding of activations: gradients flow to
    the numbers of plain matrices, others are frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "differentiable"
        self.site: Site | None = None
        self.observers: list[Observer] = []
        self._latents: Tensor | None = None
        mlps = ("gated_mlp", "plain_mlp", "expert_mlp")
        own = (*mlps, "linear", "grouped_linear", "head_linear", "latent_rope_and_cache")
        table = OUT_OF_PLACE | {op: getattr(self, f"_{op}") for op in own}
        self.chosen |= dict.fromkeys(table, self.name)
        for op, fn in table.items():
            setattr(self, op, fn)

    def pack(self, weight: Weight | Stored, narrow: bool = False) -> Packed:
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
        if isinstance(w.handle, Site):
            for observer in self.observers:
                for role in w.handle.roles:
                    observer(role, w.handle.layer, expert, x.detach())

    def _linear(self, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
        assert w.plain is not None
        self._seen(w, x)
        out: Tensor = x @ w.plain.dequantize().t()
        return out if bias is None else out + bias

    def _gated_mlp(
        self, x: Tensor, gate_up: Packed, gate_up_bias: Tensor | None, down: Packed, down_bias: Tensor | None, kind: str
    ) -> Tensor:
        return self._linear(gated_activation(self._linear(x, gate_up, gate_up_bias), kind), down, down_bias)

    def _plain_mlp(
        self, x: Tensor, up: Packed, up_bias: Tensor | None, down: Packed, down_bias: Tensor | None, kind: str
    ) -> Tensor:
        return self._linear(activation(self._linear(x, up, up_bias), kind), down, down_bias)

    def _grouped_linear(self, x: Tensor, w: Grouped, tokens: Tensor | None, offsets: Tensor) -> Tensor:
        rows = x if tokens is None else x[tokens.flatten().long()]
        ends, parts = offsets[0].tolist(), [rows.new_zeros((0, w.n))]
        for e in range(w.experts):
            if ends[e] < ends[e + 1]:
                own = rows[ends[e] : ends[e + 1]]
                self._seen(w.packed, own, e)
                out = own @ one_expert(w, e).plain.dequantize().t()  # type: ignore[union-attr]
                parts.append(out if w.bias is None else out + w.bias[e])
        return torch.cat((*parts, rows.new_zeros((len(rows) - ends[-1], w.n))))

    def _expert_mlp(self, x: Tensor, gate_up: Grouped, down: Grouped, between: Between, choices: Choices) -> Tensor:
        tokens, places, offsets, weights = choices
        wide = self._grouped_linear(x, gate_up, tokens, offsets)
        inner = clamped_swiglu(wide, *between.clamp) if between.clamp else gated_activation(wide, between.kind)
        return combine(self._grouped_linear(inner, down, None, offsets), places, weights)

    def _head_linear(self, x: Tensor, w: Packed, heads: int, n: int) -> Tensor:
        if self._latents is not None:  # the first of a layer's two follows the op that made them
            self._seen(w, self._latents)
            self._latents = None
        return head_product(x, w, heads, n)

    def _latent_rope_and_cache(
        self, q: Tensor, kv: Tensor, positions: Tensor, table: Tensor, slots: Tensor, cache: KVCache, heads: Heads
    ) -> Tensor:
        rank, r = rank_of(cache), 2 * table.shape[2]
        queries = q.view(len(q), heads.count, q.shape[1] // heads.count)
        turned = torch.cat((queries[..., :-r], rotated(queries[..., -r:], positions, table)), -1)
        latents = rmsnorm(kv[:, :rank], heads.norm, EPS)
        held(cache).put(slots, rotated(kv[:, None, rank:], positions, table)[:, 0], latents)
        if self.observers:
            self._latents = latents
        return turned.flatten(1)


def differentiable() -> Differentiable:
    """A backend for training and calibration, on the CPU in f32."""
    return Differentiable()
