"""Facts of mixers: the cache planned from them is the one that is allocated; refusals name the row of the table."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import quire
from oracle import BACKENDS, backend
from quire.cache.groups import group_layers
from quire.core.cache_config import CacheConfig
from quire.core.config import EngineConfig
from quire.core.dtypes import BF16, F8, F16, F32, I8, Dtype
from quire.core.errors import ConfigError
from quire.core.exclusions.features import CONVOLUTIONS, ENCODER, LATENTS, STATES
from quire.model.build import Model
from quire.model.families.delta_sizes import DeltaSizes
from quire.model.families.rope import NO_ROPE
from quire.model.layer_sizes import Ngrams
from quire.model.load.layer_mixers import MIXERS
from quire.model.load.roles import ROLES
from quire.model.mixers import attention, channel_scan, cross, delta, latent, lightning, scan, shared_block, short_conv
from quire.model.mixers.attention import Attention
from quire.model.mixers.block_indexed import BlockIndexedAttention
from quire.model.mixers.channel_scan import ChannelScan
from quire.model.mixers.cross import EncoderDecoderAttention
from quire.model.mixers.delta import DeltaRule
from quire.model.mixers.entry_attention import EntryAttention
from quire.model.mixers.indexed import IndexedLatents
from quire.model.mixers.latent import Latents
from quire.model.mixers.layer_mixers import kept_by_layer, layouts_of
from quire.model.mixers.lightning import Lightning
from quire.model.mixers.mixer import LayerCacheSpec, Mixer
from quire.model.mixers.ngram_delta import NgramDeltaRule
from quire.model.mixers.no_mixer import NoMixer
from quire.model.mixers.pooled_indexed import PooledIndexedAttention
from quire.model.mixers.scan import SelectiveScan
from quire.model.mixers.shared_block import SharedBlock
from quire.model.mixers.short_conv import ShortConvolution
from quire.model.spec import MLA, ChannelSizes, ConvSizes, ModelSpec, ScanSizes
from quire.ops.arrays import to_numpy
from quire.ops.convolution import RowLayout
from quire.ops.entries import EntrySizes
from quire.ops.indexer import PooledIndexer
from quire.ops.latents import LatentLayout
from quire.ops.layout import CacheLayout, KVLayout
from quire.parallel.rank_place import ALONE
from quire.run.caches import Caches, kept_by
from quire.run.kv_budget import plan_kv, shape_kv

SHAPES: list[Mixer] = [
    Attention(8, 2, 64),
    Attention(4, 4, 16),
    EncoderDecoderAttention(4, 4, 16),
    Latents(4, 48, 0, 32, 16),
    Latents(8, 192, 64, 512, 64),
    IndexedLatents(8, 192, 64, 512, 64, index_heads=4, index_dim=128),
    BlockIndexedAttention(8, 2, 64, size=128, index_dim=32),
    ShortConvolution(64, 3),
    ShortConvolution(2048, 4),
    DeltaRule(DeltaSizes(2, 4, 16, 8, 4)),
    SelectiveScan(ScanSizes(4, 16, 2, 8, 4)),
    NoMixer(),
    SharedBlock(4, 4, 32, wide=128, inner=96),
    ChannelScan(ChannelSizes(64, 16, 4, 4)),
    Lightning(4, 16),
    PooledIndexedAttention(8, 2, 64, indexer=PooledIndexer(4, 32, 16, 64, (True,))),
    NgramDeltaRule(DeltaSizes(2, 4, 16, 8, 4), ngrams=Ngrams(0, 3, 2, 32, 4), streams=128),
    EntryAttention(8, 64, EntrySizes(64, 16, 2, 32, 16, (0,), (False,), 4, 32, 8)),
]
OWNERS = ("mixers/", "families/", "load/latent.py", "spec.py")
"""Files under model/ that may look at the sizes of latent attention."""


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mixer", SHAPES, ids=[f"{i} {type(mixer).__name__}" for i, mixer in enumerate(SHAPES)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16, I8, F8], ids=str)
def test_a_cache_takes_what_its_mixer_says(mixer: Mixer, dtype: Dtype, name: str) -> None:
    if dtype in (I8, F8) and not mixer.scaled:
        pytest.skip("it keeps no codes")
    ops = backend(name)
    kept = LayerCacheSpec(mixer.parts(16, dtype, ops.layout))
    caches = [ops.allocate_cache(layout, 3) for layout in kept.parts]
    taken = sum(to_numpy(part).nbytes for cache in caches for part in (cache.keys, cache.values))
    assert taken == 3 * 16 * kept.bytes_per_token == 3 * 16 * LayerCacheSpec(mixer.parts(1, dtype)).bytes_per_token


def test_formats_of_a_cache() -> None:
    heads, latents = SHAPES[0], SHAPES[3]
    assert [heads.kept_in(asked, BF16, "cpu") for asked in ("auto", "int8", "fp8")] == [BF16, I8, F8]
    assert [latents.kept_in("auto", dtype, "cpu") for dtype in (BF16, F32, F16)] == [BF16, F32, F32]
    assert latents.kept_in("auto", F16, "triton") == F16
    rows = SHAPES[7]
    assert [rows.kept_in("auto", dtype, "cpu") for dtype in (BF16, F32, F16)] == [BF16, F32, F16]
    assert [rows.kept_in("int8", dtype, "cpu") for dtype in (BF16, F32, F16)] == [BF16, F32, F32]
    for asked in ("int8", "fp8", "float16"):
        with pytest.raises(ConfigError, match="latents are kept in bf16 or f32"):
            latents.kept_in(asked, BF16, "cpu")


def test_what_a_mixer_allows() -> None:
    assert LATENTS in SHAPES[3].features and ENCODER in SHAPES[2].features and not SHAPES[0].features
    assert CONVOLUTIONS in SHAPES[7].features and STATES in SHAPES[9].features & SHAPES[10].features
    own = [isinstance(mixer, Attention) and not isinstance(mixer, SharedBlock) for mixer in SHAPES]
    assert [mixer.own_heads for mixer in SHAPES] == own
    assert set(MIXERS) == {type(mixer) for mixer in SHAPES}, "each kind can be loaded"


def test_only_its_own_files_look_at_the_sizes_of_latent_attention() -> None:
    root = Path(quire.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in root.rglob("*.py")
        if not str(path.relative_to(root / "model") if path.is_relative_to(root / "model") else path).startswith(OWNERS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "rank" and ast.unparse(node.value).endswith("mla")
    ]
    assert not found, found


def test_roles_of_mixers_are_those_of_a_checkpoint() -> None:
    files = (attention, cross, latent, short_conv, delta, scan, channel_scan, shared_block, lightning)
    kinds = [file.ROLES for file in files]
    names = [name for roles in kinds for name in roles]
    assert len(names) == len(set(names)) and set(names) < set(ROLES), "each is one kind's"
    assert all(ROLES[name] is roles[name] for roles in kinds for name in roles)


def test_a_windowed_model_beside_one_of_latents() -> None:
    spec = ModelSpec("", 2, 64, 4, 2, 16, 128, 100, 1e-6, "silu", (NO_ROPE,) * 2, (32, 0), 0.25, False, 256)
    small = replace(spec, mla=MLA(rank=32, rope=8, nope=8, value=16), windows=(0, 0))
    layouts = [layouts_of(each, "auto", BF16, "cpu", 16) for each in (small, spec)]
    parts = kept_by_layer([(small, layouts[0]), (spec, layouts[1])])
    assert [part.window for part in parts.values()] == [0, 0, 32, 0]
    groups = group_layers(parts, 256)
    assert groups.windows == (0, 32) and groups.layers == ((3, 0, 1), (2,)), "latents lie in blocks beside heads"
    assert groups.sizes == ((128, 80, 80), (128,))


def test_rows_of_convolutions_share_blocks_with_keys_and_values() -> None:
    """LFM2-1.2B: six layers attend over 8 heads of 64, ten convolve 2,048 channels; a block holds as much of both."""
    spec = ModelSpec(
        "", 16, 2048, 32, 8, 64, 8192, 100, 1e-5, "silu", (NO_ROPE,) * 16,
        tuple(0 if i in (2, 5, 8, 10, 12, 14) else 3 for i in range(16)), 0.125, True, 128000,
        mixers=tuple("attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)), conv=ConvSizes(2048, 3),
    )  # fmt: skip
    kept = kept_by_layer([(spec, layouts_of(spec, "auto", BF16, "cpu", 16))])
    groups = group_layers(kept, 32768)
    assert groups.windows.count(0) == 1 and set(groups.windows) == {0, 3}
    assert {layer for held in groups.layers for layer in held} == set(range(16))
    assert groups.width == 6 * 2048, "six layers of keys and values, or three of rows"


def test_rows_of_convolutions_share_blocks_with_latents() -> None:
    """Kimi-Linear-48B-A3B: seven layers keep latents of 512 and 64 numbers, twenty rows of 12,288 numbers."""
    attend = (3, 7, 11, 15, 19, 23, 26)
    spec = ModelSpec(
        "", 27, 2304, 32, 32, 192, 9216, 100, 1e-5, "silu", (NO_ROPE,) * 27,
        tuple(0 if i in attend else 4 for i in range(27)), 0.125, False, 1 << 20,
        mixers=tuple("attention" if i in attend else "delta" for i in range(27)),
        mla=MLA(rank=512, rope=64, nope=128, value=128), delta=DeltaSizes(32, 32, 128, 128, 4, 128, True, True),
    )  # fmt: skip
    kept = kept_by_layer([(spec, layouts_of(spec, "auto", BF16, "cpu", 16))])
    groups = group_layers(kept, 1 << 20)
    assert groups.windows == (0, *(4,) * 7) and set(groups.layers[0]) == set(attend)
    assert sum(part.bytes_per_token for part in kept.values() if part.window) == 480 << 10
    assert groups.filled[0] == 8064 and groups.width == 72 << 10, "a block has room for three layers of rows"
    plan = shape_kv(EngineConfig(cache=CacheConfig(block_size=16)), kept, 1 << 20)
    assert plan.bytes_held(1 << 20) == 16 * (72 << 10) * ((1 << 16) + 7)
    assert 6 * plan.bytes_held(1 << 20) < (488 << 10 << 20), "what all tokens in one group take"


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_that_keep_as_many_bytes_in_unlike_ways_share_blocks(name: str) -> None:
    """Latents, keys and values, and rows, of 128 bytes each: a place of a block is one's, then another's."""
    ops, size = backend(name), 16
    spec = ModelSpec("", 3, 64, 4, 2, 16, 128, 100, 1e-6, "silu", (NO_ROPE,) * 3, (0, 32, 8), 0.25, False, 256)
    layouts: tuple[CacheLayout, ...] = (
        (LatentLayout(size, 1, 16, BF16, rank=48),), (ops.layout(size, 2, 16, BF16),), (RowLayout.of(size, 64, BF16),)
    )  # fmt: skip
    model = cast(Model, SimpleNamespace(spec=spec, layouts=layouts, own=range(3), own_states=(None,) * 3, place=ALONE))
    config = EngineConfig(cache=CacheConfig(block_size=size, num_blocks=20))
    kv = plan_kv(config, shape_kv(config, kept_by((model,)), 256))
    assert kv.groups.layers == ((0,), (2,), (1,)) and kv.block_bytes == size * 128
    caches = Caches((model,), ops, kv)
    assert [cache[0].layout for cache in caches.of_layer] == [layout for (layout,) in layouts]
    numbers = [to_numpy(side) for (cache,) in caches.of_layer for side in (cache.keys, cache.values)]
    for number, side in enumerate(numbers, start=1):
        side[caches.group_of[(number - 1) // 2]] = number
    caches.copy(((0, 5), (1, 6), (2, 7)))
    caches.zero((0, 1))
    for number, side in enumerate(numbers, start=1):
        group = caches.group_of[(number - 1) // 2]
        assert (side[5 + group].astype(F32) == number).all() and (side[group].astype(bool).all() == (group == 2))


@pytest.mark.parametrize("windows", [(0, 0, 0, 0), (32, 32, 0, 0)], ids=["one table", "two tables"])
def test_a_layer_keeps_several_parts_or_none(windows: tuple[int, ...]) -> None:
    """Each part has bytes of its own in a block, and goes where the block goes."""
    spec = ModelSpec("", 4, 64, 4, 2, 16, 128, 100, 1e-6, "silu", (NO_ROPE,) * 4, windows, 0.25, False, 256)
    two = (KVLayout(16, 2, 16, BF16), KVLayout(16, 1, 32, F32))
    layouts: tuple[CacheLayout, ...] = (two, two, two, ())
    model = cast(Model, SimpleNamespace(spec=spec, layouts=layouts, own=range(4), own_states=(None,) * 4, place=ALONE))
    ops, config = backend("cpu"), EngineConfig(cache=CacheConfig(block_size=16, num_blocks=20))
    kv = plan_kv(config, shape_kv(config, kept_by((model,)), 256))
    assert kv.block_bytes == len(kv.groups.widest) * 16 * sum(part.bytes_per_token for part in two)
    caches = Caches((model,), ops, kv)
    assert [[part.layout for part in cache] for cache in caches.of_layer] == [list(two), list(two), list(two), []]

    def written(block: int) -> list[Any]:
        homes = zip(caches.of_layer, caches.group_of, strict=True)
        return [to_numpy(side)[block + group] for cache, group in homes for part in cache
                for side in (part.keys, part.values)]  # fmt: skip

    for number, numbers in enumerate(written(1), start=1):
        numbers[:] = number
    assert [float(numbers.flat[0]) for numbers in written(1)] == list(range(1, 13)), "no part lies in another"
    caches.copy(((1, 5), (2, 6), (3, 7)))
    assert [float(numbers.flat[-1]) for numbers in written(5)] == list(range(1, 13))
    caches.zero((1, 2, 3))
    assert not any(numbers.any() for numbers in written(1)) and all(numbers.all() for numbers in written(5))
