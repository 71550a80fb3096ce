"""The Triton kernel of products with 2:4 matrices, whose zeros come back in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.linear_kernels import HEADS, _dot, _finish, _place, _source
from quire.ops.triton.pack import FOURS

GROUPS = tl.constexpr(FOURS)
"""Of four columns in a chunk."""


@triton.jit(do_not_specialize=["m", "x_rows"])
def two_of_four_kernel(
    out, x, values, places, bias, tokens, offsets, m, x_rows, n, fours, x_fours, all_rows, w_rows, out_row, x_step,
    chunks, run, experts, SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, MODE: tl.constexpr, SLOTS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out [m, n] = x times the matrix of `values` and `places` (`pack._two_of_four`); x is rounded to its type.

    x [4, x_rows, x_fours]: columns 4 i + j at [j, row, i]. `fours`: groups of four columns of the matrix, `chunks` of
    64 of them; `run`: chunks of a segment; `x_step`: groups of a head. Columns are added by chunks, halves of chunks,
    remainders by four, whatever the batch.
    """
    matrix, n0, start, stop = _place(offsets, m, n, experts, MODE, SLOTS, BN, BM)
    if start >= stop:
        return
    HALF: tl.constexpr = GROUPS // 2
    cols, rows, groups = n0 + tl.arange(0, BN), start + tl.arange(0, BM), tl.arange(0, HALF)
    source = _source(tokens, rows, stop)
    row = (matrix * w_rows + tl.minimum(cols, n - 1)).to(tl.int64)
    plane, x_plane = all_rows.to(tl.int64) * chunks * GROUPS, x_rows.to(tl.int64) * x_fours
    x_at = x + matrix * x_step + source.to(tl.int64)[None, :] * x_fours + groups[:, None]
    present = (rows < stop)[None, :]
    first = tl.program_id(1) if SPLIT else 0
    total = tl.zeros((BN, BM), tl.float32)
    for s in range(first, first + (1 if SPLIT else SEGMENTS)):
        acc = tl.zeros((BN, BM), tl.float32)
        for c in range(s * run, tl.minimum((s + 1) * run, chunks)):
            where = tl.load(places + (row * chunks + c)[:, None] * HALF + groups[None, :])
            for half in tl.static_range(2):
                at = values + (row * chunks + c)[:, None] * GROUPS + half * HALF + groups[None, :]
                one, two = tl.load(at), tl.load(at + plane)
                mine = (where >> (4 * half)) & 15
                g = c * GROUPS + half * HALF
                for j in tl.static_range(4):
                    if EVEN:
                        b = tl.load(x_at + j * x_plane + g, mask=present, other=0.0)
                    else:
                        b = tl.load(x_at + j * x_plane + g, mask=present & (g + groups < fours)[:, None], other=0.0)
                    nothing = tl.zeros((BN, HALF), values.dtype.element_ty)
                    a = tl.where((mine & 3) == j, one, tl.where((mine >> 2) == j, two, nothing))
                    acc = _dot(a, b.to(values.dtype.element_ty), acc, UPCAST)
        if SEGMENTS == 1 or SPLIT:
            total = acc
        else:
            total += acc
    at_head = matrix * n if MODE == HEADS else 0
    _finish(out, total, bias, matrix, first * m * n if SPLIT else at_head, out_row, rows, stop, cols, n)
