"""What a model of several streams has beside one of a single stream, in the kind that its spec says."""

from __future__ import annotations

from quire.model.load.altup import load_joined, load_spread, load_streams_block
from quire.model.load.hyper_connections import load_connected_block, load_read, load_repeated
from quire.model.load.reader import WeightReader
from quire.model.net.decoder import Block
from quire.model.net.parts import Norm, RowChange


def load_block(reader: WeightReader, index: int, norm: Norm) -> Block:
    """How layer `index` joins attention, before which is `norm`, and MLP."""
    return (load_connected_block if reader.opened.spec.streams.most else load_streams_block)(reader, index, norm)


def load_entry(reader: WeightReader) -> RowChange:
    """What makes streams of embedded tokens."""
    return load_repeated(reader) if reader.opened.spec.streams.most else load_spread(reader)


def load_exit(reader: WeightReader, norm: Norm) -> Norm:
    """The norm of what the streams come to."""
    return (load_read if reader.opened.spec.streams.most else load_joined)(reader, norm)
