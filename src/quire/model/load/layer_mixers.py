"""What stands between a layer's norm and its MLP, from what the checkpoint holds: what reads each kind of mixer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.model.load.block_indexed import load_block_indexed
from quire.model.load.channel_scan import load_channel_scan
from quire.model.load.delta import load_delta_rule
from quire.model.load.encoder import load_cross
from quire.model.load.entry_attention import load_entry_attention
from quire.model.load.indexed import load_indexed
from quire.model.load.latent import load_latent
from quire.model.load.lightning import load_lightning
from quire.model.load.parts import load_table
from quire.model.load.placement import Unplaced
from quire.model.load.pooled_indexed import load_pooled_indexed
from quire.model.load.reader import WeightReader
from quire.model.load.scan import load_scan
from quire.model.load.shared_block import load_shared_block
from quire.model.load.short_conv import load_short_conv
from quire.model.mixers.attention import Attention
from quire.model.mixers.block_indexed import BlockIndexedAttention
from quire.model.mixers.channel_scan import ChannelScan
from quire.model.mixers.cross import EncoderDecoderAttention
from quire.model.mixers.delta import DeltaRule
from quire.model.mixers.entry_attention import EntryAttention
from quire.model.mixers.indexed import IndexedLatents
from quire.model.mixers.latent import Latents
from quire.model.mixers.lightning import Lightning
from quire.model.mixers.ngram_delta import NgramDeltaRule
from quire.model.mixers.no_mixer import NoMixer
from quire.model.mixers.pooled_indexed import PooledIndexedAttention
from quire.model.mixers.scan import SelectiveScan
from quire.model.mixers.shared_block import SharedBlock
from quire.model.mixers.short_conv import ShortConvolution
from quire.model.net.decoder import Attend, CrossAttention, MlpAlone, own_attention, reading_attention
from quire.model.net.gated_attention import GatedAttention, HeadGate, NumberGate, OutputGate, SoftplusGate
from quire.model.net.latent import GatedLatents
from quire.model.net.parts import Embedding, Product, absent


def load_attention(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """Attention of layer `index`; queries only where it reads another layer's keys and values."""
    if reader.local.kv_layer(index) == index:
        roles = ("q", "k", "v") if reader.local.has_values(index) else ("q", "k")
        return reader.linear(roles, index), load_gated(reader, index), None
    return reader.linear(("q",), index), reading_attention, None


def load_gated(reader: WeightReader, index: int) -> Attend:
    """How layer `index` attends to keys of its own: with a gate where the checkpoint has a matrix for one."""
    gate = load_gate(reader, index)
    return own_attention if gate is None else GatedAttention(gate)


def load_gate(reader: WeightReader, index: int) -> OutputGate | None:
    """The gate of what attention of layer `index` gives, where the checkpoint has a matrix for one."""
    claim, soft = reader.opened.claim, reader.local.gate == "softplus"
    for role, kind in (("head_gate", HeadGate), ("attn_gate", NumberGate), ("value_gate", NumberGate)):
        if claim.get(claim.holder(role, index), index):
            matrix = reader.linear((role,), index)
            return SoftplusGate(matrix) if soft else kind(matrix)
    return None


def load_crossed(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """Load a decoder layer with attention over the encoder's output, whose queries `rope`, which has no columns, does
    not turn."""
    qkv, attention, _ = load_attention(reader, index, rope)
    return qkv, attention, load_cross(reader, index, rope)


def load_latents(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """Latent attention of layer `index`."""
    down, attention = load_latent(reader, index)
    gate = load_gate(reader, index)
    return down, attention if gate is None else GatedLatents(attention, gate), None


def load_indexed_latents(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """Latent attention of layer `index` to chosen tokens."""
    return *load_indexed(reader, index, load_gate(reader, index)), None


def load_block_sparse(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """Attention of layer `index` to chosen blocks."""
    return reader.linear(("q", "k", "v"), index), load_block_indexed(reader, index), None


def load_pooled_sparse(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """Attention of layer `index` to blocks chosen by keys of blocks."""
    gate = load_gate(reader, index)
    assert gate is not None, "the family requires it"
    return reader.linear(("q", "k", "v"), index), load_pooled_indexed(reader, index, rope, gate), None


def load_entries(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """Attention of layer `index` to the last tokens and to entries, which turn by `rope`."""
    return *load_entry_attention(reader, index, rope), None


def load_convolution(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """The short convolution of layer `index`, which turns nothing by its position."""
    return *load_short_conv(reader, index), None


def load_delta(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """The gated delta rule of layer `index`, which turns nothing by its position."""
    return *load_delta_rule(reader, index), None


def load_selective_scan(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """The selective scan of layer `index`, which turns nothing by its position."""
    return *load_scan(reader, index), None


def load_scan_of_channels(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """The selective scan of single channels of layer `index`, which turns nothing by its position."""
    return *load_channel_scan(reader, index), None


def load_lightning_attention(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """Lightning attention of layer `index`, which turns nothing by its position."""
    return *load_lightning(reader, index), None


def load_use_of_block(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """What layer `index` has of a block that layers share, which looks tokens up itself."""
    table = reader.once("table", lambda: load_table(reader))
    return *load_shared_block(reader, index, Embedding(table)), None


def load_no_mixer(reader: WeightReader, index: int, rope: Unplaced) -> Mixed:
    """The MLP of layer `index`, which is all that it has."""
    return absent, MlpAlone(), None


Mixed = tuple[Product, Attend, CrossAttention | None]
"""A layer's first matrix, what runs between it and the last one, and what follows where an encoder is beside it."""
MIXERS: Mapping[type, Callable[[WeightReader, int, Unplaced], Mixed]] = {
    Attention: load_attention,
    EncoderDecoderAttention: load_crossed,
    Latents: load_latents,
    IndexedLatents: load_indexed_latents,
    BlockIndexedAttention: load_block_sparse,
    PooledIndexedAttention: load_pooled_sparse,
    EntryAttention: load_entries,
    ShortConvolution: load_convolution,
    DeltaRule: load_delta,
    NgramDeltaRule: load_delta,
    SelectiveScan: load_selective_scan,
    ChannelScan: load_scan_of_channels,
    Lightning: load_lightning_attention,
    SharedBlock: load_use_of_block,
    NoMixer: load_no_mixer,
}
"""Kind of mixer -> what reads a layer's."""
