"""The pass over a finished text that says when its tokens were said: queries of cross attention and what they read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

import numpy as np

from quire.core.alignment import Alignment
from quire.core.plan import Chunk
from quire.core.sequence import Sequence
from quire.model.batch import Batch
from quire.model.net.audio_encoder import AudioEncoder
from quire.model.net.decoder import CrossAttention, Decoder
from quire.ops.arrays import Array, Host
from quire.ops.backend import Ops
from quire.ops.layout import LayerCache
from quire.run.builder import BatchBuilder
from quire.run.step import ModelStep
from quire.sample.token_alignment import first_rows, mean_attention


@dataclass(frozen=True)
class ListeningAttention(CrossAttention):
    """`CrossAttention` whose queries [T, hidden] are kept."""

    kept: list[Host] = field(kw_only=True)

    def __call__(self, ops: Ops, h: Array, view: Batch, cache: LayerCache) -> Array:
        """Implement `CrossAttention`."""
        self.kept.append(ops.host(self.q(ops, h)).copy())
        return super().__call__(ops, h, view, cache)


def token_rows(step: ModelStep, builder: BatchBuilder, seq: Sequence) -> bytes:
    """The rows of the encoder's output where the tokens of an aligned request begin, as f32 bytes; its prompt is
    encoded already. One decoder pass over its tokens alone, whose keys and values the step to come writes again."""
    asked = seq.request.alignment
    assert asked is not None, "the runner looks"
    queries = _queries(step, builder, seq, 1 + max(layer for layer, _ in asked.heads))
    likeness = mean_attention(_scores(step, builder, seq, asked, queries))
    return first_rows(likeness[asked.first : -1]).astype(np.float32).tobytes()


def _queries(step: ModelStep, builder: BatchBuilder, seq: Sequence, layers: int) -> list[Host]:
    """Queries [tokens, hidden] of each of the first `layers`."""
    ops, decoder, kept = step.ops, step.model.decoder, list[Host]()
    assert isinstance(decoder, Decoder), "models that hear have no other"
    lead = seq.encoder.lead
    shape, _ = builder.fill((Chunk(seq, lead, seq.prompt_len - lead, 0),))
    step.arrays.send(shape.seqs, shape.blocks)
    step.arrays.complete(shape.tokens)
    batches = step.arrays.batches(shape.tokens, shape.seqs, 0)
    views, caches = step.caches.views(batches) or (batches[0],) * layers, step.caches.of_layer
    heard = tuple(replace(layer, cross=_listening(layer.cross, kept)) for layer in decoder.layers[:layers])
    ops.begin_step()
    cut = replace(decoder, layers=heard)
    cut.walk(cut.enter(batches[0]), None, views[:layers], caches[:layers])
    return kept


def _listening(cross: CrossAttention | None, kept: list[Host]) -> ListeningAttention:
    assert cross is not None, "decoders with an encoder are loaded with it"
    return ListeningAttention(**{each.name: getattr(cross, each.name) for each in fields(cross)}, kept=kept)


def _scores(
    step: ModelStep, builder: BatchBuilder, seq: Sequence, asked: Alignment, queries: list[Host]
) -> Iterator[Host]:
    """Scores [tokens, rows] of each head, as attention has them; keys of one layer are there at a time."""
    ops, encoder, spec = step.ops, step.model.encoder, step.model.spec
    assert isinstance(encoder, AudioEncoder), "requests of other models are refused"
    x = encoder.hidden(ops.put(builder.encoded(seq)[0]))
    width = spec.head_dim
    for layer in sorted({layer for layer, _ in asked.heads}):
        ops.begin_step()
        keys = ops.host(encoder.keys_values.linears[layer](ops, x))[: asked.rows]
        for head in (head for at, head in asked.heads if at == layer):
            own = slice(head * width, (head + 1) * width)
            yield np.asarray((queries[layer][:, own] @ keys[:, own].T) * np.float32(spec.attention_scale))
