"""A vision tower and its projector as they run: one picture at a time, whole, so that its bits depend on no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.model.net.linear import Linear
from quire.model.net.parts import Mlp, Norm
from quire.model.spec import ModelSpec
from quire.model.vision.places import cut, learned, rotate, turns, windows
from quire.ops.backend import Ops

PIECE = 1024
"""Rows that go through a layer's matrices together: what lies between them then stays in the caches, and the memory of
a picture of any size is that of its stream, queries, keys and values, and of one piece."""


@dataclass(frozen=True)
class QuickGeluMlp:
    """down(x * sigmoid(1.702 x)) of x = up(rows) (Hendrycks & Gimpel 2016): SiLU of another slope."""

    up: Linear
    down: Linear

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        wide = ops.activation(ops.scale(self.up(ops, x), 1.702), "silu")
        return self.down(ops, ops.scale(wide, 1 / 1.702))


@dataclass(frozen=True)
class TowerLayer:
    """x += scale * attention(norm(x)); x += scale * mlp(norm(x)); scales where there are any (Touvron et al. 2021).

    `qk_norms`: weights of norms of whole rows of queries and keys. `windowed`: rows see those of their window only.
    """

    attn_norm: Norm
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor] | None
    o: Linear
    attn_scale: Tensor | None
    mlp_norm: Norm
    mlp: Mlp
    mlp_scale: Tensor | None
    windowed: bool


class Attention:
    """softmax(q k^T) v where everything is seen, in the dtype of its operands.

    On the CPU heads are divided among threads of our own, each of which runs torch's kernel alone: threads that torch
    starts spin when they are done, beside the pool of the other ops.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, "vision", initializer=torch.set_num_threads, initargs=(1,))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """q, k, v [batch, heads, n, head_dim] into `out` [batch, n, heads, head_dim] f32."""

        def some(heads: slice) -> None:
            found = F.scaled_dot_product_attention(q[:, heads], k[:, heads], v[:, heads])
            out[:, :, heads] = found.transpose(1, 2)

        if self._threads == 1:
            return some(slice(None))
        count = q.shape[1]
        parts = [slice(i * count // self._threads, (i + 1) * count // self._threads) for i in range(self._threads)]
        for done in [self._pool.submit(some, part) for part in parts if part.start < part.stop]:
            done.result()
        return None


@dataclass(frozen=True)
class Tower:
    """Pixels to rows of the stream. `positions` [P, hidden] f32 on the host; `class_token` [hidden].

    `dtype`: of queries, keys and values; the stream is f32, or `dtype` where the backend's activations are that.
    """

    ops: Ops
    spec: ModelSpec
    patch: Linear
    class_token: Tensor | None
    positions: Tensor | None
    embed_norm: Norm
    layers: tuple[TowerLayer, ...]
    final_norm: Norm
    attention: Attention
    dtype: torch.dtype

    def __call__(self, pixels: Tensor, taps: tuple[int, ...], normed: bool) -> list[Tensor]:
        """pixels [tiles, height, width, 3] f32 -> the stream [tiles, rows of a tile, hidden] behind so many layers.

        `normed`: in the place of the last, what the final norm makes of it. `taps` in ascending order.
        """
        patches, tiles = self.spec.patches, len(pixels)
        grid = pixels.shape[1] // patches.size, pixels.shape[2] // patches.size
        x = self._embed(pixels, grid)
        kept = {0: x.clone()} if 0 in taps else {}
        for i, layer in enumerate(self.layers):
            attended = self._attend(layer, i, x, tiles, grid)
            for rows in pieces(len(x)):
                self._add(layer, x[rows], attended[rows])
            if i + 1 in taps:
                kept[i + 1] = x if i + 1 == len(self.layers) else x.clone()
        if normed:
            for rows in pieces(len(x)):
                self.ops.begin_step()
                x[rows] = self.final_norm(self.ops, x[rows])
        return [kept[tap].view(tiles, -1, self.spec.hidden) for tap in taps]

    def _embed(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        ops, tiles, first = self.ops, len(pixels), self.spec.patches.first
        count = first + grid[0] * grid[1]
        patches = cut(pixels, self.spec.patches).to(torch.float32 if ops.gpu is None else self.dtype)
        x = patches.new_empty(tiles, count, self.spec.hidden)
        if self.class_token is not None:
            x[:, 0] = self.class_token
        for tile, part in enumerate(patches.view(tiles, -1, patches.shape[1])):
            for rows in pieces(len(part)):
                ops.begin_step()
                x[tile, first + rows.start : first + rows.stop] = self.patch(ops, part[rows])
        if self.positions is not None:
            x += learned(self.positions, self.spec.patches, *grid).to(x)
        x = x.view(tiles * count, -1)
        for rows in pieces(len(x)):
            ops.begin_step()
            x[rows] = self.embed_norm(ops, x[rows])
        return x

    def _attend(self, layer: TowerLayer, index: int, x: Tensor, tiles: int, grid: tuple[int, int]) -> Tensor:
        """What attention of a layer makes of the stream, [rows, hidden] f32, before its output matrix."""
        spec, ops = self.spec, self.ops
        rope, shape = spec.rope[index], (3, spec.heads, spec.head_dim)
        turned = turns(rope, spec.head_dim, *grid, spec.patches.merge) if rope.dim else None
        qkv = torch.empty(3, spec.heads, len(x), spec.head_dim, dtype=self.dtype, device=x.device)
        for rows in pieces(len(x)):
            ops.begin_step()
            made = layer.qkv(ops, layer.attn_norm(ops, x[rows]))
            if layer.qk_norms is not None:
                for i, weight in enumerate(layer.qk_norms):
                    ops.norm_spans(made, weight, i * spec.hidden, spec.hidden, False, QK_EPS)
            heads = made.view(len(made), *shape)
            if turned is not None:
                here = tuple(_of_tiles(t, rows, tiles).to(x) for t in turned)
                for i in range(2):
                    heads[:, i] = rotate(heads[:, i], (here[0], here[1]))
            qkv[:, :, rows] = heads.permute(1, 2, 0, 3)
        out = x.new_empty(len(x), spec.heads, spec.head_dim)
        if layer.windowed:
            for seen in windows(*grid, spec.patches):
                part = x.new_empty(*seen.shape, spec.heads, spec.head_dim)
                self.attention(*(t[:, seen].transpose(0, 1) for t in qkv), part)
                out[seen.flatten()] = part.flatten(0, 1)
        else:
            each = qkv.view(3, spec.heads, tiles, -1, spec.head_dim).transpose(1, 2)
            self.attention(each[0], each[1], each[2], out.view(tiles, -1, spec.heads, spec.head_dim))
        return out.view(len(x), -1)

    def _add(self, layer: TowerLayer, x: Tensor, attended: Tensor) -> None:
        """Add what a layer makes to some rows of the stream, in place."""
        ops = self.ops
        ops.begin_step()
        delta = layer.o(ops, attended)
        if layer.attn_scale is not None:
            delta.mul_(layer.attn_scale)
        added, h = layer.mlp_norm.add(ops, x, delta)
        delta = layer.mlp(ops, h)
        if layer.mlp_scale is not None:
            delta.mul_(layer.mlp_scale)
        added = ops.add(added, delta)
        if added.data_ptr() != x.data_ptr():
            x.copy_(added)


QK_EPS = 1e-6
"""Of norms of queries and keys, which no file says."""


def pieces(count: int, square: int = 1) -> Iterator[slice]:
    """`count` rows in pieces of whole squares."""
    step = max(PIECE // square, 1) * square
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _of_tiles(table: Tensor, rows: slice, tiles: int) -> Tensor:
    """The rows `rows` of a table that each tile has anew."""
    if tiles == 1:
        return table[rows]
    return table[torch.arange(rows.start, rows.stop) % len(table)]


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
    project: Callable[[Ops, Tensor], Tensor]
    hidden: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, width] f32 -> [rows / square, hidden] f32."""
        ops, square = self.ops, self.square
        out = x.new_empty(len(x) // square, self.hidden)
        for rows in pieces(len(x), square):
            ops.begin_step()
            part = x[rows]
            if self.pooled:
                part = part.view(-1, square, part.shape[1]).mean(1)
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
