"""A step's arrays to logits: what steps on the host (`host_step`) and on a device (`device_step`) have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.config import SchedulerConfig
from quire.features.adapters.run_adapter_step import AdapterStep
from quire.model.batch import Batch
from quire.model.build import Model
from quire.model.net.decoder import Decoder
from quire.model.net.hidden_taps import TappedDecoder, Taps, picked, tapped
from quire.model.net.multimodal import EmbeddedRows, with_given_rows
from quire.model.net.parts import GatedMlp, PlainMlp, Scaled
from quire.ops.arrays import Array
from quire.ops.backend import Ops
from quire.run.activations import activations
from quire.run.arrays import NO_ARRAYS, Arrays
from quire.run.builder import StepSizes
from quire.run.caches import Caches
from quire.run.context_batch import ContextSplitter
from quire.run.kv_budget import KVPlan
from quire.run.step_sizes import LOGITS_AT_ONCE, Sizes


class HeadRows(NamedTuple):
    """What the head of `decoder` reads of the rows of a step that want logits: h [R, hidden]."""

    decoder: Decoder
    h: Array
    batch: Batch


class ModelStep(Protocol):
    """Computes steps of one model, here or on all ranks, of what was filled into `arrays`.

    `hidden` [rows, width] f32, at one address: what `Taps` say of the last step's rows, where there are any.
    `most_logits`: rows of logits that are made at once, which is what a plan of memory counts.
    `record_steps`: small steps are recorded, and replayed on new contents.
    """

    model: Model
    ops: Ops
    caches: Caches
    arrays: Arrays
    hidden: Any
    most_logits: int
    record_steps: bool

    def forward(self, shape: StepSizes, given: EmbeddedRows | None = None) -> Array:
        """Logits f32 [shape.logits, V] of the step whose arrays are filled. A GPU is only told what to do.

        `given`: rows that are not looked up; such a step is not recorded.
        """
        ...

    def logits_in_pieces(self, shape: StepSizes, given: EmbeddedRows | None = None) -> Iterable[Array]:
        """The logits of `forward` in pieces of at most `most_logits` rows, each valid until the next is taken.

        So the log-probabilities of a prompt of 8,192 tokens need no 4.2 GB for logits of 128 k tokens, which no plan of
        memory counts. Models by transformers' code, and adapters with heads of their own, make all at once.
        """
        ...

    def head_rows(self, shape: StepSizes, given: EmbeddedRows | None = None) -> HeadRows:
        """What the head reads of the rows of a step that want logits, for requests that want these themselves."""
        ...

    def scores(self, rows: HeadRows, places: list[int]) -> Iterable[Array]:
        """The logits of some of `rows`, as `logits_in_pieces` does."""
        ...

    def encode(self, tokens: NDArray[np.int32] | NDArray[np.float32], slots: NDArray[np.int64]) -> None:
        """Compute an encoder's part, tokens or frames of sound, as one; its keys and values go to `slots`."""
        ...


class LocalStep(ABC):
    """A `ModelStep` of this process.

    `graph_sizes`: rows of the graphs that a GPU captures at the start; `records`: of each size that comes a recording
    is made, adapters' own steps among them.
    """

    graph_sizes: tuple[int, ...] = ()
    records = True

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
        self.model, self.ops, self.caches = model, ops, caches
        max_tokens, max_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.record_steps = record_steps and model.decoder.recordable
        own = NO_ARRAYS if model.adapters is None else model.adapters.arrays
        sizes = Sizes(max_tokens, max((max_seqs, *self.graph_sizes)), kv.sizes.entries(kv.max_model_len),
                      len(kv.groups.layers), model.encoder is not None, bool(kv.states.slots))  # fmt: skip
        self.arrays = self._made_arrays(sizes, own)
        self.most_logits = max(self.arrays.max_seqs, min(LOGITS_AT_ONCE, max_tokens))
        room = activations(model.spec, max_tokens, self.most_logits, fused=_fuses(model))
        scores = 4 * self.most_logits * (model.spec.vocab_size + model.spec.hidden)
        ops.reserve(max(room.outer, scores), max(room.layer, room.last))
        self.hidden: Any = ops.zeros((0, 0))
        self._decoder = model.decoder if taps is None else self._tapped(taps)
        self.recorded: dict[tuple[int, int, bool], Any] = {}
        self._extended: AdapterStep | None = None
        if model.adapters is not None:
            assert isinstance(self._decoder, Decoder), "others take no adapters"
            self._extended = AdapterStep(
                ops, self.arrays, caches, self._decoder, model.adapters.extensions, model.spec.sight
            )
        spread = model.place.topology.context > 1
        self._spread = ContextSplitter(model, caches, kv.groups.windows) if spread else None
        self._fixed = self.record_steps and not spread

    def _made_arrays(self, sizes: Sizes, own: Mapping[str, Array]) -> Arrays:
        """Arrays of the step; `own`: arrays that lie elsewhere, where the decoder's adapters read them."""
        return Arrays(sizes, self.ops, own)

    def _tapped(self, taps: Taps) -> TappedDecoder:
        decoder, rows = self.model.decoder, max((self.arrays.sizes.rows, *self.graph_sizes))
        assert isinstance(decoder, Decoder), "others have no layers to stop between"
        self.hidden = self.ops.zeros((rows, taps.width(self.model.spec.hidden)))
        return tapped(decoder, taps, self.hidden)

    def forward(self, shape: StepSizes, given: EmbeddedRows | None = None) -> Array:
        """Logits f32 [shape.logits, V]: of a recording where there is one or may be, else computed op by op."""
        if shape.extended and self._extended is not None:
            return self._extended.forward(shape, self.record_steps and self.records, given)
        found = self._replayed(shape) if given is None and self._fixed else None
        return self._compute(shape, given)[0] if found is None else found

    def logits_in_pieces(self, shape: StepSizes, given: EmbeddedRows | None = None) -> Iterable[Array]:
        """One piece, by `forward`, in every decode; more only where more than `most_logits` rows want logits."""
        decoder = self._decoder
        if shape.logits <= self.most_logits or shape.extended or not isinstance(decoder, Decoder):
            return (self.forward(shape, given),)
        h, batch = self._compute(shape, given, scores=False)
        return self._scores(decoder, self.ops.copy_out(h), batch)

    def head_rows(self, shape: StepSizes, given: EmbeddedRows | None = None) -> HeadRows:
        """Rows [shape.logits, hidden] f32 that the head reads, copied out of the step's memory."""
        decoder = self._decoder
        assert isinstance(decoder, Decoder) and not shape.extended, "requests that others cannot serve are refused"
        h, batch = self._compute(shape, given, scores=False)
        return HeadRows(decoder, self.ops.copy_out(h), batch)

    def scores(self, rows: HeadRows, places: list[int]) -> Iterable[Array]:
        """Logits of the rows at `places` of `rows`, at most `most_logits` at once."""
        wanted = replace(rows.batch, logit_rows=picked(rows.batch.logit_rows, places))
        return self._scores(rows.decoder, picked(rows.h, places), wanted)

    def _compute(self, shape: StepSizes, given: EmbeddedRows | None = None, scores: bool = True) -> tuple[Array, Batch]:
        """Logits of the step whose arrays are filled, or (`scores` False) what the head reads, and its batch."""
        self.arrays.send(shape.seqs, shape.blocks)
        if self._spread is None:
            batches = self.arrays.batches(shape.tokens, shape.seqs, shape.logits, shape.tree)
        else:
            batches = self._spread.batches(self.arrays, shape)
        together = self.record_steps and given is None  # rows are given between the ops of a step
        return self.ops.compute(lambda: self._decode(batches, given, scores), together), batches[0]

    @abstractmethod
    def _replayed(self, shape: StepSizes) -> Array | None:
        """Logits of the step whose arrays are filled from what was recorded, or is now; None where that cannot be."""

    @abstractmethod
    def warm_up(self, trees: bool = False) -> None:
        """Do what the first step would otherwise wait for; `trees`: drafts will branch."""

    def _scores(self, decoder: Decoder, h: Array, batch: Batch) -> Iterator[Array]:
        for at in range(0, len(h), self.most_logits):
            rows = slice(at, at + self.most_logits)
            piece = replace(batch, logit_rows=batch.logit_rows[rows])
            yield self.ops.compute(partial(decoder.score, h[rows], piece), together=self.record_steps)

    def encode(self, tokens: NDArray[np.int32] | NDArray[np.float32], slots: NDArray[np.int64]) -> None:
        """Compute the encoder's part of a prompt; its keys and values go to `slots`."""
        assert self.model.encoder is not None
        self.model.encoder(self.ops.put(tokens), self.ops.put(slots), self.caches.of_layer)

    def _decode(self, batches: list[Batch], given: EmbeddedRows | None = None, scores: bool = True) -> Array:
        self.arrays.complete(len(batches[0].tokens))
        views = self.caches.views(batches)
        decoder = self._decoder
        if given is not None:
            decoder = with_given_rows(decoder, self.model.spec.sight, given, batches[0])
        if scores:
            return decoder(batches[0], self.caches.of_layer, views)
        assert isinstance(decoder, Decoder), "others make logits alone"
        return decoder.head_rows(batches[0], self.caches.of_layer, views)


def _fuses(model: Model) -> bool:
    """Whether the wide rows of MLPs stay within one op."""
    layers = model.decoder.layers if isinstance(model.decoder, Decoder) else ()
    mlps = (layer.mlp.own if isinstance(layer.mlp, Scaled) else layer.mlp for layer in layers)
    return not any(isinstance(mlp, GatedMlp | PlainMlp) for mlp in mlps)
