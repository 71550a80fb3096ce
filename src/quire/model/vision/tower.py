"""A vision tower and its projector as they run: one image at a time, whole, so that its bits depend on no other.
See docs/design/images.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.core.dtypes import Dtype
from quire.model.net.parts import Linear, Mlp, Norm, PlainMlp, Product
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
class ThreeMatrixMlp:
    """down(act(own(rows))) of an MLP of two matrices (Llama 4's projector)."""

    own: PlainMlp
    down: Linear

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, k] -> [T, n]."""
        return self.down(ops, ops.activation(self.own(ops, x), self.own.activation))


@dataclass(frozen=True)
class Bounded:
    """`own` of rows between two numbers, and what it makes of them between two others (Gemma 4)."""

    own: Product
    given: tuple[float, float]
    made: tuple[float, float]

    def __call__(self, ops: Ops, x: Any) -> Any:
        """x [T, k] -> [T, n]."""
        y: Any = self.own(ops, x.clip(*self.given))
        return y.clip(*self.made)


@dataclass(frozen=True)
class SideBySide:
    """What several matrices make of the same rows."""

    parts: tuple[Product, ...]

    def __call__(self, ops: Ops, x: Array) -> Array:
        """x [T, k] -> [T, sum of n]."""
        joined: Array = ops.join_columns(tuple(part(ops, x) for part in self.parts))
        return joined


@dataclass(frozen=True)
class Standardized:
    """x * scale - shift, [hidden] f32 each, in the place of a norm (Gemma 4)."""

    scale: Array
    shift: Array

    def __call__(self, ops: Ops, x: Any) -> Any:
        """x [T, hidden] -> [T, hidden]."""
        return x * self.scale - self.shift


@dataclass(frozen=True)
class TowerLayer:
    """x += scale * attention(norm(x)); x += scale * mlp(norm(x)); scales where there are any (Touvron et al. 2021), or
    norms of what is added.

    `spans`: weights of norms of queries, of keys, perhaps of values, `span` numbers together: whole rows or heads; or
    none. `windowed`: rows see their window only.
    """

    attn_norm: Norm
    qkv: Product
    spans: tuple[Array, ...]
    span: int
    o: Product
    attn_scale: Array | None
    attn_post_norm: Norm
    mlp_norm: Norm
    mlp: Mlp
    mlp_scale: Array | None
    mlp_post_norm: Norm
    windowed: bool


@dataclass(frozen=True)
class Tower:
    """Pixels to rows of the stream. `positions` [P, hidden] f32 on the host; `class_token` [hidden]; `patch_norms`: of
    what `patch` reads, and of what it makes.

    `dtype`: of keys and values; the stream is f32, or `dtype` where the backend's activations are that.
    """

    ops: Ops
    spec: ModelSpec
    patch: Linear
    patch_norms: tuple[Norm, Norm]
    class_token: Array | None
    positions: Host | None
    embed_norm: Norm
    layers: tuple[TowerLayer, ...]
    final_norm: Product
    dtype: Dtype

    def __call__(self, pixels: Array, taps: tuple[int, ...], normed: bool) -> list[Any]:
        """pixels [tiles, height, width, 3] f32 -> the stream [tiles, rows of a tile, hidden] behind so many layers.

        `normed`: in the place of the last, what the final norm makes of it. `taps` in ascending order.
        """
        size, tiles = self.spec.patches.size, len(pixels)
        grid = pixels.shape[1] // size, pixels.shape[2] // size
        x = self._embed(pixels, grid)
        kept = {0: _copy(x)} if 0 in taps else {}
        if self.layers:
            kept |= self._walk(x, grid, taps)
        if normed:
            for rows in pieces(len(x)):
                self.ops.begin_step()
                x[rows] = self.final_norm(self.ops, x[rows])
        return [kept[tap].reshape(tiles, -1, self.spec.hidden) for tap in taps]

    def _walk(self, x: Any, grid: tuple[int, int], taps: tuple[int, ...]) -> dict[int, Any]:
        """The stream x [tiles * rows, hidden] past all layers, in place; what it was behind those of `taps`."""
        patches, kept = self.spec.patches, dict[int, Any]()
        each = patches.first + grid[0] * grid[1]
        seen = (np.arange(len(x)).reshape(-1, each),)
        table = turns(self.spec.rope[0], self.spec.head_dim, *grid, patches.merge, patches.first, patches.start)
        attend = windowed = attention_of(self.ops, self.spec, seen, table, self.dtype)
        if any(self.spec.windows):
            windowed = attention_of(self.ops, self.spec, windows(*grid, patches), table, self.dtype)
        for i, layer in enumerate(self.layers):
            self._layer(layer, x, windowed if layer.windowed else attend)
            if i + 1 in taps:
                kept[i + 1] = x if i + 1 == len(self.layers) else _copy(x)
        return kept

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
                made = self.patch(ops, self.patch_norms[0](ops, part[rows]))
                x[tile, first + rows.start : first + rows.stop] = self.patch_norms[1](ops, made)
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
            for i, weight in enumerate(layer.spans):
                ops.norm_spans(qkv, weight, i * spec.hidden, layer.span, False, QK_EPS)
            attention.write(rows, qkv)
        for some, attended in attention.attend():
            here = x[some]
            added = self._add(layer, here, attended)
            if not isinstance(some, slice) or address(added) != address(here):
                x[some] = added

    def _add(self, layer: TowerLayer, x: Array, attended: Array) -> Any:
        """Some rows of the stream and what follows attention in a layer, perhaps in their place."""
        ops = self.ops
        delta: Any = layer.attn_post_norm(ops, layer.o(ops, attended))
        if layer.attn_scale is not None:
            delta *= layer.attn_scale
        x, h = layer.mlp_norm.add(ops, x, delta)
        delta = layer.mlp_post_norm(ops, layer.mlp(ops, h))
        if layer.mlp_scale is not None:
            delta *= layer.mlp_scale
        return ops.add(x, delta)


def _copy(x: Any) -> Any:
    return cast_to(x, dtype_of(x), copy=True)


QK_EPS = 1e-6
"""Of norms of queries, keys and values."""


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
