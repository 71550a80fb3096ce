"""Rows of a layer behind its causal convolution, and the recurrent states of the layer."""

from __future__ import annotations

from quire.model.batch import Batch
from quire.model.net.decoder import Layer
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.ops.convolution import Convolution
from quire.ops.layout import LayerCache, StatefulCache
from quire.ops.recurrent import StateBatch

States = tuple[Array, StateBatch]
"""The pool of a layer's states, and which of them each sequence of a step reads and writes."""


def convolved(ops: Ops, layer: Layer, h: Array, batch: Batch, cache: LayerCache, conv: Convolution) -> Array:
    """What `conv` makes of the layer's `qkv` of h [T, hidden]: [T, width]; its inputs are written to `cache`."""
    rows, paged = layer.qkv(ops, h), (batch.cu_q, batch.context, batch.block_tables)
    mixed: Array = ops.causal_conv(rows, cache[0], batch.slots, paged, conv, batch.tree)
    return mixed


def states_of(batch: Batch, cache: LayerCache) -> States:
    """The states of a layer, and how the sequences of `batch` use them."""
    assert isinstance(cache, StatefulCache) and batch.states is not None, "caches and steps have states"
    return cache.states, batch.states
