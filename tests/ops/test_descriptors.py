"""Descriptors: the classes of Python are the structs of the native extension, and recordings keep them."""

from __future__ import annotations

import ctypes
import gc
import re

import numpy as np
import pytest

from quire.core.config import DeviceConfig
from quire.core.dtypes import F32
from quire.ops.attention_spec import AttentionSpec
from quire.ops.backend import Ops, open_backend
from quire.ops.cpu.matrix import CpuMatrix
from quire.ops.descriptors import AttentionDescriptor, Descriptor
from quire.ops.layout import KVCache, KVLayout
from quire.ops.native import Native, load_native

pytestmark = pytest.mark.skipif(load_native() is None, reason="quire._native was not built (no C++ compiler)")
MOST, MOST_OF_FEW = 10, 8
ARRAYS = 4
"""Pointers of an op that may have `MOST` arguments."""


def described() -> list[type[Descriptor]]:
    return [CpuMatrix, *(kind for kind in Descriptor.__subclasses__() if kind is not CpuMatrix)]


def test_the_fields_are_those_of_the_structs() -> None:
    """A field that is added, moved or resized on one side alone fails here."""
    text = np.zeros(1 << 16, np.uint8)
    Native().call("descriptor_fields", text, text.size)
    native = bytes(text).rstrip(b"\0").decode().splitlines()
    own = []
    for kind in described():
        for name, *_ in kind._fields_:
            at = getattr(kind, name)
            own.append(f"{kind.__name__.removeprefix('Cpu')} {name} {at.offset} {at.size} {ctypes.sizeof(kind)}")
    assert sorted(own) == sorted(native)


def test_ops_have_few_arguments() -> None:
    native = Native()
    for name, op in native.ids.items():
        with pytest.raises(ValueError, match=f"got {MOST + 1} arguments") as refused:
            native.module.call(op, (0,) * (MOST + 1))
        found = re.search(r"\((\w*)\)", str(refused.value))
        assert found is not None
        pointers = sum(letter in "po" for letter in found[1])
        assert len(found[1]) <= (MOST if pointers >= ARRAYS else MOST_OF_FEW), f"{name}({found[1]})"


def test_a_descriptor_is_passed_by_its_address() -> None:
    made = AttentionDescriptor(heads=2, scale=0.5)
    assert made.__index__() == made.at == ctypes.addressof(made)
    assert made == AttentionDescriptor(heads=2, scale=0.5) != AttentionDescriptor(heads=3, scale=0.5)


def attended(ops: Ops, cache: KVCache, rows: tuple[np.ndarray, ...], spec: AttentionSpec) -> np.ndarray:
    qkv = np.random.default_rng(1).standard_normal((1, 6 * 16), F32)
    found: np.ndarray = ops.attention(qkv, cache, *rows, spec)
    return found


def filled_cache(ops: Ops) -> KVCache:
    cache = ops.allocate_cache(KVLayout(16, 2, 16, F32), 2)
    for part in (cache.keys, cache.values):
        part[:] = np.random.default_rng(0).standard_normal(part.shape)
    return cache


def test_a_recording_keeps_what_its_calls_are_told() -> None:
    """The step's arrays and the layer's own are held by nobody else when it is replayed."""
    ops = open_backend(DeviceConfig(device="cpu"))
    cache, context = filled_cache(ops), np.array([3], np.int32)

    def step() -> np.ndarray:
        rows = np.array([0, 1], np.int32), context, np.array([[1, 0]], np.int32)
        return attended(ops, cache, rows, AttentionSpec(0.25, sinks=np.ones(2, F32)))

    recording = ops.record(step)
    first = recording.output.copy()
    for _ in range(8):
        ops.begin_step()
        gc.collect()
        np.full((64, 64), 7, np.int32)  # takes the memory of what was freed
        assert np.array_equal(recording.run(), first)
    context[0] = 20
    changed = recording.run().copy()
    ops.begin_step()
    assert not np.array_equal(changed, first) and np.array_equal(changed, step())


def test_each_thing_is_described_once() -> None:
    ops = open_backend(DeviceConfig(device="cpu"))
    cache, spec = filled_cache(ops), AttentionSpec(0.25)
    rows = np.array([0, 1], np.int32), np.array([3], np.int32), np.array([[1, 0]], np.int32)
    ops.begin_step()
    want = attended(ops, cache, rows, spec).copy()
    known = ops.cpu.caches[cache], ops.cpu.attention[spec][2], *ops.cpu.batches.values()
    assert np.array_equal(attended(ops, cache, rows, spec), want)
    assert known == (ops.cpu.caches[cache], ops.cpu.attention[spec][2], *ops.cpu.batches.values()) and len(known) == 3
    ops.begin_step()
    del cache, spec
    gc.collect()
    assert not ops.cpu.batches and not ops.cpu.caches and not ops.cpu.attention
