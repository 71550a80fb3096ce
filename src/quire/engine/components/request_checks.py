"""What requests an engine takes, by the kind of its model, and what it makes of vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.blame import of_request
from quire.core.errors import BadRequest
from quire.core.pooling import Pooling
from quire.core.request import Output, Request
from quire.model.build import Model
from quire.ops.arrays import Host
from quire.sched.features.encoder_scheduler import EncoderScheduler


def check_kind(pooling: Pooling, request: Request) -> None:
    """`BadRequest` for a vector that cannot be had of this engine, or a text of a model that makes vectors only."""
    if request.pooling is None and not pooling.generates:
        raise BadRequest("this model has no head over its vocabulary: it makes vectors (/v1/embeddings, LLM.embed)")
    if request.pooling is not None and pooling.refused:
        raise BadRequest(f"no vectors can be had here: {pooling.refused}")


def check_images(model: Model, encoding: EncoderScheduler | None, request: Request) -> None:
    """`BadRequest` for images that this engine cannot take, or rows of a prompt that are not as they say."""
    if not request.images:
        return
    if encoding is None:
        raise BadRequest(f"image: {model.name} takes no images here", param="image")
    if request.params.prompt_logprobs is not None:
        raise BadRequest(
            "prompt_logprobs: rows of images are no tokens, which nothing predicts; leave it out beside images",
            param="prompt_logprobs",
        )
    at, prompt, first = 0, request.prompt, model.spec.vocab_size
    for image in request.images:
        for start, count in image.runs:
            if not at <= start < start + count <= len(prompt) or min(prompt[start : start + count]) < first:
                raise BadRequest("image: its rows are not where the prompt has any", param="image")
            at = start + count
        height, width = image.grid
        if model.spec.sight.sections and (len(image.runs) > 1 or height * width != image.rows):
            raise BadRequest(f"image: {image.rows} rows are no grid of {height} x {width}", param="image")
    if sum(token >= first for token in prompt) != sum(image.rows for image in request.images):
        raise BadRequest("image: the prompt has rows of other images than it came with", param="image")
    encoding.check(request.images)


def classify(classifier: Host, outputs: Sequence[Output]) -> None:
    """Make logits of classes of the vectors in `outputs`, by the matrix [labels, hidden] f32, summed in f64."""
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
