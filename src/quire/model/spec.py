"""Everything that differs between models, as one frozen value read from config.json. See docs/design/models.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.core.windows import widest
from quire.model.draft_sizes import NO_ASSISTANT, AssistantSizes
from quire.model.encoder_sizes import NO_ENCODER
from quire.model.encoder_sizes import EncoderStack as EncoderStack
from quire.model.expert_sizes import NO_EXPERTS as NO_EXPERTS
from quire.model.expert_sizes import MoE as MoE
from quire.model.families.delta_sizes import NO_DELTA, DeltaSizes
from quire.model.families.edges import NO_EDGES, Edges
from quire.model.families.query_scale import NO_SCALE, QueryScale
from quire.model.families.rope import Rope
from quire.model.latent_sizes import MLA as MLA
from quire.model.latent_sizes import NO_LATENTS
from quire.model.layer_sizes import NO_INPUTS, NO_NGRAMS, ONE_STREAM, LayerInputs, LayerSizes, Ngrams, Streams
from quire.model.tower_sizes import NO_CONNECTOR, NO_TOWER, Connector, Patches
from quire.ops.attention_spec import ALL
from quire.ops.entries import NO_ENTRIES, EntrySizes
from quire.ops.indexer import NO_BLOCK_INDEXER, NO_POOLED_INDEXER, BlockIndexer, PooledIndexer

ATTENTION, CONVOLUTION, DELTA, SCAN, CHANNEL_SCAN, MLP = "attention", "conv", "delta", "scan", "channel scan", "mlp"
SHARED, LIGHTNING = "shared block", "lightning"
"""Kinds of mixers in models of several."""


@dataclass(frozen=True)
class ConvSizes:
    """Sizes of short causal convolutions: of `width` channels, over `taps` rows, all 0 where no layer has one."""

    width: int = 0
    taps: int = 0


@dataclass(frozen=True)
class ScanSizes:
    """Sizes of selective scans (Mamba-2): `heads` of `head_dim` channels, a multiple of `groups` of B and C, each of
    `state` numbers, and rows that the convolution before it reads; all 0 where no layer has one.

    Time steps are limited to low .. high. `normed`: the result is normed with `eps`, each group by itself, behind the
    gate if `gate_first`. `factors` multiply the gate, x, B, C and the time steps that the first matrix makes.
    """

    heads: int = 0
    head_dim: int = 0
    groups: int = 0
    state: int = 0
    taps: int = 0
    low: float = 0.0
    high: float = float("inf")
    normed: bool = True
    gate_first: bool = True
    eps: float = 1e-5
    factors: tuple[float, ...] = (1.0,) * 5

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def pairs(self) -> int:
        """Numbers of B of all groups, as many as of C."""
        return self.groups * self.state

    @property
    def width(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.pairs


@dataclass(frozen=True)
class ChannelSizes:
    """Sizes of selective scans of single channels (Mamba): `inner` channels with `state` numbers each, `rank` of the
    space that time steps pass through, and rows that the convolution reads; all 0 where no layer has one. `eps`: of
    norms of B, C and time steps, 0 = there are none.
    """

    inner: int = 0
    state: int = 0
    rank: int = 0
    taps: int = 0
    eps: float = 0.0


@dataclass(frozen=True)
class SharedBlocks:
    """Blocks of attention and an MLP whose matrices several layers share in turn (Zamba2), `count` of them, 0 = there
    are none.

    What a layer adds to matrices of the MLP, and of queries, keys and values if `attention`, goes through a space of
    `rank` numbers.
    """

    count: int = 0
    rank: int = 0
    attention: bool = False


@dataclass(frozen=True)
class Sight:
    """What images in a prompt change in the decoder, beside rows that are given instead of looked up.

    `sections`: of a head's frequencies, how many follow each of the positions (time, row, column); empty where a row
    has one position. `interleaved`: the three take turns instead of following each other. `deep`: of the first layers,
    how many are given further features, which are added behind them. `mutual`: rows of one image see each other,
    `windows`: in layers with windows alone. `token`: the one whose per-layer embeddings rows of images have.
    """

    sections: tuple[int, ...] = ()
    interleaved: bool = False
    deep: int = 0
    mutual: bool = False
    windows: bool = False
    token: int = 0


@dataclass(frozen=True)
class Factors:
    """What multiplies parts of a layer (muP, Yang et al. 2022): what attention and what scans add to the stream, the
    rows that an MLP reads, what it makes of these, and norms of what attention and MLP add."""

    attention: float = 1.0
    scan: float = 1.0
    mlp_in: float = 1.0
    mlp_out: float = 1.0
    post_norm: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """The shape and the facts of a decoder, or of a vision tower or projector, which have some of the parts.

    Per-layer facts are tuples of length `layers`. Presence decides the rest (biases, per-head norms of queries and
    keys, an output head of its own): it is read from the checkpoint's tensors, not from here. `windows`: see
    `core.windows`, 0 = all. `max_position` is in tokens.

    `norm`: "rms", "rms1p" (weights are stored less 1), "layer", "layer1p", "plain" (layernorm without weights), "unit"
    (rmsnorm without). `post_norm_eps`: of norms of what attention and MLP add, 0 = that of the others. `norm_gate`:
    numbers of the space that gates of the norms before mixers and experts go through, 0 = there are none.
    `join`: how a block adds attention and MLP, a key of BLOCKS in load. `normed_values`: heads of values are normed, by
    no weights. 0 turns `softcap` (of attention scores), `output_softcap` (of logits) and `clip_qkv` off.
    `alibi`: slope per head, empty = none. `interleaved_rope`: on disk, pairs (2i, 2i + 1). `late_norms`: norms of heads
    of queries and keys are of turned heads. `embed_dim`: width of the embedding where projections join it to the
    stream, 0 = `hidden`. `unit_head`: rows of the head are divided by their length. `unit_norms`: per layer, whether
    queries and keys are normed without weights; empty = nowhere. `kv_source`: the layer whose keys and values each
    layer reads, empty = its own, OF_TARGET = one of another model.
    `mixers`: the kind of each layer's mixer, a word of those above; empty = all attend. MLP is a layer that is an MLP
    or experts alone, which the join "single" has. `decay_rates`: per layer, what slopes of heads are multiplied with in
    lightning attention. `bare`: (role, layer) of norms that other layers have and this one has not.
    `gate`: what the gates of attention are, where there are any: "sigmoid" or "softplus". `value_head`: numbers of a
    head's values, 0 = `head_dim`. `window_sinks`: only layers with windows have sinks.
    `bidirectional`: rows see tokens behind their own, as many as before it where there is a window, else all: an
    encoder (Devlin et al. 2019). `token_types`: rows of the table of what is added to the first, second ... text of a
    prompt, 0 = there is none.
    `sizes`: those of each layer, empty where all layers are alike; `at` gives the spec with those of one.
    `file_layers`: the layer of the files that each layer is a part of; empty = there it is a layer too. The join
    "twins": the first part has a scan, the second attention and an MLP; "passing": `late` experts of the first.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    norm_eps: float
    activation: str
    rope: tuple[Rope, ...]
    windows: tuple[int, ...]
    attention_scale: float
    tied_head: bool
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    norm: str = "rms"
    post_norm_eps: float = 0.0
    norm_gate: int = 0
    join: str = "sequential"
    normed_values: bool = False
    gate: str = "sigmoid"
    interleaved_rope: bool = False
    late_norms: bool = False
    softcap: float = 0.0
    output_softcap: float = 0.0
    clip_qkv: float = 0.0
    alibi: tuple[float, ...] = ()
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    position_offset: int = 0
    embed_dim: int = 0
    edges: Edges = NO_EDGES
    unit_head: bool = False
    unit_norms: tuple[bool, ...] = ()
    query_scale: QueryScale = NO_SCALE
    value_head: int = 0
    window_sinks: bool = False
    kv_source: tuple[int, ...] = ()
    mixers: tuple[str, ...] = ()
    decay_rates: tuple[float, ...] = ()
    sizes: tuple[LayerSizes, ...] = ()
    inputs: LayerInputs = NO_INPUTS
    streams: Streams = ONE_STREAM
    ngrams: Ngrams = NO_NGRAMS
    file_layers: tuple[int, ...] = ()
    bare: tuple[tuple[str, int], ...] = ()
    moe: MoE = NO_EXPERTS
    mla: MLA = NO_LATENTS
    blocks: BlockIndexer = NO_BLOCK_INDEXER
    pooled: PooledIndexer = NO_POOLED_INDEXER
    entries: EntrySizes = NO_ENTRIES
    conv: ConvSizes = ConvSizes()
    delta: DeltaSizes = NO_DELTA
    scan: ScanSizes = ScanSizes()
    channels: ChannelSizes = ChannelSizes()
    shared: SharedBlocks = SharedBlocks()
    factors: Factors = Factors()
    encoder: EncoderStack = NO_ENCODER
    bidirectional: bool = False
    token_types: int = 0
    sight: Sight = Sight()
    patches: Patches = NO_TOWER
    connector: Connector = NO_CONNECTOR
    assistant: AssistantSizes = NO_ASSISTANT

    @property
    def embed_width(self) -> int:
        """Numbers of an embedded token: the stream's width unless a projection stands between."""
        return self.embed_dim or self.hidden

    @property
    def encoder_decoder(self) -> bool:
        """Whether its layers read what an encoder made of the prompt."""
        return self.encoder.layers > 0

    def later_seen(self, layer: int) -> int:
        """Tokens behind its own that a row of `layer` sees."""
        if not self.bidirectional:
            return 0
        return self.windows[layer] - 1 if self.windows[layer] else ALL

    @property
    def typed_positions(self) -> int:
        """Rows of the table of learned positions, for each type of tokens."""
        return (self.max_position + self.position_offset) * max(1, self.token_types)

    @property
    def own_layers(self) -> tuple[int, ...]:
        """Layers with keys and values of their own."""
        return tuple(i for i in range(self.layers) if self.kv_layer(i) == i)

    @property
    def own_windows(self) -> dict[int, int]:
        """Windows of each layer with keys and values of its own: how many tokens back they are read, 0 = all."""
        readers: dict[int, list[int]] = {}
        for layer, window in enumerate(self.windows):
            readers.setdefault(self.kv_layer(layer), []).append(window)
        return {layer: widest(windows) for layer, windows in readers.items()}

    def at(self, layer: int | None) -> ModelSpec:
        """The spec with the sizes of one layer, None: of what is of no layer."""
        if layer is None or not self.sizes:
            return self
        own: dict[str, Any] = dict(self.sizes[layer].counts)
        return replace(self, sizes=(), **own)

    def has_values(self, layer: int) -> bool:
        """Whether the layer has a matrix of values."""
        return not self.sizes or not self.sizes[layer].keys_as_values

    def stored_less_one(self, role: str) -> bool:
        """Whether checkpoints hold the vector `role` less 1: weights of norms, in families that say so."""
        return self.norm.endswith("1p") and "norm" in role and not (self.edges.plain and role == "final_norm")

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values `layer` reads: itself unless it shares another's."""
        return self.kv_source[layer] if self.kv_source else layer

    @property
    def value_dim(self) -> int:
        """Numbers of a head's result."""
        return self.mla.value or self.value_head or self.head_dim

    @property
    def kept_value_dim(self) -> int:
        """Numbers of a value as the cache keeps it: of a latent, or of a head."""
        return self.mla.rank or self.head_dim

    def attends(self, layer: int) -> bool:
        """Whether the layer reads keys and values, or latents."""
        return not self.mixers or self.mixers[layer] in (ATTENTION, SHARED)

    def of_block(self, layer: int) -> bool:
        """Whether the layer is a use of a block that layers share."""
        return bool(self.mixers) and self.mixers[layer] == SHARED

    def block_home(self, layer: int) -> int:
        """The first layer that uses the block of `layer`, under whose name the block lies on disk."""
        uses = [i for i, kind in enumerate(self.mixers) if kind == SHARED]
        return uses[uses.index(layer) % self.shared.count]

    @property
    def weighted_layers(self) -> Sequence[int]:
        """Layers with weights of their own: others have those of one before them (`weight_layer`)."""
        return self.streams.turns.first if self.streams.turns.stack else range(self.layers)

    def weight_layer(self, layer: int) -> int:
        """The layer whose weights `layer` has: itself but in stacks that run several times."""
        return self.streams.turns.home(layer) if self.streams.turns.stack else layer

    def file_layer(self, layer: int) -> int:
        """The layer of the files that `layer` is, or is a part of."""
        return self.file_layers[layer] if self.file_layers else layer

    def part(self, layer: int) -> int:
        """Which part of its layer of the files the layer is."""
        return layer - self.file_layers.index(self.file_layer(layer)) if self.file_layers else 0

    def behind(self, file_layer: int) -> int:
        """The layer whose input is the output of a layer of the files."""
        return self.file_layers.index(file_layer + 1) if self.file_layers else file_layer + 1

    def begins(self, layer: int) -> bool:
        """Whether the layer is the first part of one of the files', or all of it."""
        return layer == 0 or self.streams.turns.stack > 0 or self.file_layer(layer) != self.file_layer(layer - 1)

    def has_norm(self, layer: int) -> bool:
        """Whether the norm before the mixer is the layer's own: twins have one, and a shared block its own."""
        if self.join == "twins":
            return self.begins(layer)
        return not self.of_block(layer) and not (self.edges.bare and layer == 0)

    def has_mlp(self, layer: int) -> bool:
        """Whether the layer has an MLP, or experts."""
        if self.join == "single":
            return self.mixers[layer] == MLP
        return self.join != "twins" or not self.begins(layer)

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return bool(self.moe.sparse) and self.moe.sparse[layer]

    @property
    def max_length(self) -> int:
        """The longest sequence `--max-model-len` may ask for: `max_position` times what the rope extension allows; no
        more than `max_position` where positions also tell types of tokens."""
        longest = self.max_position
        if not self.token_types:
            longest = int(longest * min(r.scaling.stretch for r in self.rope))
        return longest + self.encoder.room
