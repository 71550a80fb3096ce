"""The CPU backend's side of the sampling ops (csrc/sample.cpp): arrays to addresses."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.dtypes import F32
from quire.ops.arrays import Host
from quire.ops.cpu.state import Cpu
from quire.ops.native import check
from quire.ops.op import impl
from quire.ops.sampling import DRAW, QUERY, SCORE, Floats, Found, Ints, Records, RowEdits, with_drawn

_EDIT = struct.Struct("=11q3dq")


def _address(array: NDArray[Any], dtype: Any) -> int:
    """Where `array` [n] lies; it must be contiguous and of that dtype."""
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"need a contiguous {np.dtype(dtype)} array, got {array.dtype} {array.shape}")
    return int(array.__array_interface__["data"][0])


def _pair(pair: tuple[NDArray[Any], NDArray[Any]] | None, dtype: Any) -> tuple[int, int, int]:
    """Addresses and length of ids and their values."""
    if pair is None:
        return 0, 0, 0
    ids, values = pair
    if len(ids) != len(values):
        raise ValueError(f"{len(ids)} ids with {len(values)} values")
    return _address(ids, np.int32), _address(values, dtype), len(ids)


def _words(mask: Ints | None, vocab: int) -> int:
    """The address of a mask, 0 for none."""
    if mask is not None and len(mask) * 32 < vocab:
        raise ValueError(f"penalize: a mask of {len(mask)} words for {vocab} ids")
    return 0 if mask is None else _address(mask, np.int32)


def _ids(ids: Ints | None) -> tuple[int, int]:
    return (0, 0) if ids is None else (_address(ids, np.int32), len(ids))


@impl("penalize", "cpu")
def penalize(cpu: Cpu, logits: Host, edits: Sequence[RowEdits]) -> None:
    rows, vocab = check(logits, "penalize logits", F32, -1, -1).shape
    packed = bytearray(_EDIT.size * len(edits))
    seen_rows = {e.row for e in edits}
    if len(seen_rows) != len(edits):
        raise ValueError("penalize: two edits of one row")
    for i, e in enumerate(edits):
        _EDIT.pack_into(
            packed, i * _EDIT.size, e.row, *_ids(e.allowed), *_ids(e.banned), *_pair(e.bias, np.float32),
            *_pair(e.seen, np.int32), e.repetition, e.frequency, e.presence, _words(e.mask, vocab),
        )  # fmt: skip
    if edits:
        records = np.frombuffer(packed, np.uint8)
        cpu.call("penalize", logits, rows, vocab, _address(records, np.uint8), len(edits))


@impl("sample", "cpu")
def sample(cpu: Cpu, logits: Host, draws: Records) -> tuple[Ints, Ints]:
    rows, vocab = check(logits, "sample logits", F32, -1, -1).shape
    count = len(check(draws, "sample draws", DRAW, -1))
    tokens, flags = np.empty(count, np.int32), np.empty(count, np.int32)
    if count:
        cpu.call("sample", logits, rows, vocab, draws, count, tokens, flags)
    return tokens, flags


@impl("top_logprobs", "cpu")
def top_logprobs(
    cpu: Cpu, logits: Host, queries: Records, k: int, drawn: Found | None = None
) -> tuple[Records, Ints, Floats]:
    queries = with_drawn(queries, drawn)
    rows, vocab = check(logits, "top_logprobs logits", F32, -1, -1).shape
    count = len(queries)
    scores = np.empty(count, SCORE)
    ids, logprobs = np.empty(count * k, np.int32), np.empty(count * k, np.float32)
    if count:
        cpu.call(
            "top_logprobs", logits, rows, vocab, _address(queries, QUERY), count, k, _address(scores, SCORE),
            _address(ids, np.int32), _address(logprobs, np.float32),
        )  # fmt: skip
    return scores, ids.reshape(count, k), logprobs.reshape(count, k)
