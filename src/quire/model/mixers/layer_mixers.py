"""Which mixer a layer has, and what the mixers of a model's layers say together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from quire.core.dtypes import Dtype
from quire.core.exclusions.features import Feature
from quire.model.mixers import (
    attention,
    block_indexed,
    channel_scan,
    cross,
    delta,
    entry_attention,
    indexed,
    latent,
    lightning,
    ngram_delta,
    pooled_indexed,
    scan,
    shared_block,
    short_conv,
)
from quire.model.mixers.attention import Attention
from quire.model.mixers.channel_scan import ChannelScan
from quire.model.mixers.cross import EncoderDecoderAttention
from quire.model.mixers.delta import DeltaRule
from quire.model.mixers.indexed import indexed_latents
from quire.model.mixers.latent import Latents
from quire.model.mixers.lightning import Lightning
from quire.model.mixers.mixer import LayerCacheSpec, Mixer
from quire.model.mixers.ngram_delta import NgramDeltaRule
from quire.model.mixers.no_mixer import NoMixer
from quire.model.mixers.scan import SelectiveScan
from quire.model.mixers.shared_block import SharedBlock
from quire.model.mixers.short_conv import ShortConvolution
from quire.model.spec import CHANNEL_SCAN, CONVOLUTION, DELTA, LIGHTNING, MLP, SCAN, ModelSpec
from quire.ops.convolution import RowLayout
from quire.ops.layout import CacheLayout, KVLayout, StateLayout

ROLES = {
    name: role
    for kind in (
        attention,
        block_indexed,
        pooled_indexed,
        latent,
        indexed,
        entry_attention,
        cross,
        short_conv,
        delta,
        ngram_delta,
        scan,
        channel_scan,
        shared_block,
        lightning,
    )
    for name, role in kind.ROLES.items()
}
"""What mixers have on disk, of all kinds."""


WITHOUT_KEYS: Mapping[str, Callable[[ModelSpec], Mixer]] = {
    CONVOLUTION: lambda spec: ShortConvolution(spec.conv.width, spec.conv.taps),
    DELTA: lambda spec: DeltaRule(spec.delta),
    SCAN: lambda spec: SelectiveScan(spec.scan),
    CHANNEL_SCAN: lambda spec: ChannelScan(spec.channels),
    LIGHTNING: lambda spec: Lightning(spec.heads, spec.head_dim),
    MLP: lambda spec: NoMixer(),
}
"""Mixers of layers that do not attend, by the words of `ModelSpec.mixers`."""


def mixer_of(spec: ModelSpec, layer: int) -> Mixer:
    """What stands between the norm and the MLP of `layer`."""
    if spec.ngrams.at(layer):
        return NgramDeltaRule(spec.delta, ngrams=spec.ngrams, streams=spec.streams.count * spec.hidden)
    if not spec.attends(layer):
        return WITHOUT_KEYS[spec.mixers[layer]](spec)
    spec = spec.at(layer)
    if spec.of_block(layer):
        return SharedBlock(spec.heads, spec.kv_heads, spec.head_dim, wide=2 * spec.hidden, inner=spec.intermediate)
    if spec.entries.window:
        return entry_attention.mixer_with_entries(spec, layer)
    mla = spec.mla
    if mla.rank and mla.indexer.most:
        return indexed_latents(spec, layer)
    if mla.rank:
        return Latents(spec.heads, spec.head_dim, mla.q_rank, mla.rank, mla.rope)
    if spec.blocks.at(layer):
        return block_indexed.block_indexed(spec)
    if spec.pooled.at(layer):
        return pooled_indexed.pooled_indexed(spec)
    kind = EncoderDecoderAttention if spec.encoder_decoder else Attention
    return kind(spec.heads, spec.kv_heads, spec.head_dim)


def of_rank(spec: ModelSpec, held: Callable[[str], tuple[int, int]]) -> ModelSpec:
    """`spec` with the heads and channels of a rank. `held`: (first, stop) of the units that it has of a role."""
    for part_of in (attention.with_heads, short_conv.with_channels, delta.with_delta_heads, scan.with_scan_heads):
        spec = part_of(spec, held)
    return spec


def mixers_of(spec: ModelSpec) -> tuple[Mixer, ...]:
    """Mixers of all layers."""
    return tuple(mixer_of(spec, layer) for layer in range(spec.layers))


def features_of(spec: ModelSpec) -> frozenset[Feature]:
    """Rows of the table of exclusions that a model of these layers has a part in."""
    return frozenset[Feature]().union(*(mixer.features for mixer in mixers_of(spec)))


def own_heads(spec: ModelSpec) -> bool:
    """Whether in all layers each head has rows of the matrices q, k and v, and of no others."""
    return all(mixer.own_heads for mixer in mixers_of(spec)) and not any(spec.blocks.own + spec.pooled.own)


def scaled(spec: ModelSpec) -> bool:
    """Whether the cache of all layers that attend may hold codes with a scale per token and head."""
    return all(mixer_of(spec, layer).scaled for layer in range(spec.layers) if spec.attends(layer))


def layouts_of(
    spec: ModelSpec, asked: str, dtype: Dtype, backend: str, block_size: int = 1, heads: type[KVLayout] = KVLayout
) -> tuple[CacheLayout, ...]:
    """How each layer's cache lies; arguments and errors as of `Mixer.kept_in` and `Mixer.parts`."""
    return tuple(mixer.parts(block_size, mixer.kept_in(asked, dtype, backend), heads) for mixer in mixers_of(spec))


def states_of(spec: ModelSpec) -> tuple[StateLayout | None, ...]:
    """How each layer's recurrent state lies, None where it has none."""
    return tuple(mixer.state for mixer in mixers_of(spec))


def format_of(layouts: Iterable[CacheLayout]) -> Dtype:
    """Format of the keys and values, or latents, in the cache of these layers, which is one; that of rows of
    convolutions where all layers have these."""
    held = [layout for parts in layouts for layout in parts]
    return next((layout for layout in held if not isinstance(layout, RowLayout)), held[0]).dtype


def in_tables(layouts: CacheLayout) -> tuple[CacheLayout, CacheLayout]:
    """Parts of a layer that its window lets go, and those behind them that stay, which have tables of their own."""
    at = next((i for i, layout in enumerate(layouts) if layout.stays), len(layouts))
    return layouts[:at], layouts[at:]


def lasting_of(number: int) -> int:
    """The number under which what stays of a layer is kept: it is no layer's."""
    return ~number


def kept_by_layer(models: Iterable[tuple[ModelSpec, Sequence[CacheLayout]]]) -> dict[int, LayerCacheSpec]:
    """What layers with a cache of their own keep, by number; layers of all models, with their layouts, are numbered
    on. What stays of layers with a window is as of other layers (`lasting_of`)."""
    kept: dict[int, LayerCacheSpec] = {}
    first = 0
    for spec, layouts in models:
        own = spec.own_windows.items()
        for layer, window in own:
            passing, lasting = in_tables(layouts[layer])
            kept |= {first + layer: LayerCacheSpec(passing, window)} if passing else {}
            kept |= {lasting_of(first + layer): LayerCacheSpec(lasting)} if lasting else {}
        first += spec.layers
    return kept


def kv_bytes_per_token(spec: ModelSpec, dtype: Dtype) -> int:
    """KV bytes of one token in all layers, those that read another's cache not counted."""
    return sum(LayerCacheSpec(mixer_of(spec, layer).parts(1, dtype)).bytes_per_token for layer in spec.own_layers)
