"""Multi-head latent attention (DeepSeek-AI 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.model.batch import Batch
from quire.model.net.decoder import Layer, Wanted, chosen
from quire.model.net.gated_attention import OutputGate
from quire.model.net.parts import Linear, RmsNorm, RowChange
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.latents import LatentHeads, LatentReads
from quire.ops.layout import LayerCache
from quire.ops.weights import Packed

Project = Callable[[Ops, Array], Array]


@dataclass(frozen=True)
class LatentAttention:
    """Attention of a layer whose `qkv` makes a token's latent and the key part that turns.

    `query`: rows [T, hidden] -> [T, heads * (nope + rope)], by way of a smaller space or straight. `into` [rank, nope]
    per head carries the part that does not turn into the latents' space; `out` [value, rank] carries results back. All
    rows, of prompts too, take this absorbed way: another order of products would give other bits in other batches.
    `key_changes` are of what `qkv` makes. `pool`: tokens that are chosen together, where rows read
    chosen ones.
    """

    query: Project
    heads: LatentHeads
    into: Packed
    out: Packed
    rank: int
    value: int
    key_changes: tuple[RowChange, ...] = ()
    pool: int = 1

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; latents and rotated keys of the rows are written to `cache`."""
        made = self.query(ops, h), layer.qkv(ops, h)
        return layer.o(ops, self.values(ops, layer, made, batch, cache, wanted))

    def values(
        self,
        ops: Ops,
        layer: Layer,
        made: tuple[Array, Array],
        batch: Batch,
        cache: LayerCache,
        wanted: Wanted,
        tokens: Array | None = None,
    ) -> Array:
        """`made`: queries [T, heads * (nope + rope)], and latents with keys [T, rank + rope]; -> what heads found for
        the wanted rows, [R, heads * value]. `tokens` [T, most] int32: those that each row reads, None: all."""
        q, kv = made
        for change in layer.qkv_changes:
            q = change(ops, q, batch)
        for change in self.key_changes:
            kv = change(ops, kv, batch)
        q = ops.latent_rope_and_cache(q, kv, batch.positions, layer.rope, batch.slots, cache[0], self.heads)
        latent = ops.head_linear(q, self.into, self.heads.count, self.rank)
        reads = LatentReads(layer.attend.scale, tokens, layer.attend.sinks, layer.attend.window, self.pool)
        attended = ops.latent_attention(latent, q, cache[0], batch.cu_q, batch.context, batch.block_tables, reads)
        attended = chosen(ops, attended, wanted)
        found: Array = ops.head_linear(attended, self.out, self.heads.count, self.value)
        return found


@dataclass(frozen=True)
class GatedLatents:
    """Latent attention, with a gate on what heads found before the last matrix (Ling 3.0)."""

    attention: LatentAttention
    gate: OutputGate

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]; latents and rotated keys of the rows are written to `cache`."""
        gate = chosen(ops, self.gate.matrix(ops, h), wanted)
        made = self.attention.query(ops, h), layer.qkv(ops, h)
        return layer.o(ops, self.gate(ops, self.attention.values(ops, layer, made, batch, cache, wanted), gate))


@dataclass(frozen=True)
class LowRankQuery:
    """up(norm(down(h))): queries by way of a latent of their own."""

    down: Linear
    norm: RmsNorm
    up: Linear

    def __call__(self, ops: Ops, h: Array) -> Array:
        """h [T, hidden] -> [T, heads * width]."""
        return self.up(ops, self.latent(ops, h))

    def latent(self, ops: Ops, h: Array) -> Array:
        """h [T, hidden] -> what `up` reads, [T, q_rank]."""
        return self.norm(ops, self.down(ops, h))


@dataclass(frozen=True)
class WideQuery(LowRankQuery):
    """Work like `LowRankQuery`, where `up` reads the latent also as it was before the norm, behind the normed one."""

    def latent(self, ops: Ops, h: Array) -> Array:
        """h [T, hidden] -> [T, 2 * q_rank]."""
        raw = self.down(ops, h)
        joined: Array = ops.join_columns((self.norm(ops, raw), raw))
        return joined
