"""Triton kernels of matrix products: y = x W^T with W [n, k] in every form that a weight has.

They compute the transpose, y^T = W x^T. A tile of W takes the 64 or more rows that Hopper's matrix unit wants from its
first operand, and the batch takes the other side, whose width may be as small as 8: a decode step of one row wastes no
bandwidth, and decode and prefill run the same kernel (Marlin, Frantar et al. 2024, and Machete load weights likewise).

One number of y is the sum over k in a fixed order: `SEGMENTS` runs of columns, each added up in ascending order in
float32 by the matrix unit, then the runs in ascending order. The number of runs depends on the shape of W alone. Where
the batch is small, programs take a run each (`SPLIT`) and `sum_segments` adds them; where it is large, one program
walks all runs. Tiles of rows of the batch may have any width: which instruction computes a number, and in which order
it adds products, does not depend on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.interpreter import repair

repair()

PLAIN, HEADS, EXPERTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""One matrix; one per head, reading and writing that head's columns; one per expert, reading that expert's rows."""
INT4, TABLE4, E2M1, INT8 = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(8)
"""Forms of integer codes. E2M1 is the table (0, 1, 2, 3, 4, 6, 8, 12) with signs, computed instead of looked up."""


@triton.jit
def _experts_tile(offsets, tile, experts, SLOTS: tl.constexpr, BM: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a tile of rows sorted by expert; rows are empty past the last.

    Every program counts the tiles of all experts anew: no kernel before this one, no copy to the host.
    """
    e = tl.arange(0, SLOTS)
    begin = tl.load(offsets + e, mask=e < experts, other=0)
    end = tl.load(offsets + e + 1, mask=e < experts, other=0)
    tiles = (end - begin + BM - 1) // BM
    done = tl.cumsum(tiles, 0)
    expert = tl.sum((done <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(e < expert, tiles, 0), 0)
    start = tl.sum(tl.where(e == expert, begin, 0), 0) + (tile - before) * BM
    stop = tl.sum(tl.where(e == expert, end, 0), 0)
    return expert, start, stop


@triton.jit
def _place(offsets, m, n, experts, MODE: tl.constexpr, SLOTS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """(matrix, first row of W, first row of the batch, end of these) of this program.

    Programs that run at the same time take up to 8 tiles of the batch by as many tiles of W as there are, so that what
    they read stays in the L2 cache.
    """
    pid = tl.program_id(0)
    n_tiles = tl.cdiv(n, BN)
    m_tiles = tl.num_programs(0) // n_tiles
    if MODE == EXPERTS:
        expert, start, stop = _experts_tile(offsets, pid // n_tiles, experts, SLOTS, BM)
        return expert, pid % n_tiles * BN, start, stop
    span = 8 * n_tiles
    first = pid // span * 8
    together = tl.minimum(m_tiles - first, 8)
    start = (first + pid % span % together) * BM
    matrix = 0
    if MODE == HEADS:
        matrix = tl.program_id(1)
    return matrix, pid % span // together * BN, start, m


@triton.jit
def _source(tokens, rows, stop):
    """The rows of x that rows of the output read."""
    source = rows
    if tokens is not None:
        source = tl.load(tokens + rows, mask=rows < stop, other=0)
    return source


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a b in float32. `UPCAST`: the interpreter multiplies bf16 and float8 as the integers they are stored in."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def _finish(out, total, bias, expert, at, step, rows, stop, cols, n):
    """Add the bias [n] of an expert (0: the only one) and store total [BN, BM] at out[row, at + col]."""
    kept = cols < n
    if bias is not None:
        total += tl.load(bias + expert * n + cols, mask=kept, other=0.0).to(tl.float32)[:, None]
    where = out + at + rows[None, :].to(tl.int64) * step + cols[:, None]
    tl.store(where, total.to(out.dtype.element_ty), mask=kept[:, None] & (rows < stop)[None, :])


# What changes from step to step is not specialized on: a kernel is compiled once for a matrix, before it serves.
@triton.jit(do_not_specialize=["m"])
def dense_kernel(
    out, x, w, bias, tokens, offsets, m, n, k, w_rows, x_row, out_row, x_step, segment, experts,
    SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, MODE: tl.constexpr, SLOTS: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out [m, n] = x [m, k] times w [n, k] of floats; x is rounded to the type of w.

    `tokens` [pairs] int32: the row of x that each row of the output reads, or None. `segment`: columns of a run, a
    multiple of BK. `EVEN`: k is a multiple of BK. With SPLIT, out is f32 [SEGMENTS, m, n] and `bias` None.
    """
    matrix, n0, start, stop = _place(offsets, m, n, experts, MODE, SLOTS, BN, BM)
    if start >= stop:
        return
    cols, rows, ks = n0 + tl.arange(0, BN), start + tl.arange(0, BM), tl.arange(0, BK)
    source = _source(tokens, rows, stop)
    w_at = w + (matrix * w_rows + tl.minimum(cols, n - 1)).to(tl.int64)[:, None] * k + ks[None, :]
    x_at = x + matrix * x_step + source.to(tl.int64)[None, :] * x_row + ks[:, None]
    present = (rows < stop)[None, :]
    first = tl.program_id(1) if SPLIT else 0
    total = tl.zeros((BN, BM), tl.float32)
    for s in range(first, first + (1 if SPLIT else SEGMENTS)):
        acc = tl.zeros((BN, BM), tl.float32)
        for k0 in range(s * segment, tl.minimum((s + 1) * segment, k), BK):
            if EVEN:
                a = tl.load(w_at + k0)
                b = tl.load(x_at + k0, mask=present, other=0.0)
            else:
                a = tl.load(w_at + k0, mask=(k0 + ks < k)[None, :], other=0.0)
                b = tl.load(x_at + k0, mask=present & (k0 + ks < k)[:, None], other=0.0)
            acc = _dot(a, b.to(w.dtype.element_ty), acc, UPCAST)
        if SEGMENTS == 1 or SPLIT:
            total = acc
        else:
            total += acc
    at = first * m * n if SPLIT else matrix * n if MODE == HEADS else 0
    _finish(out, total, bias, matrix, at, out_row, rows, stop, cols, n)


@triton.jit(do_not_specialize=["m"])
def sum_segments(out, parts, x_scales, scales, bias, m, n, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """out [m, n] = the sum of parts f32 [SEGMENTS, m, n] in ascending order, times scales [n] and x_scales [m] (or None
    both), plus bias [n]."""
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = cols < n
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SEGMENTS):
        total += tl.load(parts + (s * m + row) * n + cols, mask=kept, other=0.0)
    if scales is not None:
        total *= tl.load(scales + cols, mask=kept, other=0.0).to(tl.float32) * tl.load(x_scales + row)
    if bias is not None:
        total += tl.load(bias + cols, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + row * n + cols, total.to(out.dtype.element_ty), mask=kept)


def _four_codes(shift: int, exponents: str) -> str:
    """PTX that makes four 16-bit floats of the low (`shift` 0) or high (4) halves of four bytes, plus a pair of each.

    A half is put below the byte `exponents`, which makes it 128 (bf16) or 1024 (f16) larger; the pairs take that off.
    """
    kind, one = ("bf16x2", "0x3f803f80") if exponents == "0x43434343" else ("f16x2", "0x3c003c00")
    return f"""{{
        .reg .b32 halves, above, first, second, one;
        shr.b32 halves, $2, {shift};
        and.b32 halves, halves, 0x0f0f0f0f;
        mov.b32 above, {exponents};
        mov.b32 one, {one};
        prmt.b32 first, halves, above, 0x4140;
        prmt.b32 second, halves, above, 0x4342;
        fma.rn.{kind} $0, first, one, $3;
        fma.rn.{kind} $1, second, one, $4;
    }}"""


def _four_e2m1(shift: int) -> str:
    """PTX that makes four bf16 of halves of four bytes in e2m1, twice its numbers: bits in their places times 2^127."""
    lines = "".join(
        f"""
        prmt.b32 wide, halves, 0, {order};
        shl.b32 size, wide, 6;
        and.b32 size, size, 0x01c001c0;
        shl.b32 sign, wide, 12;
        and.b32 sign, sign, 0x80008000;
        or.b32 size, size, sign;
        fma.rn.bf16x2 {out}, size, power, zero;"""
        for out, order in (("$0", "0x4140"), ("$1", "0x4342"))
    )
    return f"""{{
        .reg .b32 halves, wide, size, sign, power, zero;
        shr.b32 halves, $2, {shift};
        and.b32 halves, halves, 0x0f0f0f0f;
        mov.b32 power, 0x7f007f00;
        mov.b32 zero, 0x80008000;{lines}
    }}"""


BF16_LOW, BF16_HIGH = tl.constexpr(_four_codes(0, "0x43434343")), tl.constexpr(_four_codes(4, "0x43434343"))
F16_LOW, F16_HIGH = tl.constexpr(_four_codes(0, "0x64646464")), tl.constexpr(_four_codes(4, "0x64646464"))
E2M1_LOW, E2M1_HIGH = tl.constexpr(_four_e2m1(0)), tl.constexpr(_four_e2m1(4))


@triton.jit
def _numbers_by_ptx(packed, zero, FORM: tl.constexpr, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers of INT4, or of E2M1 in bf16, with a third of the instructions: decoding waits for these."""
    if FORM == E2M1:
        ASM: tl.constexpr = E2M1_HIGH if HIGH else E2M1_LOW
        numbers = tl.inline_asm_elementwise(ASM, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif tl.bfloat16 == DTYPE:
        B: tl.constexpr = BF16_HIGH if HIGH else BF16_LOW
        less = tl.broadcast_to((-(zero + 128.0)).to(DTYPE)[:, None], packed.shape)
        numbers = tl.inline_asm_elementwise(B, "=r,=r,r,r,r", [packed, less], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        F: tl.constexpr = F16_HIGH if HIGH else F16_LOW
        less = tl.broadcast_to((-(zero + 1024.0)).to(DTYPE)[:, None], packed.shape)
        numbers = tl.inline_asm_elementwise(F, "=r,=r,r,r,r", [packed, less], dtype=tl.float16, is_pure=True, pack=4)
    return numbers


@triton.jit
def _numbers(codes, table, zero, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers that codes 0..255 stand for, less `zero` [BN] f32, as DTYPE; all exact but those of a table.

    Integers become floats as the low bits of 2^23, which is then subtracted with the zero: the unit that converts them
    has an eighth of the speed.
    """
    if FORM == TABLE4:
        numbers = tl.load(table + codes)
    elif FORM == E2M1:
        code = codes.to(tl.int32)
        exponent, fraction = (code >> 1) & 3, code & 1
        size = tl.where(exponent == 0, fraction, (2 + fraction) << tl.maximum(exponent - 1, 0))
        number = (size | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        numbers = tl.where(code > 7, -number, number)
    else:
        numbers = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)[:, None]
    return numbers.to(DTYPE)


@triton.jit
def _part(packed, table, zero, HIGH: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The numbers of 8-bit codes, or of the low or high halves of bytes."""
    if PTX and ((FORM == INT4 and tl.float32 != DTYPE) or (FORM == E2M1 and tl.bfloat16 == DTYPE)):
        numbers = _numbers_by_ptx(packed, zero, FORM, HIGH, DTYPE)
    elif FORM == INT8:
        numbers = _numbers(packed, table, zero, FORM, DTYPE)
    else:
        numbers = _numbers(packed >> 4 if HIGH else packed & 15, table, zero, FORM, DTYPE)
    return numbers


@triton.jit(do_not_specialize=["m", "x_rows"])
def grouped_kernel(
    out, x, codes, scales, zeros, mins, sums, table, bias, tokens, offsets, m, x_rows, n, k, chunks, all_rows, w_rows,
    x_row, out_row, run, experts, GROUP: tl.constexpr, FORM: tl.constexpr, SHIFT: tl.constexpr,
    SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, MODE: tl.constexpr, SLOTS: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out [m, n] = x [m, k] (floats) times a matrix of integer codes with a scale per row and GROUP columns.

    Codes become x's type in registers, exactly, are multiplied, and the group's sum is scaled in float32: the only
    roundings are those of x. `codes` uint8: [k / GROUP, rows, GROUP], or two to a byte [k / C, rows, C / 2], C =
    max(GROUP, 32), with the first C / 2 columns of a chunk in the low halves. `scales`, `zeros` (f32 or None), `mins`
    (or None) are [k / GROUP, rows]; `sums` f32 [k / GROUP, m] those of x's groups, which minimums multiply. SHIFT: what
    a code is larger than its number. `chunks`: of all columns; `run`: chunks of a segment.
    """
    matrix, n0, start, stop = _place(offsets, m, n, experts, MODE, SLOTS, BN, BM)
    if start >= stop:
        return
    cols, rows = n0 + tl.arange(0, BN), start + tl.arange(0, BM)
    source = _source(tokens, rows, stop)
    PARTS: tl.constexpr = 1 if FORM == INT8 else 2
    WIDTH: tl.constexpr = GROUP if FORM == INT8 else max(GROUP, 32) // 2
    PER: tl.constexpr = PARTS * WIDTH // GROUP
    ks = tl.arange(0, WIDTH)
    row = (matrix * w_rows + tl.minimum(cols, n - 1)).to(tl.int64)
    x_at = x + source.to(tl.int64)[None, :] * x_row + ks[:, None]
    present = (rows < stop)[None, :]
    first = tl.program_id(1) if SPLIT else 0
    total = tl.zeros((BN, BM), tl.float32)
    for s in range(first, first + (1 if SPLIT else SEGMENTS)):
        acc = tl.zeros((BN, BM), tl.float32)
        for c in range(s * run, tl.minimum((s + 1) * run, chunks)):
            packed = tl.load(codes + (c * all_rows + row)[:, None] * WIDTH + ks[None, :])
            p = tl.zeros((BN, BM), tl.float32)
            for part in tl.static_range(PARTS):
                group = c * PER + (part if PER == 2 else 0)
                at = group * all_rows + row
                zero = tl.full((BN,), SHIFT, tl.float32)
                if zeros is not None:
                    zero += tl.load(zeros + at).to(tl.float32)
                k0 = (c * PARTS + part) * WIDTH
                if EVEN:
                    b = tl.load(x_at + k0, mask=present, other=0.0)
                else:
                    b = tl.load(x_at + k0, mask=present & (k0 + ks < k)[:, None], other=0.0)
                a = _part(packed, table, zero, part == 1, FORM, x.dtype.element_ty, PTX)
                p = _dot(a, b, p, UPCAST)
                if PER == 2 or part == PARTS - 1:
                    acc += p * tl.load(scales + at).to(tl.float32)[:, None]
                    if mins is not None:
                        of_x = tl.load(sums + group * x_rows + source, mask=rows < stop, other=0.0)
                        acc += tl.load(mins + at).to(tl.float32)[:, None] * of_x[None, :]
                    p = tl.zeros((BN, BM), tl.float32)
        if SEGMENTS == 1 or SPLIT:
            total = acc
        else:
            total += acc
    _finish(out, total, bias, matrix, first * m * n if SPLIT else 0, out_row, rows, stop, cols, n)


@triton.jit(do_not_specialize=["m", "x_rows"])
def scaled_kernel(
    out, x, x_scales, codes, scales, bias, tokens, offsets, m, x_rows, n, k, all_rows, w_rows, out_row, run, experts,
    GROUP: tl.constexpr, SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, MODE: tl.constexpr, SLOTS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out [m, n] = x [m, k] times codes [n, k], both int8 or both float8, with a scale per row and GROUP columns each.

    x_scales f32 [groups, m], scales [groups, rows]; GROUP 0: one per row. Products of int8 are added exactly. Those of
    float8 are added by the matrix unit over BK columns at most, as it keeps few bits of longer sums (DeepSeek-AI 2024,
    section 3.3.2), then in float32. BK divides GROUP and `run`, the columns of a segment.
    """
    matrix, n0, start, stop = _place(offsets, m, n, experts, MODE, SLOTS, BN, BM)
    if start >= stop:
        return
    cols, rows, ks = n0 + tl.arange(0, BN), start + tl.arange(0, BM), tl.arange(0, BK)
    source = _source(tokens, rows, stop)
    row = (matrix * w_rows + tl.minimum(cols, n - 1)).to(tl.int64)
    w_at = codes + row[:, None] * k + ks[None, :]
    x_at = x + source.to(tl.int64)[None, :] * k + ks[:, None]
    present = (rows < stop)[None, :]
    first = tl.program_id(1) if SPLIT else 0
    total = tl.zeros((BN, BM), tl.float32)
    for s in range(first, first + (1 if SPLIT else SEGMENTS)):
        acc = tl.zeros((BN, BM), tl.float32)
        for k0 in range(s * run, tl.minimum((s + 1) * run, k), BK):
            if EVEN:
                a, b = tl.load(w_at + k0), tl.load(x_at + k0, mask=present, other=0.0)
            else:
                a = tl.load(w_at + k0, mask=(k0 + ks < k)[None, :], other=0.0)
                b = tl.load(x_at + k0, mask=present & (k0 + ks < k)[:, None], other=0.0)
            if codes.dtype.element_ty == tl.int8:
                p = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
            else:
                p = _dot(a, b, tl.zeros((BN, BM), tl.float32), UPCAST)
            if GROUP:
                group = k0 // GROUP
                of_x = tl.load(x_scales + group * x_rows + source, mask=rows < stop, other=0.0)
                p *= tl.load(scales + group * all_rows + row).to(tl.float32)[:, None] * of_x[None, :]
            acc += p
        if SEGMENTS == 1 or SPLIT:
            total = acc
        else:
            total += acc
    if not GROUP and not SPLIT:
        of_x = tl.load(x_scales + source, mask=rows < stop, other=0.0)
        total *= tl.load(scales + row).to(tl.float32)[:, None] * of_x[None, :]
    _finish(out, total, bias, matrix, first * m * n if SPLIT else 0, out_row, rows, stop, cols, n)


@triton.jit(do_not_specialize=["m"])
def quantize_kernel(
    codes, scales, x, m, k, x_row, GROUP: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, MOST: tl.constexpr
):
    """Rows x [m, k] of floats to codes [m, k] (int8, or float8 e4m3) and scales f32 [k / GROUP, m], symmetric.

    A scale is max|x| / MOST of its group; a NaN makes it NaN, so that the product shows it. TOGETHER: groups of a
    program. BLOCK: a power of two, at least GROUP.
    """
    row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    at, place = groups[:, None] * GROUP + tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK)[None, :]
    kept = (place < GROUP) & (at < k)
    values = tl.load(x + row * x_row + at, mask=kept, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(values), 1)
    broken = tl.max((values != values).to(tl.int32), 1) > 0
    most = tl.full((TOGETHER,), MOST, tl.float32)
    inverse = tl.where(top > 2e-34, tl.math.div_rn(most, tl.maximum(top, 2e-34)), 0.0)
    scaled = tl.where(values == values, values * inverse[:, None], 0.0)
    if codes.dtype.element_ty == tl.int8:
        nearest = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is left is rounded to an integer, half to even
        scaled = tl.minimum(tl.maximum(nearest, -MOST), MOST)
    tl.store(codes + row * k + at, scaled.to(codes.dtype.element_ty), mask=kept)
    there = groups * GROUP < k
    tl.store(scales + groups * m + row, tl.where(broken, float("nan"), tl.math.div_rn(top, most)), mask=there)


@triton.jit(do_not_specialize=["m"])
def sum_groups(sums, x, m, x_row, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """sums f32 [groups, m]: those of each GROUP numbers of the rows x [m, groups * GROUP]."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = at < groups
    where = x + row * x_row + at[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(where, mask=kept[:, None], other=0.0).to(tl.float32)
    tl.store(sums + at * m + row, tl.sum(values, 1), mask=kept)
