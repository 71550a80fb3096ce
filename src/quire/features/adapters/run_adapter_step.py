"""Steps that have a row whose adapter holds more than low-rank matrices of layers. See docs/design/adapters.md."""

from __future__ import annotations

from collections.abc import Callable

from quire.model.batch import Batch, Forward
from quire.model.load.adapter_extensions import AdapterExtensions
from quire.model.net.decoder import Decoder
from quire.model.net.multimodal import EmbeddedRows, with_given_rows
from quire.model.spec import Sight
from quire.ops.arrays import Array
from quire.ops.backend import Ops, Recording
from quire.run.arrays import Arrays
from quire.run.builder import StepSizes
from quire.run.caches import Caches
from quire.run.step_sizes import MAX_RECORDINGS, fitting


class AdapterStep:
    """Runs the decoder that has what is loaded now. On the host small steps are recorded; a GPU takes op after op, as
    its graphs were captured without."""

    def __init__(
        self, ops: Ops, arrays: Arrays, caches: Caches, decoder: Decoder, extensions: AdapterExtensions, sight: Sight
    ) -> None:
        self._ops, self._arrays, self._caches = ops, arrays, caches
        self._plain, self._extensions, self._sight = decoder, extensions, sight
        self._decoder, self._version = decoder, -1
        self._recorded: dict[tuple[int, int, bool], Recording] = {}

    def forward(self, shape: StepSizes, record: bool, given: EmbeddedRows | None = None) -> Array:
        """Implement `ModelStep.forward`; `record`: small steps are recorded."""
        if self._version != self._extensions.version:
            self._decoder, self._version = self._extensions.decoder(self._plain), self._extensions.version
            self._recorded.clear()
        arrays, ops = self._arrays, self._ops
        arrays.send(shape.seqs, shape.blocks)
        arrays.complete(shape.tokens)
        batches = arrays.batches(shape.tokens, shape.seqs, shape.logits, shape.tree)
        self._extensions.look_up(batches[0])
        if given is None:
            logits = self._logits(shape, lambda: self._decode(batches, self._decoder), record)
        else:
            seen = with_given_rows(self._decoder, self._sight, given, batches[0])
            logits = ops.compute(lambda: self._decode(batches, seen), together=False)
        return self._extensions.after(logits, arrays.logit_adapters[: shape.logits], self._decoder, batches[0])

    def _logits(self, shape: StepSizes, run: Callable[[], Array], record: bool) -> Array:
        key = shape.tokens, shape.seqs, shape.tree
        if not record or not fitting((), *key[:2], shape.logits, exact=True)[0]:
            return self._ops.compute(run, together=record)
        found = self._recorded.get(key)
        if found is not None:
            return found.run()
        if len(self._recorded) >= MAX_RECORDINGS:
            return self._ops.compute(run, together=True)
        made = self._recorded[key] = self._ops.record(run)
        return made.output

    def _decode(self, batches: list[Batch], decoder: Forward) -> Array:
        views = self._caches.views(batches)
        return decoder(batches[0], self._caches.of_layer, views)
