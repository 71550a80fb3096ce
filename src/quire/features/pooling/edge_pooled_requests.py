"""Whether an engine makes vectors, of which requests, and the classes that become of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from quire.core.blame import of_request
from quire.core.config import EngineConfig
from quire.core.errors import BadRequest, ModelError
from quire.core.exclusions.features import BIDIRECTIONAL, LORA
from quire.core.exclusions.of_models import OF_VECTORS
from quire.core.pooling import Pooling
from quire.core.request import Output, Request
from quire.model.build import Model
from quire.model.pooled_head import PooledHead, run_head
from quire.model.spec import ModelSpec


def pooling_of(config: EngineConfig, model: Model) -> Pooling:
    """What the model gives for pooled requests, or why this engine takes none.

    `ModelError` for a model that can do nothing else then.
    """
    made = model.pooling
    there = config.features | model.known.features
    row = next((row for row in OF_VECTORS if row.b in there and not (row.b is LORA and BIDIRECTIONAL in there)), None)
    if row is not None and not made.refused:
        made = replace(made, refused=row.told({})[0])
    if made.refused and not made.generates:
        raise ModelError(f"{model.folder}: the model only makes vectors, and cannot: {made.refused}")
    return made


def check_kind(pooling: Pooling, request: Request, spec: ModelSpec) -> None:
    """`BadRequest` for a vector that cannot be had of this engine, or a text of a model that makes vectors only; or for
    an alignment by heads or to sound that the model `spec` does not have."""
    if request.pooling is None and pooling.kind == "splade":
        raise BadRequest("this model's head fills in masked tokens: it makes vectors (/embed_sparse, LLM.embed_sparse)")
    if request.pooling is None and not pooling.generates:
        raise BadRequest("this model has no head over its vocabulary: it makes vectors (/v1/embeddings, LLM.embed)")
    asked = request.alignment
    if (asked is None) != (request.pooling != "alignment") or (asked is not None and request.audio is None):
        raise BadRequest("alignment: is of sound and a text of it, and its request is pooled so")
    if asked is not None:
        known = asked.heads and all(0 <= at < spec.layers and 0 <= head < spec.heads for at, head in asked.heads)
        if not known or not 0 < asked.rows <= spec.encoder.rows or not 0 <= asked.first < len(request.decoder_prompt):
            raise BadRequest("alignment: the model has no such heads, rows or tokens")
        return
    if request.pooling is not None and pooling.refused:
        raise BadRequest(f"no vectors can be had here: {pooling.refused}")


def classify(head: PooledHead, outputs: Sequence[Output]) -> None:
    """Run the layers behind pooled rows on the vectors in `outputs`."""
    for output in outputs:
        if output.pooled:
            try:
                output.pooled = run_head(head, np.frombuffer(output.pooled, np.float32)).tobytes()
            except BaseException as error:
                output.fail(of_request(error, "pooling"))
