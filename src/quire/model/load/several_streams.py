"""What a model of several streams has beside one of a single stream, in the kind that its spec says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from quire.model.load.altup import load_joined, load_spread, load_streams_block
from quire.model.load.gated_residual import load_read_residual, load_residual_block
from quire.model.load.hierarchical import load_last, load_started, load_turns_block
from quire.model.load.hyper_connections import load_connected_block, load_read, load_repeated
from quire.model.load.reader import WeightReader
from quire.model.net.decoder import Block
from quire.model.net.parts import Norm, RowChange

T = TypeVar("T")
BlockLoader = Callable[[WeightReader, int, Norm], Block]
EntryLoader = Callable[[WeightReader], RowChange]
ExitLoader = Callable[[WeightReader, Norm], Norm]


def load_block(reader: WeightReader, index: int, norm: Norm) -> Block:
    """How layer `index` joins attention, before which is `norm`, and MLP."""
    loaders: tuple[BlockLoader, ...] = load_turns_block, load_residual_block, load_connected_block, load_streams_block
    return _kind(reader, *loaders)(reader, index, norm)


def load_entry(reader: WeightReader) -> RowChange:
    """What makes streams of embedded tokens."""
    loaders: tuple[EntryLoader, ...] = load_started, load_repeated, load_repeated, load_spread
    return _kind(reader, *loaders)(reader)


def load_exit(reader: WeightReader, norm: Norm) -> Norm:
    """The norm of what the streams come to."""
    loaders: tuple[ExitLoader, ...] = load_last, load_read_residual, load_read, load_joined
    return _kind(reader, *loaders)(reader, norm)


def _kind(reader: WeightReader, turns: T, residual: T, connected: T, alternating: T) -> T:
    """Which of them the spec's streams ask for."""
    streams = reader.opened.spec.streams
    if streams.turns.stack:
        return turns
    if streams.gate_rank:
        return residual
    return connected if streams.most else alternating
