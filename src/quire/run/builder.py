"""Writes a plan into the flat arrays of its step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.blame import Failed, fail
from quire.core.images import grid_positions, grid_shift, pieces
from quire.core.plan import Chunk, LogitRow
from quire.core.sequence import Sequence
from quire.model.build import Model
from quire.model.load.adapters import Adapters
from quire.model.net.lora import NONE
from quire.run.arrays import Arrays


class StepSizes(NamedTuple):
    """Sizes of a step: rows, sequences, rows that want logits, most blocks of a sequence; whether a draft branches, and
    whether an adapter of a row has more than low-rank matrices of layers."""

    tokens: int
    seqs: int
    logits: int
    blocks: int
    tree: bool = False
    extended: bool = False


class ImageChunk(NamedTuple):
    """A chunk, from `start` to before `end`, that may have rows of images, which begins at row `at` of the step."""

    seq: Sequence
    start: int
    end: int
    at: int


class RopeShift(NamedTuple):
    """Which rows of rope tables a sequence uses: behind `longest` if it reaches at most `short` tokens (0: never)."""

    short: int
    longest: int

    def of(self, seq: Sequence) -> int:
        """What is added to the positions of `seq` to find its rows."""
        return self.longest if seq.request.reach(self.longest) <= self.short else 0


def ancestors(parents: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Make, of the nodes of a draft [n], the masks that `ops.attention` reads, and how many nodes come before each."""
    seen: list[int] = []
    for node, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    return np.array(seen, np.uint64).view(np.int64), np.array([mask.bit_count() - 1 for mask in seen], np.int64)


def wanted_rows(chunk: Chunk) -> list[tuple[int, int | None]]:
    """The rows of `chunk` that want logits, in order.

    Each as its position and the token of the prompt that follows, or None where a token is drawn. Rows that predict a
    token of the prompt are scored, for log-probabilities or only to see that they are finite; of a sequence that is
    computed again, rows whose next token was drawn already want none.
    """
    wanted: list[tuple[int, int | None]] = []
    seq, end = chunk.seq, chunk.start + chunk.count
    known, prompt = len(seq.tokens), seq.prompt_len
    for place in range(end - chunk.logits, end):
        if place + 1 < prompt:
            wanted.append((place, seq.tokens[place + 1]))
        elif place + 1 >= known:
            wanted.append((place, None))
    return wanted


class BatchBuilder:
    """Fills the step's arrays. It knows which rows of the block tables stand, so that only what changed is written.

    `image_chunks`: those of the last step among whose rows images may be. `failed`: its sequences whose own
    part of that failed; their rows hold arbitrary values.
    """

    def __init__(self, arrays: Arrays, model: Model, block_size: int) -> None:
        self._arrays, self._block_size, self._adapters = arrays, block_size, model.adapters
        self.rope_shift = RopeShift(model.short_reach, model.max_model_len)
        spec = model.spec
        self._second = spec.typed_positions // spec.token_types if spec.token_types > 1 else 0
        self._grids, self._image_token = bool(model.spec.sight.sections), model.spec.sight.token
        self.image_chunks = list[ImageChunk]()
        self.failed: Failed = {}
        self._owners: list[tuple[Sequence, int, int]] = []
        self._places: dict[Sequence, int] = {}

    def fill(self, chunks: tuple[Chunk, ...]) -> tuple[StepSizes, list[LogitRow]]:
        """Write the arrays of a step of `chunks`; returns its sizes, and the rows that want logits in batch order.

        A token that is not known yet is named by its place among those that the last step draws.
        """
        arrays, adapters, at = self._arrays, self._adapters, 0
        rows: list[LogitRow] = []
        tree = extended = False
        for chunk in chunks:
            tree = tree or bool(chunk.seq.draft.parents and chunk.seq.draft.tokens)
        blocks = 0
        self.image_chunks, self.failed = [], {}
        arrays.begin()
        for s, chunk in enumerate(chunks):
            seq, end = chunk.seq, chunk.start + chunk.count
            start = max(chunk.start - chunk.again, seq.encoder.lead)
            stop = at + end - start
            if end <= len(seq.tokens):
                arrays.tokens[at:stop] = seq.tokens[start:end]
            elif seq.draft.tokens:
                arrays.tokens[at:stop] = (seq.tokens + seq.draft.tokens)[start:end]
            else:  # the last one is not known; what is run again before it is
                arrays.tokens[at : stop - 1] = seq.tokens[start:]
                arrays.tokens[stop - 1] = -1 - self._places[seq]
            self._fill_blocks(s, seq, start, end - start, at)
            if tree:
                self._fill_tree(seq, start, at, stop)
            if adapters is not None:
                slot = self._slot(adapters, seq)
                extended = extended or slot in adapters.extensions
                arrays.adapters[at:stop] = slot
                arrays.logit_adapters[len(rows) : len(rows) + chunk.logits] = slot
            if arrays.states is not None:
                arrays.states.write(s, chunk.state)
            arrays.context[s] = end - seq.encoder.lead
            arrays.cu_q[s + 1] = stop
            if seq.request.pooling is not None:  # no token is drawn or scored
                arrays.logit_rows[len(rows) : len(rows) + chunk.logits] = np.arange(stop - chunk.logits, stop)
                rows += [LogitRow(seq, end, None)] * chunk.logits
            for place, target in wanted_rows(chunk) if seq.request.pooling is None else ():
                arrays.logit_rows[len(rows)] = at + place - start
                position = int(arrays.positions[at + place - start]) + seq.encoder.lead + 1 if tree else place + 1
                node = max(-1, place - len(seq.tokens)) if seq.draft.tokens else -1
                rows.append(LogitRow(seq, position, target, node))
            if seq.request.images:
                try:
                    self._fill_images(ImageChunk(seq, start, end, at))
                except BaseException as error:
                    fail(self.failed, seq, error, "images")
                    arrays.tokens[at:stop] = arrays.positions[at:stop] = 0
            if self._second and seq.request.second:
                arrays.positions[at + max(seq.request.second - start, 0) : stop] += self._second
            if self.rope_shift.short:
                arrays.positions[at:stop] += self.rope_shift.of(seq)
            at, blocks = stop, max(blocks, len(seq.kv.blocks[0]))
        if arrays.states is not None:
            arrays.states.none_behind(len(chunks))
        del self._owners[len(chunks) :]  # a step that is padded writes rows of tables behind these
        return StepSizes(at, len(chunks), len(rows), blocks, tree, extended), rows

    def _slot(self, adapters: Adapters, seq: Sequence) -> int:
        try:
            return adapters.slot(seq.request.adapter)
        except BaseException as error:
            fail(self.failed, seq, error, "adapter")
            return NONE

    def _fill_blocks(self, s: int, seq: Sequence, start: int, count: int, at: int) -> None:
        """Positions and slots of one chunk, and its rows of the block tables (what changed since the last step)."""
        arrays, size, lead = self._arrays, self._block_size, seq.encoder.lead // self._block_size
        first, end = start // size, at + count
        written = self._written(s, seq, first)
        position = np.arange(start, start + count) if count > 1 else None
        arrays.positions[at:end] = (start if position is None else position) - seq.encoder.lead
        if lead:
            arrays.encoded[s] = seq.encoder.tokens
            if written is None:
                arrays.block_tables[-1, s, :lead] = seq.kv.blocks[0][:lead]
        # Rows of one sequence that are sequences of their own to the step have the same table: copied, it costs less.
        same = written is None and s > 0 and self._owners[s - 1][0] is seq
        for group, table in enumerate(seq.kv.blocks):
            known = max(seq.kv.slid[group], lead) if written is None else written
            row = slice(known - lead, len(table) - lead)
            arrays.block_tables[group, s, row] = arrays.block_tables[group, s - 1, row] if same else table[known:]
            arrays.slots[group, at:end] = (
                table[first] * size + start % size
                if position is None
                else np.asarray(table[first:])[position // size - first] * size + position % size
            )

    def _fill_images(self, seen: ImageChunk) -> None:
        """Rows of images look up a token that there is. Text counts on from where images end, which is not their
        index; that is what its tokens are drawn by."""
        (seq, start, end, at), arrays = seen, self._arrays
        stop, behind = at + end - start, start >= seq.request.images[-1].end
        if self._grids:
            positions = arrays.positions[at:stop]
            positions += (
                grid_shift(seq.request.images, start)
                if behind
                else grid_positions(seq.request.images, start, end)[0] - np.arange(start, end, dtype=np.int32)
            )
        if not behind:
            self.image_chunks.append(seen)
            for image in seq.request.images:
                for row, _, count in pieces(image, start, end):
                    arrays.tokens[at + row : at + row + count] = self._image_token

    def _fill_tree(self, seq: Sequence, start: int, at: int, stop: int) -> None:
        """Masks of the rows of one chunk: nodes of a draft that branches see their ancestors, which precede them."""
        masks, known = self._arrays.tree, len(seq.tokens)
        masks[at:stop] = 0
        drafted = start + stop - at - known
        if not seq.draft.parents or drafted <= 0:
            return
        seen, depths = ancestors(seq.draft.parents[:drafted])
        first, skipped = at + max(0, known - start), max(0, start - known)
        masks[first:stop] = seen[skipped:]
        self._arrays.positions[first:stop] = depths[skipped:] + known - seq.encoder.lead

    def _written(self, s: int, seq: Sequence, first: int) -> int | None:
        """Up to which block row `s` of the tables is that of `seq`, as it is from now on; None if it was another's.

        A block is replaced only where something is about to be written, so those before the first of the last step
        stand.
        """
        owner = (seq, seq.times.preemptions, first)
        if s == len(self._owners):
            self._owners.append(owner)
            return None
        (known, times, at), self._owners[s] = self._owners[s], owner
        return min(at, first) if known is seq and times == seq.times.preemptions else None

    def encoded(self, seq: Sequence) -> tuple[NDArray[np.int32] | NDArray[np.float32], NDArray[np.int64]]:
        """The tokens of the encoder's part of `seq`, or the sound in their place, and where in the cache it lies."""
        at, size = np.arange(seq.encoder.tokens), self._block_size
        slots = np.asarray(seq.kv.blocks[0], np.int64)[at // size] * size + at % size
        if seq.request.audio is not None:
            return seq.request.audio.frames, slots
        return np.array(seq.tokens[: seq.encoder.tokens], np.int32), slots

    def drew(self, rows: list[LogitRow]) -> None:
        """The tokens after `rows` are drawn: the next step may name them by their places."""
        self._places = places = dict[Sequence, int]()
        count = 0
        for row in rows:
            if row.target is None:
                places[row.seq] = count
                count += 1
