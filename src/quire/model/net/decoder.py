"""The decoder: a residual stream that every block reads, and adds to. No family, no format and no parallel word.
See docs/design/models.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from quire.model.batch import Batch
from quire.model.net.parts import Embed, Linear, Mlp, Norm, Product, RowChange
from quire.ops.arrays import Array
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache


class LayerSource(Protocol):
    """Whoever walks over layers says before and after each that it does; in any order, one walk at a time.

    Both are ops of the step, or queue work beside its ops: a recorded step waits where the recorded one did.
    """

    @property
    def recordable(self) -> bool:
        """Whether steps may be recorded or captured with it."""
        ...

    def before(self, layer: int) -> None:
        """The weights of `layer` are there when the ops that follow run."""
        ...

    def after(self, layer: int) -> None:
        """No op that follows reads the weights of `layer`, until `before` is called for it again."""
        ...


class Resident:
    """All weights are in memory."""

    recordable = True

    def before(self, layer: int) -> None:
        """Nothing to wait for."""

    def after(self, layer: int) -> None:
        """Nothing to give back."""


@dataclass(frozen=True)
class Layer:
    """One layer's weights and facts.

    `qkv_changes` are made to the output of `qkv`; `qk_norms`: per-head norm weights of queries and keys, or None, with
    `eps`. The post norms are of what attention and MLP add, for blocks that norm it. `cross`: in decoders with an
    encoder. `alone`: its mixer is all that it has. `ending`: what else happens to the stream behind the MLP. `block`:
    the layer's own, which joins all of it, where it has one.
    """

    attn_norm: Norm
    qkv: Product
    qkv_changes: tuple[RowChange, ...]
    qk_norms: tuple[Array, Array] | None
    eps: float
    rope: Array
    attend: AttentionSpec
    o: Product
    attn_post_norm: Norm
    mlp_norm: Norm
    mlp: Mlp
    mlp_post_norm: Norm
    attention: Attend
    cross: CrossAttention | None = None
    alone: bool = False
    ending: Ending | None = None
    block: Block | None = None


@dataclass(frozen=True)
class CrossAttention:
    """Attention over the encoder's output, whose keys and values are in the cache. `still`: an empty rope table."""

    norm: Norm
    q: Linear
    still: Array
    attend: AttentionSpec
    o: Product

    def __call__(self, ops: Ops, h: Array, view: Batch, cache: LayerCache) -> Array:
        """h [T, hidden] -> [T, hidden]; in `view` each row is a sequence that sees all of its encoder's tokens."""
        (kv,) = cache
        layout, q = kv.layout, self.q(ops, h)
        qkv = ops.rope_queries(q, view.positions, self.still, 2 * layout.kv_heads, layout.head_dim, None, 1.0)
        return self.o(ops, ops.attention(qkv, kv, view.cu_q, view.context, view.block_tables, self.attend))


Wanted = Array | None
"""Rows [R] int32 that the blocks to come need of a layer's T, or None: all."""
Attend = Callable[[Ops, "Layer", Array, Batch, LayerCache, Wanted], Array]
Ending = Callable[[Ops, Array, Array, Batch, Wanted], tuple[Array, Array]]
"""The stream x [R, hidden] and what is added to it behind the MLP -> both as the next layer finds them; of a step's T
rows, R are wanted."""
Inputs = Callable[[Ops, Array, Batch], Array]
"""Embedded tokens x [T, hidden] of a batch -> what layers are given of them, [T, layers * width] f32."""
ToLogits = Callable[[Ops, Array], Array]
"""What the final norm leaves [R, hidden] -> logits [R, V]."""
Block = Callable[[Ops, Layer, Array, Array, Batch, LayerCache, Wanted], tuple[Array, Array]]
"""The stream x [R, hidden] and what the caller adds to it."""


def chosen(ops: Ops, x: Array, wanted: Wanted) -> Array:
    """x [T, d] -> [R, d]."""
    return x if wanted is None else ops.pick_rows(x, wanted)


def own_attention(ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
    """h [T, hidden] -> [R, hidden]; keys and values of all rows are written to `cache`."""
    return attended_rows(ops, layer, own_rows(ops, layer, h, batch, cache), batch, cache, wanted)


def reading_attention(ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
    """Work like `own_attention` with queries only: `cache` is that of an earlier layer, which wrote the rows' keys."""
    return attended_rows(ops, layer, reading_rows(ops, layer, h, batch, cache), batch, cache, wanted)


def own_rows(ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache) -> Array:
    """h [T, hidden] -> what attention reads of the rows; their keys and values are written to `cache`."""
    qkv = layer.qkv(ops, h)
    for change in layer.qkv_changes:
        qkv = change(ops, qkv, batch)
    rotated: Array = ops.rope_and_cache(
        qkv, batch.positions, layer.rope, batch.slots, cache[0], layer.qk_norms, layer.eps
    )
    return rotated


def reading_rows(ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache) -> Array:
    """Work like `own_rows` with queries only."""
    layout, q = cache[0].layout, layer.qkv(ops, h)
    for change in layer.qkv_changes:
        q = change(ops, q, batch)
    norm = layer.qk_norms[0] if layer.qk_norms else None
    rotated: Array = ops.rope_queries(
        q, batch.positions, layer.rope, 2 * layout.kv_heads, layout.head_dim, norm, layer.eps
    )
    return rotated


def attended_rows(ops: Ops, layer: Layer, qkv: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
    """What attention adds to the stream, [R, hidden]."""
    return layer.o(ops, chosen(ops, attended_heads(ops, layer, qkv, batch, cache), wanted))


def attended_heads(ops: Ops, layer: Layer, qkv: Array, batch: Batch, cache: LayerCache) -> Array:
    """What attention gives for all rows, [T, heads * head_dim]."""
    found: Array = ops.attention(qkv, cache[0], batch.cu_q, batch.context, batch.block_tables, layer.attend, batch.tree)
    return found


def sequential_block(
    ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
) -> tuple[Array, Array]:
    """x += attention(h); then mlp(norm(x)). x, h [T, hidden], h = norm(x)."""
    attended = layer.attention(ops, layer, h, batch, cache, wanted)
    x, h = layer.mlp_norm.add(ops, chosen(ops, x, wanted), attended)
    return x, layer.mlp(ops, h)


def post_norm_block(
    ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
) -> tuple[Array, Array]:
    """Work like `sequential_block`, with a norm of what attention and what the MLP add (OLMo 2, Gemma 2)."""
    attended = layer.attn_post_norm(ops, layer.attention(ops, layer, h, batch, cache, wanted))
    x, h = layer.mlp_norm.add(ops, chosen(ops, x, wanted), attended)
    return x, layer.mlp_post_norm(ops, layer.mlp(ops, h))


def ended_block(
    ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
) -> tuple[Array, Array]:
    """Work like `post_norm_block`, with the layer's `ending` behind it (Gemma 4)."""
    assert layer.ending is not None, "layers of this block are loaded with endings"
    x, delta = post_norm_block(ops, layer, x, h, batch, cache, wanted)
    return layer.ending(ops, x, delta, batch, wanted)


def own_block(
    ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
) -> tuple[Array, Array]:
    """The layer's own block (Gemma 3n)."""
    assert layer.block is not None, "layers of this join are loaded with blocks"
    return layer.block(ops, layer, x, h, batch, cache, wanted)


def parallel_block(
    ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
) -> tuple[Array, Array]:
    """Attention and MLP read the same norm of x and are added together (Wang and Komatsuzaki 2021)."""
    attended = layer.attention(ops, layer, h, batch, cache, wanted)
    return chosen(ops, x, wanted), ops.add(attended, layer.mlp(ops, chosen(ops, h, wanted)))


def parallel_two_norms_block(
    ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
) -> tuple[Array, Array]:
    """Work like `parallel_block`, with a norm of its own for the MLP (GPT-NeoX)."""
    attended = layer.attention(ops, layer, h, batch, cache, wanted)
    x = chosen(ops, x, wanted)
    return x, ops.add(attended, layer.mlp(ops, layer.mlp_norm(ops, x)))


def crossed_block(
    ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
) -> tuple[Array, Array]:
    """Work like `sequential_block`, with attention over an encoder's output between attention and MLP (T5)."""
    assert layer.cross is not None and batch.cross is not None, "decoders with an encoder are loaded and fed with them"
    x, h = layer.cross.norm.add(ops, x, layer.attention(ops, layer, h, batch, cache, None))
    x, h = layer.mlp_norm.add(ops, x, layer.cross(ops, h, batch.cross, cache))
    x, h = chosen(ops, x, wanted), chosen(ops, h, wanted)
    return x, layer.mlp(ops, h)


def single_block(
    ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
) -> tuple[Array, Array]:
    """A layer is a mixer, or an MLP, alone (Mamba, Nemotron-H)."""
    return chosen(ops, x, wanted), layer.attention(ops, layer, h, batch, cache, wanted)


def twin_block(
    ops: Ops, layer: Layer, x: Array, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted
) -> tuple[Array, Array]:
    """Two layers share a norm: the first is a mixer alone, the second a mixer and an MLP (Falcon-H1)."""
    return (single_block if layer.alone else sequential_block)(ops, layer, x, h, batch, cache, wanted)


class MlpAlone:
    """The MLP of a layer that has nothing else, in the place of its attention."""

    def __call__(self, ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, wanted: Wanted) -> Array:
        """h [T, hidden] -> [R, hidden]."""
        return layer.mlp(ops, chosen(ops, h, wanted))


@dataclass(frozen=True)
class Decoder:
    """Tokens to logits: `enter`, `walk` over layers, `leave`. Whoever needs only a part of the way calls these.

    `embed` looks tokens up; `block` is chosen at build by how the family joins attention and MLP.

    `embed_changes` are made to the embedded tokens, `head_changes` to the logits. `narrows`: past the last layer's
    attention only rows that want logits are computed (1.5 % of a prompt with 28 layers, 3-5 % with 16), but not where
    rows have adapters, which name a row by its place. `source`: where the weights of layers come from. `inputs`: what
    layers are given of the embedded tokens, where they are.
    """

    ops: Ops
    embed: Embed
    embed_changes: tuple[RowChange, ...]
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: ToLogits
    head_changes: tuple[RowChange, ...] = ()
    block: Block = sequential_block
    narrows: bool = True
    source: LayerSource = field(default_factory=Resident)
    inputs: Inputs | None = None

    @property
    def recordable(self) -> bool:
        """Whether steps may be recorded."""
        return self.source.recordable

    def __call__(self, batch: Batch, caches: Sequence[LayerCache], views: Sequence[Batch] = ()) -> Array:
        """Logits f32 [R, V] of the rows `batch.logit_rows`; keys and values of all T rows are written to `caches`.

        One cache per layer, in the parts that its mixer says. `views`: the batch as each layer sees it, where layers
        have block tables of their own.
        """
        return self.score(self.head_rows(batch, caches, views), batch)

    def head_rows(self, batch: Batch, caches: Sequence[LayerCache], views: Sequence[Batch] = ()) -> Array:
        """What the head reads of the rows `batch.logit_rows`, [R, hidden]; arguments as of a call."""
        wanted = self.wanted(batch)
        x = self.enter(batch)
        x, delta = self.walk(x, None, self.fed(x, batch, views or (batch,) * len(caches)), caches, wanted=wanted)
        return self.last(x, delta, batch, wanted)

    def wanted(self, batch: Batch) -> Wanted:
        """The rows that `walk` goes on with past the last layer's attention, and `leave` gets; None: all."""
        if not self.narrows or len(batch.logit_rows) == len(batch.tokens):
            return None
        return batch.logit_rows if len(batch.logit_rows) else batch.cu_q[:1]  # row 0 where none is wanted: ops need one

    def enter(self, batch: Batch) -> Array:
        """The tokens of `batch` as the stream x [T, hidden]."""
        x = self.embed(self.ops, batch.tokens)
        for change in self.embed_changes:
            x = change(self.ops, x, batch)
        return x

    def fed(self, x: Array, batch: Batch, views: Sequence[Batch]) -> Sequence[Batch]:
        """The `views` of `batch` with what layers are given of its tokens, embedded x [T, hidden]."""
        if self.inputs is None:
            return views
        given = self.inputs(self.ops, x, batch)
        made = {id(view): replace(view, inputs=given) for view in views}
        return [made[id(view)] for view in views]

    def walk(
        self,
        x: Array,
        delta: Array | None,
        views: Sequence[Batch],
        caches: Sequence[LayerCache],
        layers: range | None = None,
        wanted: Wanted = None,
    ) -> tuple[Array, Array]:
        """The stream x [T, hidden] and what is to be added to it, past `layers` (None: all), which are not none.

        `delta`: what is to be added to x before them, None at the first layer. `views` and `caches` by layer. `wanted`:
        rows [R] that what comes after the last of `layers` needs; x and delta have these alone then.
        """
        ops, layers = self.ops, range(len(self.layers)) if layers is None else layers
        for i in layers:
            ops.next_layer()
            self.source.before(i)
            layer = self.layers[i]
            x, h = (x, layer.attn_norm(ops, x)) if delta is None else layer.attn_norm.add(ops, x, delta)
            x, delta = self.block(ops, layer, x, h, views[i], caches[i], wanted if i == layers[-1] else None)
            self.source.after(i)
        assert delta is not None, "a walk has layers"
        return x, delta

    def leave(self, x: Array, delta: Array, batch: Batch, wanted: Wanted) -> Array:
        """Logits f32 [R, V] of the rows `batch.logit_rows`. x, delta: past the last layer, of the rows `wanted`."""
        return self.score(self.last(x, delta, batch, wanted), batch)

    def score(self, h: Array, batch: Batch) -> Array:
        """Logits f32 [R, V] of what the head reads of the rows `batch.logit_rows`, h [R, hidden]."""
        logits: Array = self.head(self.ops, h)
        for change in self.head_changes:
            logits = change(self.ops, logits, batch)
        return logits

    def last(self, x: Array, delta: Array, batch: Batch, wanted: Wanted) -> Array:
        """What the head reads of the rows `batch.logit_rows`, [R, hidden]; arguments as of `leave`."""
        ops, count = self.ops, len(batch.logit_rows)
        rows = (x, delta, batch.logit_rows) if wanted is None else (x[:count], delta[:count], None)
        return self.final_norm(ops, ops.take_rows(*rows))

    def warm_up(self, batch: Batch, caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
        """Run `batch` through the first layer of each kind and the last one, which take the same memory between ops as
        all do."""
        x, delta, wanted, last = self.enter(batch), None, self.wanted(batch), len(self.layers) - 1
        kinds = [(type(layer.attention), type(layer.mlp)) for layer in self.layers]
        tried = sorted({*map(kinds.index, kinds), last})
        views = self.fed(x, batch, (batch,) * len(caches))
        for i in tried:
            seen = wanted if i == last else None
            x, delta = self.walk(x, delta, views, caches, range(i, i + 1), seen)
        assert delta is not None, "a decoder has layers"
        self.leave(x, delta, batch, wanted)
        return [caches[i] for i in tried]
