"""Stacks that run in turns, from what the checkpoint holds."""

from __future__ import annotations

import numpy as np

from quire.core.dtypes import F32
from quire.model.load.parts import load_norm
from quire.model.load.reader import WeightReader
from quire.model.net.decoder import Block, Layer
from quire.model.net.hierarchical import LastTurn, StartedTurns, Turn, TurnsBlock
from quire.model.net.parts import LayerNorm, Norm


def load_turns_block(reader: WeightReader, index: int, norm: Norm) -> Block:
    """What joins layer `index`, before whose attention is `norm`, with the run before it."""
    turns = reader.opened.spec.streams.turns
    begun = Turn(load_norm(reader, "final_norm"), turns.repeats(index)) if turns.begins(index) else None
    return TurnsBlock(norm, begun)


def load_started(reader: WeightReader) -> StartedTurns:
    """What makes both streams of embedded tokens."""
    start, spec = reader.vector("turn_start"), reader.opened.spec
    assert start is not None, "claimed"
    return StartedTurns(LayerNorm(np.zeros(spec.hidden, F32), start, spec.norm_eps))


def load_last(reader: WeightReader, norm: Norm) -> LastTurn:
    """The norm of what the last run makes."""
    return LastTurn(norm)


def run_again(reader: WeightReader, index: int, layer: Layer) -> Block:
    """What joins layer `index`, which has the weights of `layer`, of an earlier run."""
    assert isinstance(layer.block, TurnsBlock), "layers of stacks that run in turns are loaded with it"
    return load_turns_block(reader, index, layer.block.norm)
