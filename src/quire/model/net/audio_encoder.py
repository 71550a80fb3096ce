"""The encoder of a model that hears (Radford et al. 2022): two convolutions over frames, then layers whose rows all see
each other."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.core.dtypes import F32, Dtype
from quire.model.net.encoder import EncoderLayer, KeysValues
from quire.model.net.parts import Linear, Norm
from quire.model.spec import ModelSpec
from quire.model.vision.tower import pieces
from quire.model.vision.tower_attention import Attention, attention_of
from quire.ops.arrays import Array, Host
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache

RECENT = 8
"""Windows that are kept: 8 MB each at the width of the largest models."""
NO_TURN = np.zeros((1, 2, 0), F32)
"""A rope table without columns."""


@dataclass(frozen=True)
class Convolution:
    """gelu of a matrix over `TAPS` rows around every row, or every `stride`th, of x; beside the ends are zeros."""

    linear: Linear
    stride: int

    def __call__(self, ops: Ops, x: Host) -> Host:
        """x [n, k] f32 of the host -> [n / stride, hidden] f32 of the host."""
        rows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((1, 1), (0, 0))), 3, axis=0)[:: self.stride]
        made = list[Host]()
        for some in pieces(len(rows)):
            ops.begin_step()
            near = np.ascontiguousarray(rows[some], F32).reshape(some.stop - some.start, -1)
            made.append(ops.host(ops.activation(self.linear(ops, ops.put(near)), "gelu")).copy())
        return np.concatenate(made)


@dataclass(frozen=True)
class AudioEncoder:
    """Frames of a window to keys and values of the cross attention of every decoder layer, one window at a time, so
    that its bits depend on no other. `positions` [rows, hidden] f32 of the host; `dtype`: of keys and values.

    `recent`: hidden states by the digest of their frames: a window is heard again for its language, and where its text
    is made anew at another temperature.
    """

    ops: Ops
    spec: ModelSpec
    convolutions: tuple[Convolution, Convolution]
    positions: Host
    layers: tuple[EncoderLayer, ...]
    final_norm: Norm
    keys_values: KeysValues
    dtype: Dtype
    recent: OrderedDict[bytes, Any] = field(default_factory=OrderedDict)

    def __call__(self, frames: Array, slots: Array, caches: Sequence[LayerCache]) -> None:
        """Encode frames [2 rows, bins] f32 and write the keys and values to `slots` [rows] of each layer's cache."""
        x = self.hidden(frames)
        self.ops.begin_step()
        self.keys_values(self.ops, x, slots, caches)

    def hidden(self, frames: Array) -> Any:
        """Hidden states [rows, hidden] of frames [2 rows, bins] f32, from `recent` where they are there."""
        key = hashlib.blake2b(self.ops.host(frames).tobytes(), digest_size=32).digest()
        x = self.recent.pop(key, None)
        if x is None:
            x = self.encode(frames)
        self.recent[key] = x
        if len(self.recent) > RECENT:
            self.recent.popitem(last=False)
        return x

    def encode(self, frames: Array) -> Any:
        """Frames [2 rows, bins] f32 to hidden states [rows, hidden]."""
        ops, x = self.ops, self.ops.host(frames)
        for convolution in self.convolutions:
            x = convolution(ops, x)
        stream: Any = ops.put(x + self.positions)
        groups = (np.arange(len(x)).reshape(1, -1),)
        attention = attention_of(ops, self.spec, groups, NO_TURN, self.dtype)
        for layer in self.layers:
            self._layer(layer, stream, attention)
        for rows in pieces(len(stream)):
            ops.begin_step()
            stream[rows] = self.final_norm(ops, stream[rows])
        return stream

    def _layer(self, layer: EncoderLayer, x: Any, attention: Attention) -> None:
        """Add what a layer makes to the stream, in place: keys and values of all rows first, then row by row."""
        ops = self.ops
        for rows in pieces(len(x)):
            ops.begin_step()
            attention.write(rows, layer.qkv(ops, layer.attn_norm(ops, x[rows])))
        for some, attended in attention.attend():
            here, h = layer.mlp_norm.add(ops, x[some], layer.o(ops, attended))
            x[some] = ops.add(here, layer.mlp(ops, h))
