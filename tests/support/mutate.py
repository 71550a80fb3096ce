"""Damaged copies of files, all from one seed: what a disk, a broken download or an attacker would make of them."""

from __future__ import annotations

import copy
import json
import resource
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

NUMBERS = (0, 1, 2, 3, 7, 31, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 61, 1 << 62, (1 << 63) - 1,
           1 << 63, (1 << 64) - 1)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "x", "silu", "0", "\ud800", "x" * 1000, [], [0], [[]], [1] * 5000, {}, {"rope_type": "yarn"}, {"a": {"b": []}},
)  # fmt: skip
NEAR = (1, 2, 3, 4, 5, 8, 16, 31, 32, 48, 60, 64, 96, 99, 128, 65536)
MARGIN = 64 << 20
"""Bytes that reading one file may take beyond its size."""
SLOW = 5.0
"""Seconds for one file; on an idle machine it is some milliseconds."""


def damaged(raw: bytes, header: int, rng: np.random.Generator) -> bytes:
    """`raw` with one to four changes, most of them in its first `header` bytes."""
    out = bytearray(raw)
    for _ in range(int(rng.integers(1, 5))):
        if len(out) < 16:
            break
        at = int(rng.integers(0, min(header, len(out)) if rng.random() < 0.9 else len(out)))
        MUTATIONS[int(rng.integers(len(MUTATIONS)))](out, at, rng)
    return bytes(out)


def _bit(out: bytearray, at: int, rng: np.random.Generator) -> None:
    out[at] ^= 1 << int(rng.integers(8))


def _byte(out: bytearray, at: int, rng: np.random.Generator) -> None:
    out[at] = int(rng.integers(256))


def _word(out: bytearray, at: int, rng: np.random.Generator) -> None:
    number = NUMBERS[int(rng.integers(len(NUMBERS)))]
    form, width = ("<I", 32) if rng.random() < 0.5 else ("<Q", 64)
    at = min(at, len(out) - 8)
    struct.pack_into(form, out, at, number & ((1 << width) - 1))


def _nudge(out: bytearray, at: int, rng: np.random.Generator) -> None:
    at = min(at, len(out) - 8)
    (number,) = struct.unpack_from("<Q", out, at)
    struct.pack_into("<Q", out, at, (number + int(rng.integers(-33, 34))) % (1 << 64))


def _cut(out: bytearray, at: int, rng: np.random.Generator) -> None:
    del out[at : at + int(rng.integers(1, 40))]


def _truncate(out: bytearray, at: int, rng: np.random.Generator) -> None:
    del out[at:]


def _repeat(out: bytearray, at: int, rng: np.random.Generator) -> None:
    out[at:at] = out[at : at + int(rng.integers(1, 200))]


def _move(out: bytearray, at: int, rng: np.random.Generator) -> None:
    size = int(rng.integers(1, 60))
    start = int(rng.integers(len(out)))
    out[at : at + size] = out[start : start + size]


MUTATIONS: tuple[Callable[[bytearray, int, np.random.Generator], None], ...] = (
    _bit, _bit, _byte, _word, _word, _nudge, _cut, _truncate, _repeat, _move,
)  # fmt: skip


def damaged_json(value: Any, rng: np.random.Generator) -> str:
    """JSON text of `value` with one to three fields changed, removed, renamed or given twice, sometimes cut short."""
    root = copy.deepcopy(value)
    for _ in range(int(rng.integers(1, 4))):
        places = list(_places(root))
        if not places:
            break
        parent, key = places[int(rng.integers(len(places)))]
        old, luck = parent[key], rng.random()
        if luck < 0.4 and type(old) is int:
            parent[key] = NEAR[int(rng.integers(len(NEAR)))] if luck < 0.2 else old + int(rng.integers(-2, 3))
        elif luck < 0.75:
            parent[key] = copy.deepcopy(VALUES[int(rng.integers(len(VALUES)))])
        elif isinstance(parent, dict) and rng.random() < 0.5:
            parent[str(key) + "x"] = parent.pop(key)
        else:
            del parent[key]
    text = json.dumps(root)
    luck = rng.random()
    if luck < 0.05:
        return text[: int(rng.integers(len(text) + 1))]
    if luck < 0.1:
        return "[" * 100_000 + text
    if luck < 0.15 and isinstance(root, dict) and root:
        name = list(root)[int(rng.integers(len(root)))]
        return text[:-1] + f", {json.dumps(name)}: 3}}"
    return text


SAME_WIDTH = ("F32", "I32", "U32", "F16", "X1")
"""Types to take the place of F32: most have its width, so that sizes and places still agree."""


def changed_header(header: dict[str, Any], rng: np.random.Generator) -> str:
    """A safetensors header that is well-formed, with one or two tensors changed in a way that could be meant."""
    out = copy.deepcopy(header)
    for _ in range(int(rng.integers(1, 3))):
        names = [name for name in out if name != "__metadata__"]
        one, other = (names[int(rng.integers(len(names)))] for _ in range(2))
        info, luck = out[one], rng.random()
        shape = info["shape"]
        if luck < 0.1 and shape:
            i = int(rng.integers(len(shape)))
            shape[i] = max(0, shape[i] + int(rng.integers(-2, 3)))
        elif luck < 0.35:
            info["shape"] = shape[::-1] if rng.random() < 0.5 else [*shape, 1]
        elif luck < 0.5:
            info["dtype"] = SAME_WIDTH[int(rng.integers(len(SAME_WIDTH)))]
        elif luck < 0.6:
            info["data_offsets"] = [n + int(rng.integers(-4, 5)) for n in info["data_offsets"]]
        elif luck < 0.8:
            out[one], out[other] = out[other], info
        else:
            out[one.replace("weight", "bias") if rng.random() < 0.5 else one.replace("0", "1")] = out.pop(one)
    return json.dumps(out)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


@contextmanager
def bounded(size: int, what: str) -> Iterator[None]:
    """Fail when the block takes longer than `SLOW` or grows the process by more than `size` + `MARGIN` bytes."""
    before, started = _peak(), time.process_time()
    yield
    assert time.process_time() - started < SLOW, f"{what}: took {time.process_time() - started:.1f} s"
    assert _peak() - before <= size + MARGIN, f"{what}: took {(_peak() - before) >> 20} MiB for {size} bytes"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
