"""A layer that is a use of a block which several share, from what the checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.load.parts import load_norm
from quire.model.load.reader import WeightReader
from quire.model.net.parts import Embed, GatedMlp, Linear, LowRank, Norm, Product
from quire.model.net.shared_block import SharedAttention, adapted


@dataclass(frozen=True)
class BlockParts:
    """What all layers that use a block have in common."""

    norm: Norm
    qkv: Linear
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


def load_shared_block(reader: WeightReader, index: int, embed: Embed) -> tuple[Product, SharedAttention]:
    """The matrix of queries, keys and values of layer `index`, packed, and what follows; a block is loaded once."""
    home = reader.local.block_home(index)
    block = reader.once(f"block {home}", lambda: _block(reader, home))
    attends = ("q", "k", "v") if reader.local.shared.attention else ()
    qkv = adapted(block.qkv, tuple(_low_rank(reader, name, index) for name in attends))
    gate_up = adapted(block.gate_up, (_low_rank(reader, "mlp", index),))
    mlp = GatedMlp(gate_up, block.down, reader.local.activation)
    return qkv, SharedAttention(embed, block.norm, block.o, block.mlp_norm, mlp)


def _block(reader: WeightReader, home: int) -> BlockParts:
    norms = (load_norm(reader, role, home) for role in ("block_norm", "block_mlp_norm"))
    before, between = norms
    qkv, o, gate_up, down = (
        reader.linear(roles, home)
        for roles in (("block_q", "block_k", "block_v"), ("block_o",), ("block_gate", "block_up"), ("block_down",))
    )
    return BlockParts(before, qkv, o, between, gate_up, down)


def _low_rank(reader: WeightReader, name: str, index: int) -> LowRank:
    """What layer `index` adds to the matrix `name`."""
    return LowRank(reader.linear((f"use_{name}_down",), index), reader.linear((f"use_{name}_up",), index))
