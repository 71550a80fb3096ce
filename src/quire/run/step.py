"""A step's arrays to logits: computed, or replayed from a recording or a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.config import SchedulerConfig
from quire.model.batch import Batch
from quire.model.build import Model
from quire.model.net.decoder import Decoder
from quire.model.net.lora import NONE
from quire.model.net.multimodal import Given, with_pictures
from quire.model.net.parts import GatedMlp, PlainMlp
from quire.model.net.tapped import TappedDecoder, Taps, picked, tapped
from quire.ops.arrays import Array
from quire.ops.backend import Ops, Recording
from quire.run.activations import activations
from quire.run.arrays import NO_ARRAYS, Arrays
from quire.run.budget import KVPlan
from quire.run.builder import Shape
from quire.run.caches import Caches
from quire.run.extended import ExtendedStep
from quire.run.shapes import LOGITS, MOST, Sizes, fitting, graph_sizes
from quire.run.spread import Spread


class Again(Protocol):
    """A step of one size that can be run again on what the arrays hold now."""

    def run(self) -> Array:
        """Its logits."""
        ...


class HeadRows(NamedTuple):
    """What the head of `decoder` reads of the rows of a step that want logits: h [R, hidden]."""

    decoder: Decoder
    h: Array
    batch: Batch


class Step:
    """Runs the decoder on the step's arrays. `capture`: small steps are recorded, and replayed on new contents.

    On a GPU these are padded to one of few sizes, each a graph captured at the start. Rows that pad are sequences of
    one token in a block of their own behind the cache's: they compute like others and nothing reads them.

    `hidden` [rows, width] f32, at one address: what `taps` say of the last step's rows, where there are any.
    `most_logits`: rows of logits that are made at once, which is what a plan of memory counts.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        kv: KVPlan,
        limits: SchedulerConfig,
        caches: Caches,
        capture: bool,
        taps: Taps | None = None,
    ) -> None:
        self.model, self.ops, self.caches = model, ops, caches
        max_tokens, max_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.capture = capture and model.decoder.recordable
        self.graph_sizes = graph_sizes(max_tokens, max_seqs) if self.capture and ops.pads else ()
        own = NO_ARRAYS if model.adapters is None else model.adapters.arrays
        sizes = Sizes(max_tokens, max((max_seqs, *self.graph_sizes)), kv.sizes.entries(kv.max_model_len),
                      len(kv.groups.layers), model.encoder is not None)  # fmt: skip
        self.arrays = _arrays_of(ops, sizes, own)
        self.most_logits = max(self.arrays.max_seqs, min(LOGITS, max_tokens))
        room = activations(model.spec, max_tokens, self.most_logits, fused=_fuses(model))
        scores = 4 * self.most_logits * (model.spec.vocab_size + model.spec.hidden)
        ops.reserve(max(room.outer, scores), max(room.layer, room.last))
        self.hidden: Any = ops.zeros((0, 0))
        self._decoder = model.decoder if taps is None else self._tapped(taps)
        self.recorded: dict[tuple[int, int, bool], Again] = {}
        self._extended: ExtendedStep | None = None
        if model.adapters is not None:
            assert isinstance(self._decoder, Decoder), "others take no adapters"
            self._extended = ExtendedStep(
                ops, self.arrays, caches, self._decoder, model.adapters.extensions, model.spec.sight
            )
        self._logits: Any = None
        spread = model.place.topology.context > 1
        self._spread = Spread(model, caches, kv.groups.windows) if spread else None

    def _tapped(self, taps: Taps) -> TappedDecoder:
        decoder, rows = self.model.decoder, max((self.arrays.sizes.rows, *self.graph_sizes))
        assert isinstance(decoder, Decoder), "others have no layers to stop between"
        self.hidden = self.ops.zeros((rows, taps.width(self.model.spec.hidden)))
        return tapped(decoder, taps, self.hidden)

    def forward(self, shape: Shape, given: Given | None = None) -> Array:
        """Logits f32 [shape.logits, V] of the step whose arrays are filled. A GPU is only told what to do.

        `given`: rows that are not looked up; such a step is not recorded.
        """
        self.begins(shape, given)
        if shape.extended and self._extended is not None:
            return self._extended.forward(shape, self.capture, given)
        if given is not None:
            return self._compute(shape, given)[0]
        tokens, seqs, logits, blocks, tree, _ = shape
        exact = not self.ops.pads
        fixed = (
            self.capture and self._spread is None and (tokens == seqs or not exact or self.model.encoder is None)
        )  # what it reads is copied
        size = fitting(self.graph_sizes, tokens, seqs, logits, exact) if fixed else (0, 0)
        if (*size, tree) in self.recorded or (size[0] and len(self.recorded) < MOST):
            if not exact:
                self._pad(tokens, seqs, logits, size[0])
            self.arrays.send(size[1], blocks)
            return self._replay(*size, tree)[:logits]
        return self._compute(shape)[0]

    def pieces(self, shape: Shape, given: Given | None = None) -> Iterable[Array]:
        """The logits of `forward` in pieces of at most `most_logits` rows, each valid until the next is taken.

        So the log-probabilities of a prompt of 8,192 tokens need no 4.2 GB for logits of 128 k tokens, which no plan of
        memory counts. Models by transformers' code, and adapters with heads of their own, make all at once.
        """
        decoder = self._decoder
        if shape.logits <= self.most_logits or shape.extended or not isinstance(decoder, Decoder):
            return (self.forward(shape, given),)
        self.begins(shape, given)
        h, batch = self._compute(shape, given, scores=False)
        return self._scores(decoder, self.ops.keep(h), batch)

    def head_rows(self, shape: Shape, given: Given | None = None) -> HeadRows:
        """What the head reads of the rows of a step that want logits, for requests that want these themselves."""
        decoder = self._decoder
        assert isinstance(decoder, Decoder) and not shape.extended, "requests that others cannot serve are refused"
        self.begins(shape, given)
        h, batch = self._compute(shape, given, scores=False)
        return HeadRows(decoder, self.ops.keep(h), batch)

    def scores(self, rows: HeadRows, places: list[int]) -> Iterable[Array]:
        """The logits of some of `rows`, in pieces as of `pieces`."""
        wanted = replace(rows.batch, logit_rows=picked(rows.batch.logit_rows, places))
        return self._scores(rows.decoder, picked(rows.h, places), wanted)

    def begins(self, shape: Shape, given: Given | None = None) -> None:
        """The arrays are filled, and a step of them is computed next: whoever computes parts of it hears that here."""

    def _compute(self, shape: Shape, given: Given | None = None, scores: bool = True) -> tuple[Array, Batch]:
        """Logits of the step whose arrays are filled, or (`scores` False) what the head reads, and its batch."""
        self.arrays.send(shape.seqs, shape.blocks)
        if self._spread is None:
            batches = self.arrays.batches(shape.tokens, shape.seqs, shape.logits, shape.tree)
        else:
            batches = self._spread.batches(self.arrays, shape)
        together = self.capture and given is None  # rows are given between the ops of a step
        return self.ops.compute(lambda: self._decode(batches, given, scores), together), batches[0]

    def _scores(self, decoder: Decoder, h: Array, batch: Batch) -> Iterator[Array]:
        for at in range(0, len(h), self.most_logits):
            rows = slice(at, at + self.most_logits)
            piece = replace(batch, logit_rows=batch.logit_rows[rows])
            yield self.ops.compute(partial(decoder.score, h[rows], piece), together=self.capture)

    def encode(self, tokens: NDArray[np.int32], slots: NDArray[np.int64]) -> None:
        """Compute an encoder's part, which is always computed as one; its keys and values go to `slots`."""
        assert self.model.encoder is not None
        self.model.encoder(self.ops.put(tokens), self.ops.put(slots), self.caches.of_layer)

    def warm_up(self, trees: bool = False) -> None:
        """Fault in what the first step touches, or capture the graphs of a GPU, also those of `trees`."""
        if not self.ops.pads:
            self._warm_host()
            return
        if self.graph_sizes:
            size, vocabulary = self.graph_sizes[-1], self.model.spec.vocab_size
            self._logits = self.ops.zeros((size, vocabulary))
        for size in reversed(self.graph_sizes):  # the largest first: the others find room in what it took
            self.arrays.begin()
            self._pad(0, 0, 0, size)
            self.arrays.send(size, 1)
            for tree in (False, True)[: 1 + trees]:
                self._replay(size, size, tree)

    def profile(self, tokens: int = 0, seqs: int = 0) -> None:
        """Run a step of `tokens` of `seqs` sequences (0: as many as fit) in the spare block. GPU only."""
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

    def _warm_host(self) -> None:
        """The decoder warms up on one prompt of made-up tokens; what that wrote is zeroed again, in every layer."""
        arrays, size = self.arrays, self.caches.block_size
        blocks = min(self.caches.blocks, arrays.max_blocks, len(arrays.tokens) // size)
        tokens = min(blocks * size, self.model.max_model_len)  # the ropes' tables end there, within a block or not
        if not tokens:
            return
        arrays.positions[:tokens] = arrays.slots[:, :tokens] = np.arange(tokens)
        arrays.block_tables[:, 0, :blocks] = np.arange(blocks)
        arrays.context[0] = arrays.cu_q[1] = tokens
        self.ops.begin_step()
        self.model.decoder.warm_up(arrays.batches(tokens, 1, 1)[0], self.caches.of_layer)
        self.caches.forget(blocks)

    def made_up_decode(self, rows: int) -> Callable[[], object]:
        """A decode step of `rows` sequences of one made-up token, to be timed; `forget_made_up` wipes its traces."""
        arrays = self.arrays
        arrays.tokens[:rows] = arrays.positions[:rows] = arrays.block_tables[:, :rows, 0] = 0
        arrays.slots[:, :rows] = np.arange(rows) % self.caches.block_size
        arrays.adapters[:rows] = NONE
        arrays.logit_rows[:rows] = np.arange(rows)
        arrays.cu_q[: rows + 1] = np.arange(rows + 1)
        arrays.context[:rows] = 1
        return lambda: self._replay(rows, rows)

    def forget_made_up(self) -> None:
        """Zero the block that made-up steps wrote."""
        self.caches.forget(1)

    def _decode(self, batches: list[Batch], given: Given | None = None, scores: bool = True) -> Array:
        self.arrays.complete(len(batches[0].tokens))
        views = [batches[group] for group in self.caches.group_of] if len(batches) > 1 else ()
        decoder = self._decoder
        if given is not None:
            assert isinstance(decoder, Decoder), "others take no pictures"
            decoder = with_pictures(decoder, self.model.spec.sight, given, batches[0])
        if scores:
            return decoder(batches[0], self.caches.of_layer, views)
        assert isinstance(decoder, Decoder), "others make logits alone"
        return decoder.head_rows(batches[0], self.caches.of_layer, views)

    def _replay(self, rows: int, seqs: int, tree: bool = False) -> Array:
        """Logits of the step of so many rows whose arrays were sent: replayed, or recorded the first time."""
        found = self.recorded.get((rows, seqs, tree))
        return found.run() if found is not None else self.record(rows, seqs, tree).output

    def record(self, rows: int, seqs: int, tree: bool = False) -> Recording:
        """Compute the step of `rows` rows of `seqs` sequences whose arrays were sent, and keep its recording."""
        batches = self.arrays.batches(rows, seqs, rows, tree)
        if not self.ops.pads:
            found = self.ops.capture(lambda: self._decode(batches))
        else:  # one place for the logits of all graphs: a graph's own would stay taken, 131 MB for 256 rows of 128 k
            target = self._logits[:rows]
            found = self.ops.capture(lambda: target.copy_(self._decode(batches)))
        self.recorded[rows, seqs, tree] = found
        return found

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


def _arrays_of(ops: Ops, sizes: Sizes, own: Mapping[str, Array]) -> Arrays:
    """Those of a backend; `own`: arrays that lie elsewhere, where the decoder's adapters read them."""
    if not ops.queues:
        return Arrays(sizes, ops, own)
    from quire.run.device_arrays import DeviceArrays

    return DeviceArrays(sizes, ops, own)


def _fuses(model: Model) -> bool:
    """Whether the wide rows of MLPs stay within one op."""
    layers = model.decoder.layers if isinstance(model.decoder, Decoder) else ()
    return not any(isinstance(layer.mlp, GatedMlp | PlainMlp) for layer in layers)
