"""The Triton backend's side of the sampling ops: records to the device, where the results stay; nothing waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.ops.op import impl
from quire.ops.runtime import take_drawn
from quire.ops.sampling import SCORE, Found, Ints, Records, RowEdits
from quire.ops.triton import sampling_kernels as kernels
from quire.ops.triton.gpu import Gpu, as_bytes

BLOCK = 2048
"""Numbers of a row that a program takes at a time, 4 for each thread of 16 warps: more would not fit into registers."""
INTERPRETED_BLOCK = 8192
EDIT_BLOCK = 1024
HEAD = 14
"""Numbers of an edit before the lists of all."""


def _logits(logits: Tensor, what: str) -> int:
    """The vocabulary's size; `ValueError` when logits are not f32 rows without gaps."""
    if logits.dim() != 2 or logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise ValueError(f"{what} logits: need contiguous float32 rows, got {logits.dtype} {list(logits.shape)}")
    return logits.shape[1]


def _block(gpu: Gpu, vocab: int) -> dict[str, int]:
    """Numbers at a time for a vocabulary, and warps."""
    block = min(max(1 << (vocab - 1).bit_length(), 64), INTERPRETED_BLOCK if gpu.interpreted else BLOCK)
    return {"BLOCK": block, "num_warps": min(max(block // 128, 1), 16)}


@impl("sample", "triton")
def sample(gpu: Gpu, logits: Tensor, draws: Records) -> tuple[Tensor, Tensor]:
    vocab, n = _logits(logits, "sample"), len(draws)
    tokens, flags = gpu.empty(n, dtype=torch.int32), gpu.empty(n, dtype=torch.int32)
    if n:
        data = gpu.upload(as_bytes(draws))
        views = data.view(torch.int32), data.view(torch.int64), data.view(torch.float64)
        kernels.sample_kernel[n,](tokens, flags, logits, *views, vocab, **_block(gpu, vocab))
    return tokens, flags


@impl("top_logprobs", "triton")
def top_logprobs(
    gpu: Gpu, logits: Tensor, queries: Records, k: int, drawn: Found | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    vocab, n = _logits(logits, "top_logprobs"), len(queries)
    scores = torch.zeros(n * SCORE.itemsize, dtype=torch.uint8, device=gpu.device)
    ids, logprobs = gpu.empty(n, k, dtype=torch.int32), gpu.empty(n, k)
    if n:
        asked = gpu.upload(as_bytes(queries)).view(torch.int32)
        if drawn is not None:
            take_drawn(asked.view(n, 2)[:, 1], torch.as_tensor(drawn))
        views = scores.view(torch.float64), scores.view(torch.float32), scores.view(torch.int32)
        kernels.logprobs_kernel[n,](*views, ids, logprobs, logits, asked, vocab, k, **_block(gpu, vocab))
    return scores, ids, logprobs


@impl("penalize", "triton")
def penalize(gpu: Gpu, logits: Tensor, edits: Sequence[RowEdits]) -> None:
    vocab = _logits(logits, "penalize")
    if len({e.row for e in edits}) != len(edits):
        raise ValueError("penalize: two edits of one row")
    if not edits:
        return
    if any(e.mask is not None and len(e.mask) * 32 < vocab for e in edits):
        raise ValueError(f"penalize: a mask has too few words for {vocab} ids")
    data = gpu.upload(_packed(edits))
    saved = gpu.empty(sum(0 if e.allowed is None else len(e.allowed) for e in edits) + 1)
    numbers = data.view(torch.float32)
    kernels.penalize_kernel[len(edits),](logits, data, numbers, saved, vocab, HEAD, EDIT_BLOCK, num_warps=8)


def _packed(edits: Sequence[RowEdits]) -> Ints:
    """All edits as one array: 14 numbers each (see the kernel), then their lists; floats as their bits."""
    heads, used, spare = np.zeros((len(edits), HEAD), np.int32), HEAD * len(edits), 0
    lists: list[Ints] = []
    for head, e in zip(heads, edits, strict=True):
        head[0], head[9] = e.row, spare
        head[10:13] = np.array((e.repetition, e.frequency, e.presence), np.float32).view(np.int32)
        parts = [
            () if e.allowed is None else (e.allowed,),
            () if e.banned is None else (e.banned,),
            () if e.bias is None else (e.bias[0], e.bias[1].view(np.int32)),
            () if e.seen is None else e.seen,
        ]
        for i, part in enumerate(parts):
            head[1 + 2 * i], head[2 + 2 * i] = used, len(part[0]) if part else -1 if i == 0 else 0
            lists += part
            used += sum(len(p) for p in part)
        head[13] = -1 if e.mask is None else used
        if e.mask is not None:
            lists.append(e.mask)
            used += len(e.mask)
        spare += 0 if e.allowed is None else len(e.allowed)
    return np.concatenate((heads.ravel(), *lists))
