"""What the first request would otherwise wait for: memory touched, graphs captured, kernels compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.ops.backend import Ops
from quire.ops.layout import KVCache
from quire.ops.sampling import DRAW, QUERY, RowEdits
from quire.run.caches import Caches
from quire.run.step import Step


def warm_up(step: Step, trees: bool = False) -> None:
    """Before the first request. On a GPU every kernel is run: Triton compiles a kernel when it is first called.

    `trees`: drafts will branch.
    """
    step.warm_up(trees)
    if step.ops.compiles:
        warm_device(step, trees)


def warm_device(step: Step, trees: bool = False) -> None:
    """Steps of all sizes that choose other tiles, of one sequence and of many; then what runs beside the decoder.

    Tiles change at powers of two, and a number that 16 does not divide is another kernel than one it divides. All of it
    happens in the block that pads.
    """
    most = len(step.arrays.tokens)
    for seqs in (1, 0):
        for tokens in sorted({*(1 << i for i in range(most.bit_length())), most - 1, most} - {0}):
            step.profile(tokens, seqs)
    warm_beside(step.ops, step.caches.own, step.caches.pad_block, step.model.spec.vocab_size)
    if trees:
        slot = step.caches.pad_block * step.caches.block_size
        Caches.move(step.caches, tuple((slot, slot, table) for table in sorted({*step.caches.group_of})))


def warm_beside(ops: Ops, caches: Sequence[KVCache], block: int, vocabulary: int) -> None:
    """Copy and zero `block`, and sample made-up logits in each way there is."""
    ops.copy_blocks(caches, ((block, block),))
    ops.zero_blocks(caches, (block,))
    logits = ops.zeros((1, vocabulary))
    ops.penalize(logits, [RowEdits(0, banned=np.zeros(1, np.int32))])
    drawn, _ = ops.sample(logits, np.zeros(1, DRAW))
    ops.fetch(ops.top_logprobs(logits, np.array([(0, -1)], QUERY), 1, drawn))()
