"""Turns a StepPlan into flat arrays, runs the decoder on them and samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from quire.core.config import SchedulerConfig
from quire.core.plan import Chunk, ChunkResult, StepPlan
from quire.core.sequence import Sequence, Status
from quire.engine.arrays import Arrays, DeviceArrays, Sizes
from quire.engine.budget import KVPlan
from quire.engine.shapes import fitting, graph_sizes
from quire.model.batch import Batch
from quire.model.build import Model
from quire.model.net.lora import NONE
from quire.ops.backend import Captured, Ops, Replay
from quire.sample.sampler import Drawn, LogitRow, Sampler


class Runner:
    """Owns the KV cache, the step arrays and the recordings. One call of `launch` is one step.

    `kv`: blocks of the cache, layers that share them, the longest sequence; `limits`: bounds of a step; `capture`:
    replay small steps.

    On a GPU small steps are padded to one of few sizes, each a graph captured at the start. Rows that pad are sequences
    of one token in a block of their own behind the cache's: they compute like others and nothing reads them.
    """

    def __init__(self, model: Model, ops: Ops, kv: KVPlan, limits: SchedulerConfig, capture: bool) -> None:
        self.model = model
        self.ops = ops
        self.block_size = kv.sizes.block_size
        spare = 0 if ops.gpu is None else 1
        self.own_caches = [ops.allocate_cache(model.layouts[i], kv.blocks + spare) for i in kv.groups.widest]
        homes = [kv.groups.home(model.spec.kv_layer(i)) for i in range(model.spec.layers)]
        self.caches = [self.own_caches[place] for _, place in homes]
        self._group_of = [group for group, _ in homes]
        self.pad_block = kv.blocks
        max_tokens, max_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.graph_sizes = graph_sizes(max_tokens, max_seqs) if capture and ops.gpu is not None else ()
        max_seqs = max((max_seqs, *self.graph_sizes))
        rows = None if model.adapters is None else model.adapters.rows
        sizes = Sizes(max_tokens, max_seqs, kv.sizes.entries(kv.max_model_len), len(kv.groups.layers),
                      model.encoder is not None)  # fmt: skip
        self.arrays: Arrays
        if ops.gpu is not None:
            self.arrays = DeviceArrays(sizes, rows, ops.gpu.runtime, ops.device)
        else:
            self.arrays = Arrays(sizes, rows)
        self.sampler = Sampler(ops, model.spec.vocab_size)
        self.capture = capture and model.decoder.recordable
        self.numeric_errors = 0
        self._graphs: dict[int, Replay[torch.Tensor] | Captured] = {}
        self._logits = torch.empty(0)
        self._table_owner: list[tuple[Sequence, int] | None] = [None] * max_seqs
        self._places: dict[Sequence, int] = {}

    def warm_up(self) -> None:
        """Fault in what the first step touches, or capture the graphs of a GPU. No counter sees it."""
        if self.ops.gpu is None:
            self._warm_host()
            return
        if self.graph_sizes:
            size, vocabulary = self.graph_sizes[-1], self.model.spec.vocab_size
            self._logits = torch.zeros((size, vocabulary), device=self.ops.device)
        for size in reversed(self.graph_sizes):  # the largest first: the others find room in what it took
            self.arrays.begin()
            self._pad(0, 0, 0, size)
            self.arrays.send(size, 1)
            self._graph(size)

    def profile(self, tokens: int = 0, seqs: int = 0) -> None:
        """Run a step of `tokens` of `seqs` sequences (0: as many as fit) in the spare block. GPU only."""
        arrays, size = self.arrays, self.block_size
        tokens = min(tokens or len(arrays.tokens), (seqs or arrays.max_seqs) * arrays.max_blocks * size)
        seqs = min(seqs or arrays.max_seqs, tokens)
        arrays.begin()
        at = np.arange(tokens)
        arrays.tokens[:], arrays.positions[:tokens], arrays.logit_rows[:] = 0, at % self.model.max_model_len, 0
        arrays.slots[:, :tokens] = self.pad_block * size + at % size
        arrays.block_tables[:] = self.pad_block
        arrays.cu_q[: seqs + 1] = np.linspace(0, tokens, seqs + 1)
        arrays.context[:seqs] = np.diff(arrays.cu_q[: seqs + 1])
        arrays.send(seqs, arrays.max_blocks)
        logits = self._decode(arrays.batches(tokens, seqs, seqs))
        logits.clone()  # rows that are edited are kept beside it
        if self.model.encoder is not None:
            at = np.arange(min(tokens, self.model.max_model_len))
            self._encode(np.zeros(len(at), np.int32), self.pad_block * size + at % size)
        arrays.block_tables[:] = 0

    def _warm_host(self) -> None:
        """The decoder warms up on one prompt of made-up tokens; what that wrote is zeroed again, in every layer."""
        arrays, size = self.arrays, self.block_size
        blocks = min(self.caches[0].keys.shape[0], arrays.max_blocks, len(arrays.tokens) // size)
        tokens = min(blocks * size, self.model.max_model_len)  # the ropes' tables end there, within a block or not
        if not tokens:
            return
        arrays.positions[:tokens] = arrays.slots[:, :tokens] = np.arange(tokens)
        arrays.block_tables[:, 0, :blocks] = np.arange(blocks)
        arrays.context[0] = arrays.cu_q[1] = tokens
        self.ops.begin_step()
        self.model.decoder.warm_up(arrays.batches(tokens, 1, 1)[0], self.caches)
        self.ops.zero_blocks(self.own_caches, tuple(range(blocks)))

    def made_up_decode(self, rows: int) -> Callable[[], object]:
        """A decode step of `rows` sequences of one made-up token, to be timed; `forget_made_up` wipes its traces."""
        arrays = self.arrays
        arrays.tokens[:rows] = arrays.positions[:rows] = arrays.block_tables[:, :rows, 0] = 0
        arrays.slots[:, :rows] = np.arange(rows) % self.block_size
        arrays.adapters[:rows] = NONE
        arrays.logit_rows[:rows] = np.arange(rows)
        arrays.cu_q[: rows + 1] = np.arange(rows + 1)
        arrays.context[:rows] = 1
        return lambda: self._graph(rows)

    def forget_made_up(self) -> None:
        """Zero the block that made-up steps wrote."""
        self.ops.zero_blocks(self.own_caches, (0,))

    def launch(self, plan: StepPlan) -> Callable[[], list[ChunkResult]]:
        """Execute the plan: wipe, copy, compute, sample. The call that comes back gives a result per chunk, in order.

        A GPU is only told what to do; that call waits for it. The next plan may be launched before: it takes tokens
        that are not known yet from what this one draws, on the device.
        """
        if plan.scrub:
            self.ops.zero_blocks(self.own_caches, plan.scrub)
        if plan.copies:
            self.ops.copy_blocks(self.own_caches, plan.copies)
        if not plan.chunks:
            return list
        if self.model.encoder is not None:
            for chunk in plan.chunks:
                if chunk.start < chunk.seq.encoded:
                    self._encode_prompt(chunk.seq)
        self.arrays.begin()
        rows = self._fill(plan.chunks)
        blocks, seqs = max(len(chunk.seq.blocks[0]) for chunk in plan.chunks), len(plan.chunks)
        logits = self._forward(int(self.arrays.cu_q[seqs]), seqs, len(rows), blocks)
        drawn = self.sampler(logits[: len(rows)], rows) if rows else None
        if drawn is not None and drawn.tokens is not None:
            self.arrays.keep_drawn(drawn.tokens)
        self._places = {row.seq: i for i, row in enumerate(row for row in rows if row.target is None)}
        return lambda: self._collect(plan.chunks, rows, drawn)

    def _encode_prompt(self, seq: Sequence) -> None:
        """Compute the encoder's part of `seq`, which is always computed as one."""
        at, size = np.arange(seq.encoded), self.block_size
        slots = np.asarray(seq.blocks[0], np.int64)[at // size] * size + at % size
        self._encode(np.array(seq.tokens[: seq.encoded], np.int32), slots)

    def _encode(self, tokens: NDArray[np.int32], slots: NDArray[np.int64]) -> None:
        assert self.model.encoder is not None
        move = torch.from_numpy if self.ops.gpu is None else self.ops.gpu.upload
        self.model.encoder(move(tokens), move(slots), self.caches)

    def _forward(self, tokens: int, seqs: int, logits: int, blocks: int) -> torch.Tensor:
        size = fitting(self.graph_sizes, tokens, seqs, logits, exact=self.ops.gpu is None) if self.capture else 0
        if size:
            self._pad(tokens, seqs, logits, size)
            self.arrays.send(size, blocks)
            return self._graph(size)
        self.arrays.send(seqs, blocks)
        batches = self.arrays.batches(tokens, seqs, logits)
        return self.ops.compute(lambda: self._decode(batches), together=self.capture)

    def _decode(self, batches: list[Batch]) -> torch.Tensor:
        self.arrays.complete(len(batches[0].tokens))
        views = [batches[group] for group in self._group_of] if len(batches) > 1 else ()
        return self.model.decoder(batches[0], self.caches, views)

    def _graph(self, size: int) -> torch.Tensor:
        """Logits of the step of `size` rows whose arrays were sent: replayed, or recorded the first time."""
        graph = self._graphs.get(size)
        if graph is not None:
            return graph.run()
        batches, target = self.arrays.batches(size, size, size), self._logits[:size]
        if self.ops.gpu is None:
            graph = self.ops.capture(lambda: self._decode(batches))
        else:  # one place for the logits of all graphs: a graph's own would stay taken, 131 MB for 256 rows of 128 k
            graph = self.ops.capture(lambda: target.copy_(self._decode(batches)))
        self._graphs[size] = graph
        return graph.output

    def _pad(self, tokens: int, seqs: int, logits: int, size: int) -> None:
        """Make the step one of `size` rows, sequences and rows of logits; sequences beyond those that pad are empty."""
        arrays = self.arrays
        arrays.logit_rows[logits:size] = 0
        if seqs == size:
            return
        arrays.tokens[tokens:size] = arrays.positions[tokens:size] = 0
        arrays.slots[:, tokens:size] = self.pad_block * self.block_size
        arrays.adapters[tokens:size] = NONE
        arrays.cu_q[seqs : size + 1] = np.minimum(np.arange(tokens, tokens + size + 1 - seqs), size)
        arrays.context[seqs:size] = 1
        arrays.block_tables[:, seqs:size, 0] = self.pad_block
        self._table_owner[seqs:size] = [None] * (size - seqs)

    def _fill(self, chunks: tuple[Chunk, ...]) -> list[LogitRow]:
        """Write the step's arrays; returns the rows that want logits, in batch order."""
        arrays, adapters, at = self.arrays, self.model.adapters, 0
        rows: list[LogitRow] = []
        for s, chunk in enumerate(chunks):
            seq, end = chunk.seq, chunk.start + chunk.count
            start = max(chunk.start, seq.lead)
            stop = at + end - start
            if end <= len(seq.tokens):
                arrays.tokens[at:stop] = seq.tokens[start:end]
            elif seq.draft:
                arrays.tokens[at:stop] = (seq.tokens + seq.draft)[start:end]
            else:
                arrays.tokens[at] = -1 - self._places[seq]
            self._fill_blocks(s, seq, start, end - start, at)
            if adapters is not None:
                arrays.adapters[at:stop] = adapters.slot(seq.request.adapter)
            arrays.context[s] = end - seq.lead
            arrays.cu_q[s + 1] = stop
            for position in range(end - chunk.logits + 1, end + 1):
                if position >= len(seq.tokens) or position < seq.prompt_len:
                    target = seq.tokens[position] if position < seq.prompt_len else None
                    arrays.logit_rows[len(rows)] = at + position - 1 - start
                    rows.append(LogitRow(seq, position, target))
            at = stop
        return rows

    def _fill_blocks(self, s: int, seq: Sequence, start: int, count: int, at: int) -> None:
        """Positions and slots of one chunk, and its rows of the block tables (what changed since the last step)."""
        arrays, size, lead = self.arrays, self.block_size, seq.lead // self.block_size
        first, end = start // size, at + count
        owner = (seq, seq.preemptions)
        same, self._table_owner[s] = self._table_owner[s] == owner, owner
        position = np.arange(start, start + count) if count > 1 else None
        arrays.positions[at:end] = (start if position is None else position) - seq.lead
        if lead:
            arrays.encoded[s] = seq.encoded
            if not same:
                arrays.block_tables[-1, s, :lead] = seq.blocks[0][:lead]
        for group, table in enumerate(seq.blocks):
            known = first if same else max(seq.slid[group], lead)
            arrays.block_tables[group, s, known - lead : len(table) - lead] = table[known:]
            arrays.slots[group, at:end] = (
                table[first] * size + start % size
                if position is None
                else np.asarray(table[first:])[position // size - first] * size + position % size
            )

    def _collect(self, chunks: tuple[Chunk, ...], rows: list[LogitRow], drawn: Drawn | None) -> list[ChunkResult]:
        results = {id(c.seq): ChunkResult([], [], []) for c in chunks}
        for row, found in zip(rows, drawn.results() if drawn is not None else (), strict=True):
            result = results[id(row.seq)]
            if row.seq.status is Status.FINISHED:
                continue  # it ended while this step was under way: its row came after an end or an error
            if found.error is not None:
                self.numeric_errors += result.error is None
                result.error = found.error
            elif row.target is not None:
                assert found.logprob is not None
                result.prompt_logprobs.append(found.logprob)
            else:
                result.tokens.append(found.token)
                if found.logprob is not None:
                    result.logprobs.append(found.logprob)
            result.finite = result.error is None
        return list(results.values())
