"""Pictures as an engine takes them: what is planned and counted, and what no prompt may ask."""

from __future__ import annotations

from dataclasses import replace

from quire.core.config import EngineConfig, SchedulerConfig
from quire.core.errors import BadRequest
from quire.core.request import Request
from quire.model.build import Model
from quire.run.activations import feature_bytes
from quire.sched.features.images import Encoding, Limits


def with_sight(config: EngineConfig, model: Model) -> Model:
    """`model`, without what reads pictures where only its text is wanted."""
    return replace(model, vision=None) if config.model.language_model_only else model


def encoding_of(limits: SchedulerConfig, model: Model) -> Encoding | None:
    """Who plans what is encoded, within the limits of steps; None where the model takes no pictures."""
    if model.vision is None:
        return None
    mutual = model.spec.sight.mutual
    return Encoding(Limits(*limits.encoder_rows, mutual, limits.max_num_batched_tokens, limits.max_num_seqs))


def picture_bytes(limits: SchedulerConfig, model: Model, length: int) -> int:
    """Of features, and of the largest picture while it is encoded, for sequences of `length` tokens."""
    if model.vision is None:
        return 0
    return feature_bytes(model.spec, limits) + model.vision.scratch(min(limits.encoder_rows[1], length))


def check_pictures(model: Model, encoding: Encoding | None, request: Request) -> None:
    """`BadRequest` for pictures that this engine cannot take, or rows of a prompt that are not as they say."""
    if not request.pictures:
        return
    if encoding is None:
        raise BadRequest(f"image: {model.name} takes no pictures here", param="image")
    if request.params.prompt_logprobs is not None:
        raise BadRequest(
            "prompt_logprobs: rows of pictures are no tokens, which nothing predicts; leave it out beside pictures",
            param="prompt_logprobs",
        )
    at, prompt, first = 0, request.prompt, model.spec.vocab_size
    for picture in request.pictures:
        for start, count in picture.runs:
            if not at <= start < start + count <= len(prompt) or min(prompt[start : start + count]) < first:
                raise BadRequest("image: its rows are not where the prompt has any", param="image")
            at = start + count
        height, width = picture.grid
        if model.spec.sight.sections and (len(picture.runs) > 1 or height * width != picture.rows):
            raise BadRequest(f"image: {picture.rows} rows are no grid of {height} x {width}", param="image")
    if sum(token >= first for token in prompt) != sum(picture.rows for picture in request.pictures):
        raise BadRequest("image: the prompt has rows of other pictures than it came with", param="image")
    encoding.check(request.pictures)
