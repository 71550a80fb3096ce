"""Cases of every op: the sizes and values where implementations differ. Tests and benchmarks draw from here.

A case is the dict of an op's arguments. `linear` takes a `Weight` here; whoever runs the case packs it for its backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Generator, Tensor

from op_cases.registry import cases
from op_cases.weights import CODES, TABLES, normal, random_weight
from quire.core.dtypes import BF16, F8, F16, F32, I8, Dtype
from quire.ops.attention_spec import ALL, AttentionSpec
from quire.ops.experts import ACTIVATIONS
from quire.ops.kinds import SUPER_KINDS
from quire.ops.layout import KVLayout
from quire.ops.op import Case
from quire.ops.reference.caches import allocate, write
from quire.ops.weights import SUPER, Weight


def super_weight(g: Generator, form: tuple[int, int, bool, bool], n: int, k: int) -> Weight:
    """A weight whose scales (and minimums) are multiples of units; `form` is a key of `SUPER_KINDS`."""
    bits, group, mins, table = form
    low = 0 if mins or table else -(1 << bits - 1)
    codes = torch.randint(low, low + (1 << bits), (n, k), generator=g, dtype=torch.int8)
    units = ((0.5 + torch.rand(n, k // SUPER, generator=g)) / 16 / (1 << bits + 3 * table)).half()
    least = ((0.5 + torch.rand(n, k // SUPER, generator=g)) / -16).half()

    def times(units: Tensor, first: int, last: int) -> Tensor:
        multiples = torch.randint(first, last, (n, k // group), generator=g)
        return multiples * units.float().repeat_interleave(SUPER // group, 1)

    scales = times(units, 0, 16) if mins else times(units, -32, 32)
    return Weight(
        "table4" if table else "int8" if bits > 4 else "int4", codes, scales, None, group,
        mins=times(least, 0, 16) if mins else None, units=units, min_units=least if mins else None, bits=bits,
        table=torch.tensor(TABLES[1], dtype=torch.int16) if table else None,
    )  # fmt: skip


@cases("embedding")
def embedding_cases(g: Generator) -> Iterator[Case]:
    for t, vocabulary, d in ((1, 7, 64), (5, 100, 40), (300, 64, 129)):
        table = normal(g, vocabulary, d)
        tokens = torch.randint(vocabulary, (t,), generator=g, dtype=torch.int32)
        yield {"tokens": tokens, "table": table}
        yield {"tokens": tokens, "table": table.bfloat16()}
        yield {"tokens": tokens, "table": table.half()}
        yield {"tokens": tokens, "table": table[2:6], "first": 2}
    yield {"tokens": torch.tensor([0, 6], dtype=torch.int32), "table": normal(g, 7, 16)}


@cases("rmsnorm")
def rmsnorm_cases(g: Generator) -> Iterator[Case]:
    for t, d, size in ((1, 64, 1.0), (3, 33, 1e-4), (200, 256, 1e4), (2, 8, 1.0), (1, 1, 1.0), (0, 16, 1.0)):
        yield {"x": normal(g, t, d) * size, "weight": normal(g, d), "eps": 1e-5}
    yield {"x": torch.zeros(2, 48), "weight": normal(g, 48), "eps": 1e-6}


@cases("add_rmsnorm")
def add_rmsnorm_cases(g: Generator) -> Iterator[Case]:
    for case in rmsnorm_cases(g):
        yield case | {"delta": normal(g, *case["x"].shape)}


@cases("linear")
def linear_cases(g: Generator) -> Iterator[Case]:
    for kind in ("f32", "bf16", "f16"):
        for m, n, k in ((1, 1, 1), (1, 16, 33), (3, 75, 64), (9, 33, 130), (0, 16, 16), (70, 40, 257)):
            bias = normal(g, n) if m % 2 else None
            yield {"x": normal(g, m, k), "w": random_weight(g, kind, n, k), "bias": bias}
    for kind in ("int4", "int8"):
        for m, n, k, group in (
            (1, 16, 32, 32),
            (2, 75, 256, 32),
            (8, 33, 192, 64),
            (13, 17, 384, 128),
            (70, 50, 128, 128),
        ):
            for zeros in (False, True):
                x = normal(g, m, k)
                x[:, 3] *= 300.0  # one outlier channel
                w = random_weight(g, kind, n, k, group, zeros)
                yield {"x": x, "w": w, "bias": normal(g, n) if m % 2 else None}
        low, high = CODES[kind]
        for code, value in ((low, 1.0), (high - 1, -3e30), (low, 1e-30), (low, 0.0)):  # the ends of the integer range
            w = Weight(kind, torch.full((16, 128), code, dtype=torch.int8), torch.ones(16, 1).half(), None, 128)
            yield {"x": torch.full((2, 128), value), "w": w, "bias": None}
    for m, n, k, group in ((1, 16, 32, 32), (2, 75, 512, 256), (9, 33, 192, 64), (70, 50, 384, 128)):
        bias = normal(g, n) if m % 2 else None
        yield {"x": normal(g, m, k), "w": random_weight(g, "fp8", n, k, group), "bias": bias}
    yield from linear_parts_cases(g)


def linear_parts_cases(g: Generator) -> Iterator[Case]:
    """Super-blocks; groups of 16, minimums, tables of one and two digits, orders of columns, activations of 16 bits."""
    for form in SUPER_KINDS:
        for m, n, k in ((1, 33, 768), (13, 16, 512)):
            yield {"x": normal(g, m, k), "w": super_weight(g, form, n, k), "bias": normal(g, n)}
    for bits in (8, 16):
        for m, n, k, group in (
            (1, 16, 16, 16),
            (2, 75, 256, 16),
            (4, 33, 192, 64),
            (13, 17, 384, 128),
            (70, 50, 96, 32),
        ):
            x = normal(g, m, k)
            x[:, 3] *= 300.0
            order = torch.randperm(k, generator=g).int() if m != 2 else None
            for kind in CODES:
                w = replace(random_weight(g, kind, n, k, group, bits=bits), order=order)
                yield {"x": x, "w": w, "bias": None}
                if w.table is not None:
                    yield {"x": x, "w": replace(w, table=torch.tensor(TABLES[2], dtype=torch.int16)), "bias": None}
                    continue
                yield {"x": x, "w": random_weight(g, kind, n, k, group, True, bits), "bias": normal(g, n)}
                codes = w.codes + (8 if kind == "int4" else 0)
                scales = w.scales if m % 2 else w.scales.float()  # type: ignore[union-attr]
                mins = (normal(g, n, k // group) / 4).to(scales.dtype)  # type: ignore[union-attr]
                yield {"x": x, "w": replace(w, codes=codes, scales=scales, mins=mins), "bias": None}
        for kind, code in (("int8", -128), ("table4", 0), ("table4", 15)):  # the ends of the integer range
            w = random_weight(g, kind, 16, 128, 128, kind == "int8", bits)
            w = replace(w, codes=torch.full_like(w.codes, code))
            if w.zeros is None:
                w = replace(w, table=torch.tensor([-32512] + [0] * 14 + [32512], dtype=torch.int16))
            else:
                w.zeros.fill_(127)
            yield {"x": torch.full((2, 128), -3.0), "w": w, "bias": None}


def rope_table(positions: int, half: int, base: float = 10000.0) -> Tensor:
    """[positions, 2, half] cosines and sines."""
    angle = torch.arange(positions)[:, None] * base ** (-torch.arange(half) / max(half, 1))
    return torch.stack((angle.cos(), angle.sin()), 1).contiguous()


@cases("rope_and_cache")
def rope_and_cache_cases(g: Generator, dtypes: tuple[Dtype, ...] = (BF16, F32)) -> Iterator[Case]:
    """Of caches that hold plain numbers: those of the others are compared by what they mean, not by their bytes."""
    shapes = (
        (1, 4, 2, 64, 32, 16),
        (7, 3, 1, 40, 20, 1),
        (33, 2, 2, 8, 4, 2),
        (5, 8, 4, 128, 32, 32),
        (3, 1, 1, 24, 0, 4),
    )
    for t, heads, kv_heads, d, half, block_size in shapes:
        for dtype in dtypes:
            layout = KVLayout(block_size, kv_heads, d, dtype)
            blocks = -(-t // block_size) + 3
            slots = torch.randperm(blocks * block_size, generator=g)[:t]
            norms = (normal(g, d), normal(g, d)) if heads % 2 == 0 else None
            yield {
                "qkv": normal(g, t, (heads + 2 * kv_heads) * d),
                "positions": torch.randint(500, (t,), generator=g, dtype=torch.int32),
                "table": rope_table(500, half),
                "slots": slots,
                "cache": allocate(layout, blocks),
                "norms": norms,
                "eps": 1e-6,
            }


def attention_spec(g: Generator, heads: int, scale: float, window: int, extras: str, after: int = 0) -> AttentionSpec:
    """A score function with the `extras` of `attention_case`."""
    return AttentionSpec(
        scale,
        window,
        softcap=0.7 if "softcap" in extras else 0.0,
        sinks=normal(g, heads) * 3 if "sinks" in extras else None,
        alibi=2.0 ** -torch.arange(1, heads + 1).float() if "alibi" in extras else None,
        bias=normal(g, heads, 130) if "bias" in extras else None,
        after=after,
        behind=60 if after and "bias" in extras else 0,
    )


def attention_case(
    g: Generator,
    layout: KVLayout,
    heads: int,
    rows: tuple[tuple[int, int], ...],
    window: int = 0,
    garbage: bool = True,
    extras: str = "",
    after: int = 0,
) -> Case:
    """A paged batch with (new rows, context) per sequence; blocks lie shuffled, unwritten slots NaN if `garbage`.

    `extras` names what else the scores have: any of "softcap", "sinks", "alibi", "bias", joined by spaces.
    `after`: keys behind its own that a row sees.
    """
    size, blocks = layout.block_size, [-(-context // layout.block_size) for _, context in rows]
    cache = allocate(layout, sum(blocks) + 2)
    if garbage:
        cache.keys.view(torch.uint8).fill_(255)
        cache.values.view(torch.uint8).fill_(255)
    order = torch.randperm(sum(blocks) + 2, generator=g)
    tables = torch.full((len(rows), max(blocks, default=0) + 1), -1, dtype=torch.int32)
    used = 0
    for s, (_, context) in enumerate(rows):
        tables[s, : blocks[s]] = order[used : used + blocks[s]].int()
        used += blocks[s]
        at = torch.arange(context)
        slots = tables[s, at // size].long() * size + at % size
        k, v = (normal(g, context, layout.kv_heads, layout.head_dim) for _ in range(2))
        write(cache, slots, k, v)
    counts = torch.tensor([0, *(new for new, _ in rows)])
    return {
        "qkv": normal(g, int(counts.sum()), (heads + 2 * layout.kv_heads) * layout.head_dim),
        "cache": cache,
        "cu_q": counts.cumsum(0).int(),
        "context": torch.tensor([context for _, context in rows], dtype=torch.int32),
        "block_tables": tables,
        "spec": attention_spec(g, heads, layout.head_dim**-0.5, window, extras, after),
    }


@cases("attention")
def attention_cases(g: Generator) -> Iterator[Case]:
    mixed = ((1, 1), (1, 70), (5, 5), (0, 40), (17, 90), (1, 600))
    for dtype in (BF16, F32):
        for block_size in (1, 2, 4, 8, 16, 32, 64, 128):
            yield attention_case(g, KVLayout(block_size, 2, 32, dtype), 4, mixed)
        for heads, kv_heads in ((4, 4), (6, 2), (5, 1), (40, 1)):  # MHA, GQA, MQA, more heads than a tile has rows
            yield attention_case(g, KVLayout(16, kv_heads, 64, dtype), heads, mixed)
        for d in (8, 24, 80, 128, 256):
            yield attention_case(g, KVLayout(16, 1, d, dtype), 2, ((3, 50), (1, 17)))
        for window in (1, 16, 100, 520, -1, -16, -100, -520):
            yield attention_case(g, KVLayout(16, 2, 32, dtype), 4, ((1, 1), (9, 700), (1, 530), (40, 40)), window)
        yield attention_case(g, KVLayout(16, 1, 64, dtype), 4, ((1, 3000),))
        yield attention_case(g, KVLayout(16, 2, 64, dtype), 4, ((600, 600), (64, 1100)))
        large = attention_case(g, KVLayout(16, 1, 16, dtype), 2, ((4, 30),))
        large["qkv"] *= 1e4
        yield large
        yield from attention_extra_cases(g, dtype)
        yield from attention_behind_cases(g, dtype)
    for dtype in (F16, I8, F8):
        yield from attention_narrow_cases(g, dtype)


def attention_narrow_cases(g: Generator, dtype: Dtype) -> Iterator[Case]:
    """Caches in fewer bits than attention computes in: block sizes, head sizes, windows, all extras."""
    rows = ((1, 1), (5, 5), (0, 40), (17, 90), (1, 600))
    for block_size in (1, 2, 4, 8, 16, 32, 128):
        yield attention_case(g, KVLayout(block_size, 2, 32, dtype), 4, rows)
    for d in (8, 24, 80, 128):
        for block_size in (1, 4, 16):
            yield attention_case(g, KVLayout(block_size, 1, d, dtype), 2, ((3, 50), (1, 17)))
    extras = "softcap sinks alibi"
    yield attention_case(g, KVLayout(16, 2, 64, dtype), 6, ((9, 700), (40, 40)), 100, extras=extras)
    yield attention_case(g, KVLayout(16, 1, 64, dtype), 4, ((64, 1100), (1, 1600)))


def attention_extra_cases(g: Generator, dtype: Dtype) -> Iterator[Case]:
    """Soft cap, sinks, ALiBi and bias, alone and together, with windows, groups and block sizes."""
    rows = ((1, 1), (9, 700), (1, 1030), (40, 40))
    for extras in ("softcap", "sinks", "alibi", "bias", "softcap sinks alibi bias"):
        for window in (0, 100, -100):
            yield attention_case(g, KVLayout(16, 2, 32, dtype), 6, rows, window, extras=extras)
        for block_size, kv_heads, d in ((1, 1, 24), (4, 3, 16), (64, 1, 64)):
            yield attention_case(g, KVLayout(block_size, kv_heads, d, dtype), 3, rows, extras=extras)
    for sink in (-1e4, 1e4):
        case = attention_case(g, KVLayout(16, 1, 16, dtype), 2, rows)
        yield case | {"spec": AttentionSpec(0.25, sinks=torch.full((2,), sink))}
    if dtype == F32:  # a capped score near 0 is steep: queries rounded to bf16 would decide its sign
        large = attention_case(g, KVLayout(16, 1, 16, dtype), 2, rows, extras="softcap")
        large["qkv"] *= 1e4
        yield large


def attention_behind_cases(g: Generator, dtype: Dtype) -> Iterator[Case]:
    """Rows that see tokens behind their own: all, or as many as before it; whole prompts, and what is left of some."""
    rows = ((1, 1), (7, 7), (40, 40), (130, 130), (9, 700), (600, 600))
    for block_size, kv_heads, heads, d in ((16, 4, 4, 32), (1, 2, 2, 24), (64, 1, 4, 64), (128, 3, 3, 64)):
        yield attention_case(g, KVLayout(block_size, kv_heads, d, dtype), heads, rows, after=ALL)
        yield attention_case(g, KVLayout(block_size, kv_heads, d, dtype), heads, rows, 65, after=64)
        yield attention_case(g, KVLayout(block_size, kv_heads, d, dtype), heads, rows, 3, after=2)
    for extras in ("alibi", "bias", "softcap sinks"):
        for window, after in ((0, ALL), (100, 99)):
            yield attention_case(g, KVLayout(16, 2, 32, dtype), 4, rows, window, extras=extras, after=after)


@cases("gated_activation")
def gated_activation_cases(g: Generator) -> Iterator[Case]:
    for kind in ACTIVATIONS:
        for t, f in ((1, 16), (3, 1025), (40, 7), (0, 8)):
            yield {"gate_up": normal(g, t, 2 * f) * 3, "kind": kind}
        edge = torch.tensor([[-100.0, -30.0, -5.0, -1e-6, 0.0, 1e-6, 5.0, 100.0] + [1.0] * 8])
        yield {"gate_up": edge, "kind": kind}


@cases("activation")
def activation_cases(g: Generator) -> Iterator[Case]:
    for case in gated_activation_cases(g):
        yield {"x": case["gate_up"], "kind": case["kind"]}


@cases("gated_mlp")
def gated_mlp_cases(g: Generator) -> Iterator[Case]:
    yield from _mlp_cases(g, "gate_up", 2)


@cases("plain_mlp")
def plain_mlp_cases(g: Generator) -> Iterator[Case]:
    yield from _mlp_cases(g, "up", 1)


def _mlp_cases(g: Generator, wide: str, parts: int) -> Iterator[Case]:
    kinds = (("f32", "f32"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int4"), ("int4", "int8"), ("bf16", "int8"))
    for i, (first, second) in enumerate(kinds):
        for m, hidden, f, group in ((1, 64, 96, 32), (3, 128, 384, 128), (70, 64, 320, 64), (0, 32, 32, 32)):
            zeros = m == 3
            biases = (normal(g, parts * f), normal(g, hidden)) if m % 2 else (None, None)
            yield {
                "x": normal(g, m, hidden),
                wide: random_weight(g, first, parts * f, hidden, group, zeros),
                f"{wide}_bias": biases[0],
                "down": random_weight(g, second, hidden, f, group, zeros),
                "down_bias": biases[1],
                "kind": list(ACTIVATIONS)[(i + m) % len(ACTIVATIONS)],
            }


@cases("take_rows")
def take_rows_cases(g: Generator) -> Iterator[Case]:
    for t, d, r in ((1, 64, 1), (9, 33, 4), (300, 512, 200), (2, 8, 0)):
        rows = torch.randint(t, (r,), generator=g, dtype=torch.int32)
        yield {"x": normal(g, t, d), "delta": normal(g, t, d), "rows": rows}
        yield {"x": normal(g, t, d), "delta": normal(g, t, d), "rows": None}


@cases("pick_rows")
def pick_rows_cases(g: Generator) -> Iterator[Case]:
    for case in take_rows_cases(g):
        if case["rows"] is not None:
            yield {"x": case["x"], "rows": case["rows"]}


@cases("copy_blocks")
def copy_blocks_cases(g: Generator) -> Iterator[Case]:
    for block_size in (1, 16):
        for dtype in (BF16, F32, I8):
            layout = KVLayout(block_size, 2, 16, dtype)
            caches = [allocate(layout, 6) for _ in range(3)]
            for tensor in (t for cache in caches for t in (cache.keys, cache.values)):
                tensor.copy_(normal(g, *tensor.shape).abs() * 50)
            yield {"caches": caches, "pairs": ((0, 5), (2, 1), (5, 3), (4, 4))}
            yield {"caches": caches, "pairs": ()}


@cases("move_slots")
def move_slots_cases(g: Generator) -> Iterator[Case]:
    for block_size in (1, 4, 16, 32):
        for dtype in (BF16, F16, F32, I8, F8):
            layout = KVLayout(block_size, 2, 16, dtype)
            caches = [allocate(layout, 6) for _ in range(2)]
            for tensor in (t for cache in caches for t in (cache.keys, cache.values)):
                tensor.copy_(normal(g, *tensor.shape).abs() * 50)
            end = 6 * block_size - 1
            yield {"caches": caches, "pairs": ((end, 0), (0, 1), (end // 2, end - 1), (1, end // 2), (3, 3))}
            yield {"caches": caches, "pairs": ()}


@cases("zero_blocks")
def zero_blocks_cases(g: Generator) -> Iterator[Case]:
    for case in copy_blocks_cases(g):
        case["caches"][0].keys.view(torch.uint8).fill_(255)
        yield {"caches": case["caches"], "blocks": tuple(p[0] for p in case["pairs"])}
