"""Which requests with images an engine takes."""

from __future__ import annotations

from quire.core.errors import BadRequest
from quire.core.request import Request
from quire.features.images.plan_images import EncoderScheduler
from quire.model.build import Model


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
