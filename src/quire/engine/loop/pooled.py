"""Pooled requests as the engine takes and answers them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.blame import of_request
from quire.core.errors import BadRequest
from quire.core.pooling import Pooling
from quire.core.request import Output, Request
from quire.ops.arrays import Host


def check_kind(pooling: Pooling, request: Request) -> None:
    """`BadRequest` for a vector that cannot be had of this engine, or a text of a model that makes vectors only."""
    if request.pooling is None and not pooling.generates:
        raise BadRequest("this model has no head over its vocabulary: it makes vectors (/v1/embeddings, LLM.embed)")
    if request.pooling is not None and pooling.refused:
        raise BadRequest(f"no vectors can be had here: {pooling.refused}")


def classify(classifier: Host | None, outputs: Sequence[Output]) -> None:
    """Make logits of classes of the vectors in `outputs`, by the matrix [labels, hidden] f32, summed in f64."""
    if classifier is None:
        return
    matrix = classifier.astype(np.float64)
    for output in outputs:
        if output.pooled:
            try:
                output.pooled = _classes(matrix, output)
            except BaseException as error:
                output.fail(of_request(error, "pooling"))


def _classes(matrix: NDArray[np.float64], output: Output) -> bytes:
    row = np.frombuffer(output.pooled, np.float32).astype(np.float64)
    return bytes((matrix * row).sum(1).astype(np.float32).tobytes())
