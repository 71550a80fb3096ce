"""Measures what steps are made of on this CPU, in seconds for each format: products, attention, norms, sampling.

The matrices and the caches are made up, and none has the shape of a model: figures of models are predicted from these,
and so are no figures of the calibration. Every point is timed in turns with all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from quire.core.dtypes import BF16, F32, I32, Dtype
from quire.ops.arrays import Host
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops
from quire.ops.layout import KVCache
from quire.ops.native import huge_bytes
from quire.ops.recurrent import DeltaSpec, StateBatch
from quire.ops.sampling import DRAW
from quire.ops.weights import Packed, Weight
from quire.plan.rates import FAR, NEAR, AttentionRates, KindRates, RecurrenceRates
from quire.quant.registry import QUANTIZERS
from quire.run.kernel_tuning import measured_tuning

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256, 512)
WIDTH, INNER = 1536, 4096
"""Columns of the matrices, and the inner width of the MLPs."""
SECONDS = 0.08
"""Of each point, in turns; every point is timed `TURNS` times at least."""
TURNS = 5
HEADS = ((16, 8, 128), (24, 6, 64))
"""Heads, heads of keys and values, size of a head."""
ATTENDED = ((1, 255, 1), (1, 3071, 1), (16, 255, 1), (16, 1023, 1), (1, 0, 64), (4, 0, 96), (1, 0, 512), (1, 1536, 384),
            (1, 3072, 512))  # fmt: skip
"""Sequences, tokens before, rows of each."""
VOCABULARY, LAYERS, BLOCK, MOST_CALLS = 32000, 8, 16, 64
STATE_HEADS, STATE_DIM = 16, 128
STATE_CASES = ((1, 1), (4, 1), (16, 1), (1, 16), (1, 128), (4, 64))
"""Sequences with a recurrent state, and rows of each."""
FULL = 128
"""Rows from which products in tiles do not hide the reading of weights any more, which is added."""

Timed = Mapping[Any, Callable[[], object]]


def timed_in_turns(timed: Timed, seconds: float = SECONDS, turns: int = TURNS) -> dict[Any, float]:
    """Seconds of each, all in turns, each run right after one that is not timed: the median, as what users wait for
    has the machine's other work in it.
    """
    found: dict[Any, list[float]] = {name: [] for name in timed}
    end = time.perf_counter() + seconds * len(timed)
    while len(next(iter(found.values()))) < turns or time.perf_counter() < end:
        for name, run in timed.items():
            run()
            began = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - began)
    return {name: float(np.median(spent)) for name, spent in found.items()}


def kind_rates(ops: Ops, kind: str, seconds: float = SECONDS, far: int = FAR) -> KindRates:
    """Rates of matrices of `kind`, as "bf16" or "int4 g32", with the kernels' numbers that a start would choose for
    them; `far`: bytes of weights that no cache keeps. From `FULL` rows on their way adds the same to what computing
    takes.
    """
    before = ops.tuning
    linear = [_packed(ops, kind, 2 * WIDTH, WIDTH)]
    mlp = [_packed(ops, kind, 2 * INNER, WIDTH), _packed(ops, kind, WIDTH, INNER)]
    timed: dict[Any, Callable[[], object]] = {}
    numbers: dict[Any, float] = {}
    lone, pairs = _copies(ops, linear, far), _copies(ops, mlp, far)
    tuned = measured_tuning(ops, lambda rows: ops.record(lambda: _mlps(ops, pairs, rows)).run, max(ROWS))
    ops.tune(tuned)
    for place, size in (("near", NEAR), ("far", far)):
        if place == "near":
            own, both = _copies(ops, linear, size), _copies(ops, mlp, size)
        else:
            own, both = lone, pairs
        for rows in ROWS if place == "near" else [rows for rows in ROWS if rows <= FULL]:
            timed["linear", place, rows] = ops.record(partial(_linears, ops, own, rows)).run
            timed["mlp", place, rows] = ops.record(partial(_mlps, ops, both, rows)).run
            numbers["linear", place, rows] = sum(w.n * w.k for (w,) in own)
            numbers["mlp", place, rows] = sum(w.n * w.k for pair in both for w in pair)
    spent = timed_in_turns(timed, seconds)
    ops.tune(before)
    each = {key: spent[key] / numbers[key] for key in timed}

    def of(op: str, place: str) -> list[float]:
        way = each[op, place, FULL] - each[op, "near", FULL]
        return [each.get((op, place, rows), each[op, "near", rows] + way) for rows in ROWS]

    return KindRates(list(ROWS), of("linear", "near"), of("linear", "far"), of("mlp", "near"), of("mlp", "far"), far)


def _noise(rows: int, columns: int, seed: int = 0) -> Host:
    return np.random.default_rng(seed).standard_normal((rows, columns), F32)


def _packed(ops: Ops, kind: str, n: int, k: int) -> Packed:
    name, _, group = kind.partition(" g")
    made = _noise(n, k, seed=n) * np.float32(0.02)
    if not group:
        return ops.pack(Weight(name, made if name == "f32" else made.astype(BF16)), narrow=True)
    target = QUANTIZERS["nf4" if name == "table4" else name]
    return target.at_pack(made, int(group)).pack(ops)


def _copies(ops: Ops, matrices: Sequence[Packed], size: int) -> list[tuple[Packed, ...]]:
    """Make as many copies of all `matrices`, each in memory of its own, as take `size` bytes; one at least."""
    count = max(1, size // sum(w.nbytes for w in matrices))
    return [tuple(_copy(ops, w) for w in matrices) for _ in range(count)]


def _copy(ops: Ops, packed: Packed) -> Packed:
    bare, parts = ops.take_apart(packed)
    made = {}
    for name, part in parts.items():
        made[name] = huge_bytes(part.nbytes).view(part.dtype).reshape(part.shape)
        made[name][...] = part
    return ops.put_together(bare, made)


def _linears(ops: Ops, matrices: Sequence[tuple[Packed, ...]], rows: int) -> Host:
    x = _noise(rows, WIDTH)
    for (weight,) in matrices:
        ops.next_layer()
        y = ops.linear(x, weight, None)
    return y  # type: ignore[no-any-return]


def _mlps(ops: Ops, pairs: Sequence[tuple[Packed, ...]], rows: int) -> Host:
    x = _noise(rows, WIDTH)
    for gate_up, down in pairs:
        ops.next_layer()
        if ops.fuses_mlp(gate_up, down):
            y = ops.gated_mlp(x, gate_up, None, down, None, "silu")
        else:
            y = ops.linear(ops.gated_activation(ops.linear(x, gate_up, None), "silu"), down, None)
    return y  # type: ignore[no-any-return]


def call_seconds(ops: Ops) -> float:
    """Seconds of one op that has next to nothing to do, in a recording of many."""
    weight = ops.pack(Weight("bf16", np.zeros((32, 64), BF16)))
    x = np.zeros((1, 64), F32)
    run = ops.record(lambda: [ops.linear(x, weight, None) for _ in range(200)][-1]).run
    return timed_in_turns({"": run})[""] / 200


def norm_seconds(ops: Ops) -> dict[int, float]:
    """Seconds by rows: what the norms of a layer take for each number of the stream's width."""
    weight = np.ones(WIDTH, F32)

    def run(rows: int) -> Host:
        x, delta = np.zeros((rows, WIDTH), F32), np.zeros((rows, WIDTH), F32)
        for _ in range(2 * LAYERS):
            ops.next_layer()
            x, h = ops.add_rmsnorm(x, delta, weight, 1e-5)
        return h  # type: ignore[no-any-return]

    spent = timed_in_turns({rows: ops.record(partial(run, rows)).run for rows in ROWS})
    return {rows: spent[rows] / LAYERS / WIDTH for rows in ROWS}


def rope_seconds(ops: Ops) -> dict[int, float]:
    """Seconds by rows: what a layer's rope and writing of keys take for each number of queries, keys and values."""
    heads, kv_heads, d = HEADS[0]
    wide, table = (heads + 2 * kv_heads) * d, np.zeros((4096, 2, d // 2), F32)
    caches = [ops.allocate_cache(ops.layout(16, kv_heads, d, BF16), 64) for _ in range(LAYERS)]

    def run(rows: int) -> Host:
        at, qkv = np.arange(rows), np.zeros((rows, wide), F32)
        for cache in caches:
            ops.rope_and_cache(qkv, at.astype(I32), table, at, cache, None, 1e-5)
        return qkv

    spent = timed_in_turns({rows: ops.record(partial(run, rows)).run for rows in ROWS})
    return {rows: spent[rows] / LAYERS / wide for rows in ROWS}


def sample_seconds(ops: Ops) -> float:
    """Seconds of one logit of a row that a token is drawn from."""
    rows = 8
    logits, draws = _noise(rows, VOCABULARY), np.zeros(rows, DRAW)
    draws["row"] = np.arange(rows)
    return timed_in_turns({"": lambda: ops.sample(logits, draws)})[""] / rows / VOCABULARY


def attention_rates(ops: Ops, dtype: Dtype, seconds: float = SECONDS, far: int = FAR) -> AttentionRates:
    """Attention rates of keys and values in `dtype`: the non-negative least squares of what the cases took, each
    weighed alike.

    Each call reads other blocks of `far` bytes: between two steps a model's weights sweep keys out of every cache.
    """
    rows, spent = [], []
    for heads, kv_heads, d in HEADS:
        layout = ops.layout(BLOCK, kv_heads, d, dtype)
        most = max(_blocks(case) for case in ATTENDED)
        cache = ops.allocate_cache(layout, max(most, far // (BLOCK * layout.bytes_per_token)))
        for part in (cache.keys, cache.values):
            part[...] = 0
        calls = {case: min(MOST_CALLS, cache.keys.shape[0] // _blocks(case)) for case in ATTENDED}
        found = timed_in_turns({case: _attention(ops, cache, heads, case, calls[case]) for case in ATTENDED}, seconds)
        for case in ATTENDED:
            seqs, before, own = case
            keys, wide = seqs * (before + own), heads * d
            pairs = seqs * own * (2 * before + own + 1) / 2
            features = [1.0, 0.0, 0.0, 0.0, pairs * heads, pairs * wide, seqs * own * wide]
            if own == 1:
                features = [1.0, keys * layout.bytes_per_token, pairs * heads, pairs * wide, 0.0, 0.0, 0.0]
            rows.append(features)
            spent.append(found[case] / calls[case])
    return AttentionRates(*non_negative(np.array(rows), np.array(spent)))


def _blocks(case: tuple[int, int, int]) -> int:
    """Blocks of one call."""
    seqs, before, own = case
    return seqs * -(-(before + own) // BLOCK)


def _attention(ops: Ops, cache: KVCache, heads: int, case: tuple[int, int, int], calls: int) -> Callable[[], object]:
    """A recording of so many calls, each over blocks of its own."""
    seqs, before, own = case
    layout, each = cache.layout, _blocks(case)
    tables = [np.arange(i * each, (i + 1) * each, dtype=I32).reshape(seqs, -1) for i in range(calls)]
    qkv = _noise(seqs * own, (heads + 2 * layout.kv_heads) * layout.head_dim)
    ends = np.array([0, *accumulate([own] * seqs)], I32)
    context = np.full(seqs, before + own, I32)
    spec = AttentionSpec(layout.head_dim**-0.5, 0)

    def run() -> Host:
        for table in tables:
            ops.next_layer()
            y = ops.attention(qkv, cache, ends, context, table, spec, None)
        return y  # type: ignore[no-any-return]

    return ops.record(run).run


def recurrence_rates(ops: Ops, seconds: float = SECONDS, far: int = FAR) -> RecurrenceRates:
    """Rates of the gated delta rule, fitted as those of attention. Each call has other states of `far` bytes."""
    numbers = STATE_HEADS * STATE_DIM * STATE_DIM
    states = np.zeros((max(16, far // (4 * numbers)), STATE_HEADS, STATE_DIM, STATE_DIM), F32)
    calls = {case: min(MOST_CALLS, len(states) // case[0]) for case in STATE_CASES}
    spent = timed_in_turns({case: _recurrence(ops, states, case, calls[case]) for case in STATE_CASES}, seconds)
    features = [[1.0, seqs * numbers, seqs * rows * numbers] for seqs, rows in STATE_CASES]
    return RecurrenceRates(
        *non_negative(np.array(features), np.array([spent[case] / calls[case] for case in STATE_CASES]))
    )


def _recurrence(ops: Ops, states: Host, case: tuple[int, int], calls: int) -> Callable[[], object]:
    """A recording of so many calls, each with states of its own, which it reads and stores."""
    (seqs, rows), zeros = case, np.zeros(STATE_HEADS, F32)
    spec = DeltaSpec(STATE_HEADS, STATE_HEADS, STATE_DIM, STATE_DIM, zeros, zeros)
    qkv, gates = _noise(seqs * rows, spec.width), _noise(seqs * rows, 2 * STATE_HEADS)
    ends, counts = np.arange(0, seqs * rows + 1, rows, dtype=I32), np.array([[rows, 0]] * seqs, I32)
    slots = [np.arange(i * seqs, (i + 1) * seqs, dtype=I32) for i in range(calls)]
    moves = [StateBatch(ends, own, counts, np.stack((own, np.full(seqs, -1, I32)), 1)) for own in slots]

    def run() -> Host:
        for each in moves:
            ops.next_layer()
            _, y = ops.delta_rule(qkv, gates, None, states, each, spec)
        return y  # type: ignore[no-any-return]

    return ops.record(run).run


def non_negative(features: Any, seconds: Any) -> list[float]:
    """Coefficients >= 0 with the least squares of relative errors (the active set of Lawson and Hanson 1974, in short:
    the most negative one is left out until none is).
    """
    scaled, used = features / seconds[:, None], list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(scaled[:, used], np.ones(len(seconds)), rcond=None)
        if not len(found) or found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    made = np.zeros(features.shape[1])
    made[used] = found
    return [float(value) for value in made]
