"""Sequences that name the same blocks: attention reads these once, and no bit of any row tells."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from op_cases import reference as cases
from over_torch import select
from quire.core.config import DeviceConfig, flat_config
from quire.core.dtypes import BF16, F32, I8, Dtype
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.windows import first_seen
from quire.engine.local import LocalEngine
from quire.ops.backend import Ops
from quire.ops.layout import KV_FORMATS, KVCache, KVLayout
from quire.ops.native import load_native
from quire.ops.op import Case
from quire.ops.reference.caches import allocate, write
from turns import reports

native = load_native()
pytestmark = pytest.mark.skipif(native is None, reason="quire._native was not built (no C++ compiler)")
UNITS_HERE: list[str] = native.units() if native else []
TILE = 64


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if native is not None:
        native.set_threads(2)  # so few of them that pieces may be large
    yield
    torch.set_num_threads(threads)


@functools.cache
def ops_of(isa: str) -> Ops:
    return select(DeviceConfig(device="cpu", isa=isa, threads=2))


Branch = tuple[int, "int | None", int]
"""A sequence: its context, the one it is a fork of, and the tokens that it has of that one (up to a whole block)."""


def forks(layout: KVLayout, heads: int, branches: Sequence[Branch], window: int = 0, extras: str = "") -> Case:
    """One row per sequence, by `branches`. A block that is not whole is copied, as a write to a shared block does;
    entries that no row sees are -1, and slots that were never written are NaN."""
    g, size = torch.Generator().manual_seed(7), layout.block_size
    entries = max(-(-context // size) for context, _, _ in branches) + 1
    free = torch.randperm(len(branches) * entries, generator=g).tolist()
    cache, tables = allocate(layout, len(free)), torch.full((len(branches), entries), -1, dtype=torch.int32)
    cache.keys.view(torch.uint8).fill_(255)
    cache.values.view(torch.uint8).fill_(255)
    for s, (context, parent, upto) in enumerate(branches):
        whole = upto // size
        if parent is not None:
            tables[s, :whole] = tables[parent, :whole]
        for i in range(whole, -(-context // size)):
            tables[s, i] = free.pop()
        if parent is not None and upto % size:
            cache.keys[tables[s, whole]] = cache.keys[tables[parent, whole]]
            cache.values[tables[s, whole]] = cache.values[tables[parent, whole]]
        at = torch.arange(upto, context)
        slots = tables[s, at // size].long() * size + at % size
        write(cache, slots, *(cases.normal(g, len(at), layout.kv_heads, layout.head_dim) for _ in range(2)))
    for s, (context, _, _) in enumerate(branches):
        tables[s, : first_seen(window, context - 1) // size] = -1
    n = len(branches)
    return {
        "qkv": cases.normal(g, n, (heads + 2 * layout.kv_heads) * layout.head_dim),
        "cache": cache,
        "cu_q": torch.arange(n + 1, dtype=torch.int32),
        "context": torch.tensor([context for context, _, _ in branches], dtype=torch.int32),
        "block_tables": tables,
        "spec": cases.attention_spec(g, heads, layout.head_dim**-0.5, window, extras),
    }


def alone(case: Case, s: int) -> Case:
    """The row of sequence `s` as a batch of its own."""
    return case | {
        "qkv": case["qkv"][s : s + 1].contiguous(),
        "cu_q": torch.tensor([0, 1], dtype=torch.int32),
        "context": case["context"][s : s + 1].contiguous(),
        "block_tables": case["block_tables"][s : s + 1].contiguous(),
    }


def attend(ops: Ops, case: Case) -> tuple[Tensor, int]:
    """The op's result, and the tiles that it read."""
    assert native is not None
    ops.begin_step()
    before = native.tiles_read()
    return ops.attention(**case).clone(), native.tiles_read() - before


def check(ops: Ops, case: Case, least: float) -> None:
    """Every row has the bits it has alone, and together they read at least `least` times fewer tiles."""
    found, read = attend(ops, case)
    apart = 0
    for s in range(len(found)):
        expected, tiles = attend(ops, alone(case, s))
        assert bool(expected.isfinite().all())
        assert torch.equal(found[s : s + 1], expected), f"sequence {s}"
        apart += tiles
    assert read * least <= apart, f"{read} tiles instead of {apart}"


FOUR: tuple[Branch, ...] = ((700, None, 0), (650, 0, 600), (601, 0, 600), (900, 0, 600))
THREE_GROUPS: tuple[Branch, ...] = (
    (900, None, 0), (300, None, 0), (1300, None, 0), (905, 0, 890), (333, 1, 290), (1310, 2, 1299), (1000, 0, 512),
    (1400, 5, 1305), (40, None, 0), (777, None, 0), (1301, 2, 700), (290, 1, 200), (1303, 5, 1302), (1, None, 0),
)  # fmt: skip


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("dtype", KV_FORMATS)
@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
def test_every_kind_of_cache(block_size: int, dtype: Dtype, isa: str) -> None:
    layout = KVLayout(block_size, 2, 40 if block_size == 4 else 64, dtype)
    check(ops_of(isa), forks(layout, 6, FOUR), 2)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize(
    ("window", "extras"), [(0, "softcap sinks alibi bias"), (150, ""), (600, "softcap alibi"), (-700, "")]
)
@pytest.mark.parametrize("dtype", [BF16, F32, I8])
def test_windows_and_everything_that_scores_may_have(dtype: Dtype, window: int, extras: str, isa: str) -> None:
    branches = ((700, None, 0), (690, 0, 680), (640, 0, 630), (695, 0, 680), (1200, 0, 680), (685, 0, 680))
    check(ops_of(isa), forks(KVLayout(16, 2, 32, dtype), 4, branches, window, extras), 2 if window != 150 else 1.2)


@pytest.mark.parametrize("isa", UNITS_HERE)
@pytest.mark.parametrize("window", [0, 400, -1100])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_groups_of_sharers_and_forks_of_forks(dtype: Dtype, window: int, isa: str) -> None:
    for block_size in (1, 16):
        check(ops_of(isa), forks(KVLayout(block_size, 2, 32, dtype), 4, THREE_GROUPS, window), 1.3)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (5, 1), (32, 1), (40, 1)])
def test_heads(heads: int, kv_heads: int) -> None:
    """From MHA to more heads than a pass has room for twice; a single one of keys leaves pieces for pairs only."""
    case = forks(KVLayout(16, kv_heads, 64, BF16), heads, FOUR)
    check(ops_of("auto"), case, 1 if heads == 40 else 1.5 if kv_heads == 1 else 2)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_any_number_of_threads(threads: int) -> None:
    assert native is not None
    case = forks(KVLayout(16, 2, 64, BF16), 4, THREE_GROUPS)
    expected = attend(ops_of("auto"), case)[0]
    native.set_threads(threads)
    found = attend(ops_of("auto"), case)[0]
    native.set_threads(2)
    assert torch.equal(found, expected)


def test_beside_chunks_drafts_and_empty_sequences() -> None:
    """Sharers next to a prompt's chunk of the same blocks, a branching draft, and a sequence without rows."""
    layout = KVLayout(16, 2, 64, BF16)
    case = forks(layout, 4, ((700, None, 0), (650, 0, 600), (720, 0, 600), (660, 0, 600), (640, 0, 600), (690, 0, 600)))
    counts = torch.tensor([0, 1, 1, 100, 3, 0, 2])
    cu_q = counts.cumsum(0).int()
    qkv = cases.normal(torch.Generator().manual_seed(3), int(cu_q[-1]), (4 + 2 * 2) * 64)
    tree = torch.zeros(len(qkv), dtype=torch.int64)
    tree[int(cu_q[3]) + 1 : int(cu_q[3]) + 3] = torch.tensor([1, 2])
    case |= {"cu_q": cu_q, "qkv": qkv, "tree": tree}
    found, read = attend(ops_of("auto"), case)
    apart = 0
    for s in range(len(counts) - 1):
        begin, end = int(cu_q[s]), int(cu_q[s + 1])
        if begin == end:
            continue
        own = alone(case, s) | {
            "qkv": qkv[begin:end].contiguous(),
            "cu_q": torch.tensor([0, end - begin], dtype=torch.int32),
            "tree": tree[begin:end].contiguous(),
        }
        expected, tiles = attend(ops_of("auto"), own)
        assert torch.equal(found[begin:end], expected), s
        apart += tiles
    assert read < apart - 2 * 2 * (600 // TILE - 1), "three of them share nine tiles of two heads"


def test_sixteen_sequences_read_what_they_share_once() -> None:
    branches = ((4160, None, 0), *((4100 + i, 0, 4096) for i in range(15)))
    _, read = attend(ops_of("auto"), forks(KVLayout(16, 2, 16, BF16), 8, branches))
    assert read == 2 * (4096 // TILE + 16)


def test_equal_numbers_in_blocks_of_their_own_are_not_shared() -> None:
    """Only addresses say what is the same; the bits do not depend on them."""
    case = forks(KVLayout(16, 2, 32, BF16), 4, FOUR)
    tables, cache = case["block_tables"], case["cache"]
    used = tables[tables >= 0].long()
    keys, values = (torch.cat([t[used], t[:1]]) for t in (cache.keys, cache.values))
    own = torch.full_like(tables, -1)
    own[tables >= 0] = torch.arange(len(used), dtype=torch.int32)
    apart = case | {"cache": KVCache(cache.layout, keys, values), "block_tables": own}
    (found, read), (expected, all_tiles) = attend(ops_of("auto"), case), attend(ops_of("auto"), apart)
    assert torch.equal(found, expected)
    assert read < all_tiles == 2 * sum(-(-context // TILE) for context, _, _ in FOUR)


def generate(prompts: list[tuple[int, ...]], n: int, **options: object) -> tuple[dict[str, object], int]:
    """Tokens and log-probabilities by (request, choice), and the tiles that attention read; the first goes ahead."""
    assert native is not None
    engine = LocalEngine(flat_config(device="cpu", num_blocks=512, threads=2, **options))
    before = native.tiles_read()
    found: dict[str, list[object]] = {}
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=24, n=n, temperature=1.0, logprobs=2, ignore_eos=True)
        engine.submit(Request(id=f"r{i}", prompt=prompt, params=params, seed=i, arrival=0.0))
        for report in reports(engine) if i in (0, len(prompts) - 1) else ():
            for out in report.outputs:
                found.setdefault(f"{out.request_id}/{out.index}", []).extend(zip(out.tokens, out.logprobs, strict=True))
    return dict(found), native.tiles_read() - before


STEM = tuple(5 + i * 7 % 200 for i in range(150))


@pytest.mark.parametrize("block_size", [1, 16])
def test_choices_of_a_prompt_through_the_engine(block_size: int) -> None:
    """n > 1: all choices share the prompt's blocks, and give the same bits when each step has room for one alone."""
    together, read = generate([STEM], 6, block_size=block_size)
    apart, more = generate([STEM], 6, block_size=block_size, max_num_seqs=1)
    assert together == apart
    assert len(together) == 6
    assert read < 0.7 * more


def test_prefix_hits_through_the_engine() -> None:
    prompts = [(*STEM, i, i + 1, i + 2) for i in range(6)]
    together, read = generate(prompts, 1)
    assert together == generate(prompts, 1, max_num_seqs=1)[0]
    unshared, more = generate(prompts, 1, enable_prefix_caching=False)
    assert together == unshared
    assert read < 0.7 * more
