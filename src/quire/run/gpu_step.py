"""Steps on a GPU: small ones are padded to one of few sizes, each a graph that is captured at the start.
See docs/design/gpu.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from quire.core.config import SchedulerConfig
from quire.model.build import Model
from quire.model.net.hidden_taps import Taps
from quire.model.net.lora import NONE
from quire.ops.arrays import Array
from quire.ops.backend import Ops, Recording
from quire.ops.layout import KVCache
from quire.ops.sampling import DRAW, QUERY, RowEdits
from quire.run.builder import StepSizes
from quire.run.caches import Caches
from quire.run.device_arrays import DeviceArrays
from quire.run.kv_budget import KVPlan
from quire.run.step import LocalStep
from quire.run.step_sizes import Sizes, fitting, graph_sizes


class GpuStep(LocalStep):
    """Rows that pad are sequences of one token in a block of their own behind the cache's: they compute like others
    and nothing reads them. `recorded`: graphs by (rows, sequences, whether drafts branch).
    """

    records = False
    recorded: dict[tuple[int, int, bool], Recording]

    def __init__(
        self,
        model: Model,
        ops: Ops,
        kv: KVPlan,
        limits: SchedulerConfig,
        caches: Caches,
        record_steps: bool,
        taps: Taps | None = None,
    ) -> None:
        if record_steps and model.decoder.recordable:
            self.graph_sizes = graph_sizes(limits.max_num_batched_tokens, limits.max_num_seqs)
        super().__init__(model, ops, kv, limits, caches, record_steps, taps)
        self._logits: Any = None

    def _made_arrays(self, sizes: Sizes, own: Mapping[str, Tensor]) -> DeviceArrays:
        return DeviceArrays(sizes, self.ops, own)

    def _replayed(self, shape: StepSizes) -> Array | None:
        tokens, seqs, logits, blocks, tree, _ = shape
        size, _ = fitting(self.graph_sizes, tokens, seqs, logits, exact=False)
        if not size:
            return None
        self._pad(tokens, seqs, logits, size)
        self.arrays.send(size, blocks)
        return self._replay(size, tree)[:logits]

    def _replay(self, size: int, tree: bool) -> Array:
        """Logits of the step of `size` rows whose arrays were sent: replayed, or recorded the first time."""
        found = self.recorded.get((size, size, tree))
        if found is not None:
            return found.run()
        batches, target = self.arrays.batches(size, size, size, tree), self._logits[:size]
        made = self.recorded[size, size, tree] = self.ops.record(lambda: target.copy_(self._decode(batches)))
        return made.output

    def _pad(self, tokens: int, seqs: int, logits: int, size: int) -> None:
        """Make the step one of `size` rows, sequences and rows of logits; sequences beyond those that pad are empty."""
        arrays, pad = self.arrays, self.caches.pad_block
        arrays.logit_rows[logits:size] = 0
        if seqs == size:
            return
        arrays.tokens[tokens:size] = arrays.positions[tokens:size] = arrays.tree[tokens:size] = 0
        arrays.slots[:, tokens:size] = pad * self.caches.block_size
        arrays.adapters[tokens:size] = NONE
        arrays.cu_q[seqs : size + 1] = np.minimum(np.arange(tokens, tokens + size + 1 - seqs), size)
        arrays.context[seqs:size] = 1
        arrays.block_tables[:, seqs:size, 0] = pad

    def warm_up(self, trees: bool = False) -> None:
        """Capture the graphs, also those of `trees`, and run every kernel: Triton compiles one when it is called."""
        if self.graph_sizes:  # a graph's own logits would stay taken, 131 MB for 256 rows of 128 k
            self._logits = self.ops.zeros((self.graph_sizes[-1], self.model.spec.vocab_size))
        for size in reversed(self.graph_sizes):  # the largest first: the others find room in what it took
            self.arrays.begin()
            self._pad(0, 0, 0, size)
            self.arrays.send(size, 1)
            for tree in (False, True)[: 1 + trees]:
                self._replay(size, tree)
        if self.ops.compiles:
            warm_device(self, trees)

    def profile(self, tokens: int = 0, seqs: int = 0) -> None:
        """Run a step of `tokens` of `seqs` sequences (0: as many as fit) in the spare block."""
        arrays, size, pad = self.arrays, self.caches.block_size, self.caches.pad_block
        tokens = min(tokens or len(arrays.tokens), (seqs or arrays.max_seqs) * arrays.max_blocks * size)
        wanted = min(tokens, seqs or self.most_logits)
        seqs = min(seqs or arrays.max_seqs, tokens)
        arrays.begin()
        at = np.arange(tokens)
        arrays.tokens[:], arrays.positions[:tokens], arrays.logit_rows[:] = 0, at % self.model.max_model_len, 0
        arrays.slots[:, :tokens] = pad * size + at % size
        arrays.block_tables[:] = pad
        arrays.cu_q[: seqs + 1] = np.linspace(0, tokens, seqs + 1)
        arrays.context[:seqs] = np.diff(arrays.cu_q[: seqs + 1])
        arrays.send(seqs, arrays.max_blocks)
        logits: Any = self._decode(arrays.batches(tokens, seqs, wanted))
        logits.clone()  # rows that are edited are kept beside it
        if self.model.encoder is not None:
            at = np.arange(min(tokens, self.model.max_model_len))
            self.encode(np.zeros(len(at), np.int32), pad * size + at % size)
        arrays.block_tables[:] = 0


def warm_device(step: GpuStep, trees: bool = False) -> None:
    """Steps of all sizes that choose other tiles, of one sequence and of many; then what runs beside the decoder.

    Tiles change at powers of two, and a number that 16 does not divide is another kernel than one it divides. All of it
    happens in the block that pads. `trees`: drafts will branch.
    """
    most = len(step.arrays.tokens)
    for seqs in (1, 0):
        for tokens in sorted({*(1 << i for i in range(most.bit_length())), most - 1, most} - {0}):
            step.profile(tokens, seqs)
    warm_beside(step.ops, step.caches.own, step.caches.pad_block, step.model.spec.vocab_size)
    if trees:
        slot = step.caches.pad_block * step.caches.block_size
        step.caches.move(tuple((slot, slot, table) for table in step.caches.tables))


def warm_beside(ops: Ops, caches: Sequence[KVCache], block: int, vocabulary: int) -> None:
    """Copy and zero `block`, and sample made-up logits in each way there is."""
    ops.copy_blocks(caches, ((block, block),))
    ops.zero_blocks(caches, (block,))
    logits = ops.zeros((1, vocabulary))
    ops.penalize(logits, [RowEdits(0, banned=np.zeros(1, np.int32))])
    drawn, _ = ops.sample(logits, np.zeros(1, DRAW))
    ops.fetch(ops.top_logprobs(logits, np.array([(0, -1)], QUERY), 1, drawn))()
