"""Turns a StepPlan into flat arrays, runs the decoder on them and samples."""

from __future__ import annotations

import numpy as np
import torch

from quire.core.plan import Chunk, ChunkResult, StepPlan
from quire.core.sequence import Sequence
from quire.model.batch import Batch
from quire.model.build import Model
from quire.ops.backend import Ops, Replay
from quire.sample.sampler import LogitRow, Sampler

# Pure decode steps of up to this many rows are replayed from a recording instead of being driven op by op.
MAX_CAPTURED_ROWS = 128


class Arrays:
    """The step's arrays at fixed addresses, so that a recorded step can be replayed on new contents."""

    def __init__(self, max_tokens: int, max_seqs: int, max_blocks: int) -> None:
        self.tokens = np.zeros(max_tokens, np.int32)
        self.positions = np.zeros(max_tokens, np.int32)
        self.slots = np.zeros(max_tokens, np.int64)
        self.cu_q = np.zeros(max_seqs + 1, np.int32)
        self.context = np.zeros(max_seqs, np.int32)
        self.block_tables = np.zeros((max_seqs, max_blocks), np.int32)
        self.logit_rows = np.zeros(max_tokens, np.int32)
        self._views = {name: torch.from_numpy(array) for name, array in vars(self).items()}

    def batch(self, tokens: int, seqs: int, logits: int) -> Batch:
        """Views of the filled part."""
        v = self._views
        return Batch(
            tokens=v["tokens"][:tokens],
            positions=v["positions"][:tokens],
            slots=v["slots"][:tokens],
            cu_q=v["cu_q"][: seqs + 1],
            context=v["context"][:seqs],
            block_tables=v["block_tables"][:seqs],
            logit_rows=v["logit_rows"][:logits],
        )


class Runner:
    """Owns the KV cache, the step arrays and the recordings. One call of `run` is one step.

    `max_tokens`, `max_seqs`: bounds of a step; `max_model_len`: bound of a sequence; `capture`: replay decode steps.
    """

    def __init__(
        self, model: Model, ops: Ops, num_blocks: int, max_tokens: int, max_seqs: int, max_model_len: int, capture: bool
    ) -> None:
        self.model = model
        self.ops = ops
        self.block_size = model.layouts[0].block_size
        self.own_caches = {i: ops.allocate_cache(model.layouts[i], num_blocks) for i in model.spec.own_layers}
        self.caches = [self.own_caches[model.spec.kv_layer(i)] for i in range(model.spec.layers)]
        self.arrays = Arrays(max_tokens, max_seqs, -(-max_model_len // self.block_size))
        self.sampler = Sampler(ops, model.spec.vocab_size)
        self.capture = capture and model.decoder.recordable
        self.numeric_errors = 0
        self._graphs: dict[int, Replay[torch.Tensor]] = {}
        self._table_owner: list[tuple[Sequence, int] | None] = [None] * max_seqs

    def warm_up(self) -> None:
        """Fault in what the first step touches: its memory between ops, scratch of all threads, the first KV blocks.

        The decoder warms up on one prompt of made-up tokens; the blocks that it wrote are zeroed again, in every
        layer. No counter sees it.
        """
        arrays, size = self.arrays, self.block_size
        blocks = min(self.caches[0].keys.shape[0], arrays.block_tables.shape[1], len(arrays.tokens) // size)
        tokens = blocks * size
        if not tokens:
            return
        arrays.positions[:tokens] = arrays.slots[:tokens] = np.arange(tokens)
        arrays.block_tables[0, :blocks] = np.arange(blocks)
        arrays.context[0] = arrays.cu_q[1] = tokens
        self.ops.begin_step()
        self.model.decoder.warm_up(arrays.batch(tokens, 1, 1), self.caches)
        self.ops.zero_blocks(list(self.own_caches.values()), tuple(range(blocks)))

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        """Execute the plan: wipe, copy, compute, sample. One result per chunk, in order."""
        if plan.scrub:
            self.ops.zero_blocks(list(self.own_caches.values()), plan.scrub)
        if plan.copies:
            self.ops.copy_blocks(list(self.own_caches.values()), plan.copies)
        if not plan.chunks:
            return []
        rows = self._fill(plan.chunks)
        logits = self._forward(plan.num_tokens, len(plan.chunks), len(rows))
        return self._collect(plan.chunks, rows, logits)

    def _forward(self, tokens: int, seqs: int, logits: int) -> torch.Tensor:
        if self.capture and tokens == seqs == logits <= MAX_CAPTURED_ROWS:
            graph = self._graphs.get(tokens)
            if graph is not None:
                return graph.run()
            batch = self.arrays.batch(tokens, seqs, logits)
            graph = self._graphs[tokens] = self.ops.capture(lambda: self.model.decoder(batch, self.caches))
            return graph.output
        self.ops.begin_step()
        return self.model.decoder(self.arrays.batch(tokens, seqs, logits), self.caches)

    def _fill(self, chunks: tuple[Chunk, ...]) -> list[LogitRow]:
        """Write the step's arrays; returns the rows that want logits, in batch order."""
        arrays, adapters, at = self.arrays, self.model.adapters, 0
        rows: list[LogitRow] = []
        for s, chunk in enumerate(chunks):
            seq, start, count = chunk.seq, chunk.start, chunk.count
            end, stop = start + count, at + count
            arrays.tokens[at:stop] = (
                seq.tokens[start:end] if end <= len(seq.tokens) else (seq.tokens + seq.draft)[start:end]
            )
            self._fill_blocks(s, chunk, at)
            if adapters is not None:
                adapters.rows[at:stop] = adapters.slot(seq.request.adapter)
            arrays.context[s] = end
            arrays.cu_q[s + 1] = stop
            for position in range(end - chunk.logits + 1, end + 1):
                if position >= len(seq.tokens) or position < seq.prompt_len:
                    target = seq.tokens[position] if position < seq.prompt_len else None
                    arrays.logit_rows[len(rows)] = at + position - 1 - start
                    rows.append(LogitRow(seq, position, target))
            at = stop
        return rows

    def _fill_blocks(self, s: int, chunk: Chunk, at: int) -> None:
        """Positions and slots of one chunk, and its row of the block table (only what changed since the last step)."""
        seq, start, count, size = chunk.seq, chunk.start, chunk.count, self.block_size
        first = start // size
        owner = (seq, seq.preemptions)
        known = first if self._table_owner[s] == owner else seq.slid
        self._table_owner[s] = owner
        self.arrays.block_tables[s, known : len(seq.blocks)] = seq.blocks[known:]
        if count == 1:
            self.arrays.positions[at] = start
            self.arrays.slots[at] = seq.blocks[first] * size + start % size
        else:
            position = np.arange(start, start + count)
            self.arrays.positions[at : at + count] = position
            self.arrays.slots[at : at + count] = (
                np.asarray(seq.blocks[first:])[position // size - first] * size + position % size
            )

    def _collect(self, chunks: tuple[Chunk, ...], rows: list[LogitRow], logits: torch.Tensor) -> list[ChunkResult]:
        results = {id(c.seq): ChunkResult([], [], []) for c in chunks}
        for row, found in zip(rows, self.sampler(logits, rows) if rows else (), strict=True):
            result = results[id(row.seq)]
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
        return list(results.values())
