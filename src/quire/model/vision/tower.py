"""A vision tower and its projector as they run: one image at a time, whole, so that its bits depend on no other.
See docs/design/images.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.core.dtypes import Dtype
from quire.model.net.parts import Linear, Mlp, Norm
from quire.model.spec import ModelSpec
from quire.model.vision.account import PIECE
from quire.model.vision.patch_positions import cut, learned, turns, windows
from quire.model.vision.tower_attention import Attention, attention_of
from quire.ops.arrays import Array, Host, address, cast_to, dtype_of, is_tensor
from quire.ops.backend import Ops


@dataclass(frozen=True)
class QuickGeluMlp:
    """down(x * sigmoid(1.702 x)) of x = up(rows) (Hendrycks & Gimpel 2016): SiLU of another slope."""

    up: Linear
    down: Linear

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, hidden] -> [T, hidden]."""
        wide = ops.activation(ops.scale(self.up(ops, x), 1.702), "silu")
        return self.down(ops, ops.scale(wide, 1 / 1.702))


@dataclass(frozen=True)
class TowerLayer:
    """x += scale * attention(norm(x)); x += scale * mlp(norm(x)); scales where there are any (Touvron et al. 2021).

    `qk_norms`: weights of norms of whole rows of queries and keys, or none. `windowed`: rows see their window only.
    """

    attn_norm: Norm
    qkv: Linear
    qk_norms: tuple[Array, ...]
    o: Linear
    attn_scale: Array | None
    mlp_norm: Norm
    mlp: Mlp
    mlp_scale: Array | None
    windowed: bool


@dataclass(frozen=True)
class Tower:
    """Pixels to rows of the stream. `positions` [P, hidden] f32 on the host; `class_token` [hidden].

    `dtype`: of keys and values; the stream is f32, or `dtype` where the backend's activations are that.
    """

    ops: Ops
    spec: ModelSpec
    patch: Linear
    class_token: Array | None
    positions: Host | None
    embed_norm: Norm
    layers: tuple[TowerLayer, ...]
    final_norm: Norm
    dtype: Dtype

    def __call__(self, pixels: Array, taps: tuple[int, ...], normed: bool) -> list[Any]:
        """pixels [tiles, height, width, 3] f32 -> the stream [tiles, rows of a tile, hidden] behind so many layers.

        `normed`: in the place of the last, what the final norm makes of it. `taps` in ascending order.
        """
        patches, tiles = self.spec.patches, len(pixels)
        grid = pixels.shape[1] // patches.size, pixels.shape[2] // patches.size
        x = self._embed(pixels, grid)
        kept = {0: _copy(x)} if 0 in taps else {}
        seen = (np.arange(len(x)).reshape(tiles, -1),)
        table = turns(self.spec.rope[0], self.spec.head_dim, *grid, patches.merge)
        attend = windowed = attention_of(self.ops, self.spec, seen, table, self.dtype)
        if any(self.spec.windows):
            windowed = attention_of(self.ops, self.spec, windows(*grid, patches), table, self.dtype)
        for i, layer in enumerate(self.layers):
            self._layer(layer, x, windowed if layer.windowed else attend)
            if i + 1 in taps:
                kept[i + 1] = x if i + 1 == len(self.layers) else _copy(x)
        if normed:
            for rows in pieces(len(x)):
                self.ops.begin_step()
                x[rows] = self.final_norm(self.ops, x[rows])
        return [kept[tap].reshape(tiles, -1, self.spec.hidden) for tap in taps]

    def _embed(self, pixels: Array, grid: tuple[int, int]) -> Any:
        ops, tiles, first = self.ops, len(pixels), self.spec.patches.first
        count, dtype = first + grid[0] * grid[1], ops.row_dtype(self.dtype)
        patches = cast_to(cut(pixels, self.spec.patches), dtype)
        x = ops.zeros((tiles, count, self.spec.hidden), dtype)
        if self.class_token is not None:
            x[:, 0] = self.class_token
        for tile, part in enumerate(patches.reshape(tiles, -1, patches.shape[1])):
            for rows in pieces(len(part)):
                ops.begin_step()
                x[tile, first + rows.start : first + rows.stop] = self.patch(ops, part[rows])
        if self.positions is not None:
            x += cast_to(ops.put(learned(self.positions, self.spec.patches, *grid)), dtype)
        x = x.reshape(tiles * count, -1)
        for rows in pieces(len(x)):
            ops.begin_step()
            x[rows] = self.embed_norm(ops, x[rows])
        return x

    def _layer(self, layer: TowerLayer, x: Any, attention: Attention) -> None:
        """Add what a layer makes to the stream, in place: keys and values of all rows first, then row by row."""
        ops, spec = self.ops, self.spec
        for rows in pieces(len(x)):
            ops.begin_step()
            qkv = layer.qkv(ops, layer.attn_norm(ops, x[rows]))
            for i, weight in enumerate(layer.qk_norms):
                ops.norm_spans(qkv, weight, i * spec.hidden, spec.hidden, False, QK_EPS)
            attention.write(rows, qkv)
        for some, attended in attention.attend():
            here = x[some]
            added = self._add(layer, here, attended)
            if not isinstance(some, slice) or address(added) != address(here):
                x[some] = added

    def _add(self, layer: TowerLayer, x: Array, attended: Array) -> Any:
        """Some rows of the stream and what follows attention in a layer, perhaps in their place."""
        ops = self.ops
        delta: Any = layer.o(ops, attended)
        if layer.attn_scale is not None:
            delta *= layer.attn_scale
        x, h = layer.mlp_norm.add(ops, x, delta)
        delta = layer.mlp(ops, h)
        if layer.mlp_scale is not None:
            delta *= layer.mlp_scale
        return ops.add(x, delta)


def _copy(x: Any) -> Any:
    return cast_to(x, dtype_of(x), copy=True)


QK_EPS = 1e-6
"""Of norms of queries and keys, which no file says."""


def pieces(count: int, square: int = 1) -> Iterator[slice]:
    """`count` rows in even pieces of whole squares."""
    step = -(-count // -(-count // PIECE) // square) * square if count else 1
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


@dataclass(frozen=True)
class Projector:
    """Rows of a tower to rows of the decoder's width.

    `norm`: of a row, or, `norms_squares`, of those of a square of `square` patches side by side, which become one row;
    `pooled`: as their mean instead. `joint`: a matrix that makes one row of them; `project`: what follows.
    """

    ops: Ops
    norm: Norm
    norms_squares: bool
    square: int
    pooled: bool
    joint: Linear | None
    project: Callable[[Ops, Array], Array]
    hidden: int

    def __call__(self, x: Any) -> Any:
        """x [rows, width] f32 -> [rows / square, hidden] f32."""
        ops, square = self.ops, self.square
        out = ops.zeros((len(x) // square, self.hidden), dtype_of(x))
        for rows in pieces(len(x), square):
            ops.begin_step()
            part = x[rows]
            if self.pooled:
                part = averages(part.reshape(-1, square, part.shape[1]))
            if not self.norms_squares:
                part = self.norm(ops, part)
            if not self.pooled:
                part = part.reshape(-1, square * part.shape[1])
            if self.norms_squares:
                part = self.norm(ops, part)
            if self.joint is not None:
                part = self.joint(ops, part)
            out[rows.start // square : rows.stop // square] = self.project(ops, part)
        return out


TOGETHER = 16
"""Rows that are summed before their sums are: long sums round less, and torch's bits are the same."""


def averages(squares: Any) -> Any:
    """Means [n, width] of squares [n, rows, width]."""
    count = squares.shape[1]
    if is_tensor(squares) or count <= TOGETHER:
        return squares.mean(1)
    total = squares[:, :TOGETHER].sum(1)
    for start in range(TOGETHER, count, TOGETHER):
        total += squares[:, start : start + TOGETHER].sum(1)
    return total / count
