"""What the CPU backend's ops share: the native unit, and the arena of their outputs.

The arena is one buffer, bumped, and reset when the next step begins.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from quire.core.dtypes import F32, Dtype
from quire.ops.arrays import Host
from quire.ops.attention_spec import AttentionSpec
from quire.ops.convolution import Convolution
from quire.ops.descriptors import (
    AttentionDescriptor,
    BatchDescriptor,
    CacheDescriptor,
    ConvolutionDescriptor,
    DeltaDescriptor,
    ExpertsDescriptor,
    LatentCacheDescriptor,
    PoolDescriptor,
    ScanDescriptor,
    StateBatchDescriptor,
)
from quire.ops.entries import Pool
from quire.ops.experts import Grouped
from quire.ops.facts import dtype_numbers_of, numbers_of
from quire.ops.layout import KVCache
from quire.ops.native import ALIGN, HUGE, Native, huge_bytes
from quire.ops.recurrent import DeltaSpec, ScanSpec, StateBatch

ACTIVATION_NUMBERS = numbers_of("activation")
SCORE_NUMBERS = numbers_of("score")
TABLE_NUMBERS = dtype_numbers_of("table")
"""What ops call activations, scores of experts, and the dtypes of tables of embeddings and positions."""
MAX_VIEWS = 4096
MOST_BATCHES = 64
"""Batches that are known at a time: a step has one for each group of layers with blocks of their own."""


class Arena:
    """Memory of a step's outputs: the same `empty` and `next_layer` calls after `begin` give the same addresses, as
    recordings require.

    Three areas: one for what lives until `begin`, and two that the layers take in turn, so that a step needs the memory
    of two layers instead of all (a prefill of 512 tokens of a 1 B model: 140 MB instead of 1.1 GB, every page of which
    had to be faulted in by the first one). When a step outgrows an area a larger one takes over; tensors and recordings
    keep what they use of the old one.
    """

    def __init__(self, size: int = HUGE) -> None:
        self._areas = [huge_bytes(size) for _ in range(3)]
        self._views: dict[tuple[int, int, int, int, Dtype], Host] = {}
        self._now = 0
        self._used = [0, 0, 0]
        self.buffers: list[Host] = [*self._areas]

    def reserve(self, outer: int, layer: int) -> None:
        """Make room before the first step for `outer` bytes of what lives until `begin`, and `layer` of a layer's.

        An area that grows while a step runs begins anew in a larger one, and what was recorded keeps the one before:
        llama-1b in int4 kept 46 MB so.
        """
        for i, size in enumerate((outer, layer, layer)):
            if size > self._areas[i].size:
                self._areas[i] = huge_bytes(-(-size // HUGE) * HUGE)
        self._views.clear()
        self.begin()

    def begin(self) -> None:
        """Forget everything handed out: the memory is reused from here on."""
        self._now, self._used = 0, [0, 0, 0]
        self.buffers = [*self._areas]

    def next_layer(self) -> None:
        """What was handed out before the last `next_layer` is forgotten, save for what came before the first."""
        self._now = 2 if self._now == 1 else 1
        self._used[self._now] = 0

    def mark(self) -> tuple[int, tuple[int, ...]]:
        """How far the step is, for `resume`."""
        return self._now, tuple(self._used)

    def resume(self, mark: tuple[int, tuple[int, ...]]) -> None:
        """Go on from a mark of a recording: what it handed out is in use."""
        self._now, used = mark
        self._used = list(map(max, self._used, used))

    def empty(self, rows: int, cols: int, dtype: Dtype = F32) -> Host:
        """An uninitialized [rows, cols] array, valid until `begin`, or for this layer and the next."""
        if rows < 0 or cols < 0:
            raise ValueError(f"there is no array of {rows} rows and {cols} columns")
        now, size = self._now, rows * cols * dtype.itemsize
        if self._used[now] + size > self._areas[now].size:
            self._grow(size)
        used = self._used[now]
        key = (now, used, rows, cols, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._areas[now][used : used + size].view(dtype).reshape(rows, cols)
            self._views[key] = view
        self._used[now] += -(-size // ALIGN) * ALIGN
        return view

    def _grow(self, size: int) -> None:
        needed = 2 * self._areas[self._now].size + size
        area = self._areas[self._now] = huge_bytes(-(-needed // HUGE) * HUGE)
        self._views.clear()
        self.buffers.append(area)
        self._used[self._now] = 0


class Cpu:
    """What the implementations below share: the native unit, the arena of outputs, and the descriptors that are known.

    `bf16_bits` 12: bf16 matrices may be packed in 12 bits, without loss. `sparse`: which matrices lose their zeros, as
    `--sparse` says. The module `described` makes the descriptors. `attention`: by the heads of queries, too; `batches`:
    by the ids of the arrays that they keep.
    """

    def __init__(self, native: Native, bf16_bits: int = 16, sparse: str = "auto") -> None:
        self.native = native
        self.bf16_bits, self.sparse = bf16_bits, sparse
        self.call = native.call
        self.arena = Arena()
        self._lasting = huge_bytes(0)
        self.caches: WeakKeyDictionary[KVCache, CacheDescriptor] = WeakKeyDictionary()
        self.latent_caches: WeakKeyDictionary[KVCache, LatentCacheDescriptor] = WeakKeyDictionary()
        self.pools: WeakKeyDictionary[Pool, PoolDescriptor] = WeakKeyDictionary()
        self.convolutions: WeakKeyDictionary[Convolution, ConvolutionDescriptor] = WeakKeyDictionary()
        self.attention: WeakKeyDictionary[AttentionSpec, dict[int, AttentionDescriptor]] = WeakKeyDictionary()
        self.experts: WeakKeyDictionary[Grouped, ExpertsDescriptor] = WeakKeyDictionary()
        self.batches: dict[tuple[int, ...], BatchDescriptor] = {}
        self.state_batches: WeakKeyDictionary[StateBatch, StateBatchDescriptor] = WeakKeyDictionary()
        self.delta_rules: WeakKeyDictionary[DeltaSpec, DeltaDescriptor] = WeakKeyDictionary()
        self.scans: WeakKeyDictionary[ScanSpec, ScanDescriptor] = WeakKeyDictionary()

    def lasting(self, rows: int, cols: int, dtype: Dtype) -> Host:
        """An uninitialized [rows, cols] array beside the arena, whatever layer comes next: the same memory each time,
        for the one op whose result layers share."""
        size = rows * cols * dtype.itemsize
        if size > self._lasting.size:
            self._lasting = huge_bytes(size)
        return self._lasting[:size].view(dtype).reshape(rows, cols)

    def begin_step(self) -> None:
        """Forget what was handed out to the last step."""
        self.arena.begin()
        self.batches.clear()
