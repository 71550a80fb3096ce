"""Ollama's vectors: /api/embed, and /api/embeddings, which it had before."""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.features.pooling.edge_embedding import PoolingParams, embedding, task_prompt, vector_of
from quire.server.apis.ollama.bodies import EmbeddingsRequest, EmbedRequest
from quire.server.apis.openai.prompts import Prompts, encode_shortened
from quire.server.apis.openai.protocol import Prompt
from quire.server.apis.openai.vectors import (
    NUMBER_BYTES,
    Answers,
    Given,
    VectorFields,
    answers,
    check_embeds,
    prompts_of,
)
from quire.server.apis.unsupported import without_effect
from quire.server.http.body import off_loop, read_struct
from quire.server.http.dialects import OLLAMA
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import Route
from quire.server.service import Service

NANO = 1_000_000_000
NOTHING = ("keep_alive", "options")
"""Models stay until the server ends, and options are those of sampling and of memory."""


class EmbedReply(msgspec.Struct, kw_only=True):
    """Response of /api/embed: a vector for each text, of length 1. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET


class EmbeddingsReply(msgspec.Struct, kw_only=True):
    """Response of /api/embeddings: one vector, as the model's files say."""

    embedding: list[float]


async def embed(service: Service, request: Request) -> Response:
    """Return embeddings in Ollama's format. A text that is too long is truncated unless truncate is false."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: EmbedRequest)
    request.state.ignored.extend(without_effect(body, NOTHING))
    params = PoolingParams(dimensions=body.dimensions or None, normalize=True)
    _check(service, body.model, params)
    if not body.input:
        return await _json(0, EmbedReply(model=body.model, embeddings=[]))
    texts: Prompt = [body.input] if isinstance(body.input, str) else list(body.input)
    given = await prompts_of(service, texts, "input", task_prompt(service.engine.info.pooling, None))
    if body.truncate is not False:
        given = await encode_shortened(service, given, service.engine.info.max_model_len)
    found = await _found(service, request, body.model, given, arrival, "input")
    reply = EmbedReply(
        model=body.model,
        embeddings=_rows(service, found, params),
        total_duration=round((time.monotonic() - arrival) * NANO),
        load_duration=0,
        prompt_eval_count=sum(len(asked.prompt) for asked, _ in found),
    )
    return await _json(sum(map(len, reply.embeddings)), reply)


async def embeddings(service: Service, request: Request) -> Response:
    """Return the embedding of one text in Ollama's older format."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: EmbeddingsRequest)
    request.state.ignored.extend(without_effect(body, NOTHING))
    params = PoolingParams()
    _check(service, body.model, params)
    if not body.prompt:
        return await _json(0, EmbeddingsReply(embedding=[]))
    text = task_prompt(service.engine.info.pooling, None) + body.prompt
    found = await _found(service, request, body.model, [text], arrival, "prompt")
    [row] = _rows(service, found, params)
    return await _json(len(row), EmbeddingsReply(embedding=row))


def _check(service: Service, model: str, params: PoolingParams) -> None:
    pooling = service.engine.info.pooling
    service.check_model(model)
    check_embeds(pooling)
    params.validate(pooling)


async def _found(service: Service, request: Request, model: str, given: Prompts, arrival: float, name: str) -> Answers:
    return await answers(service, request, VectorFields(model=model), Given(given, arrival, name))


def _rows(service: Service, found: Answers, params: PoolingParams) -> list[list[float]]:
    pooling = service.engine.info.pooling
    return [embedding(pooling, vector_of(output), params).tolist() for _, output in found]


async def _json(numbers: int, reply: msgspec.Struct) -> Response:
    return JsonResponse(await off_loop(NUMBER_BYTES * numbers, msgspec.json.encode, reply))


ROUTES = (
    Route(
        "POST",
        "/api/embed",
        embed,
        body=(EmbedRequest,),
        reply=(EmbedReply,),
        dialect=OLLAMA,
        generates=True,
        operation="embeddings",
    ),
    Route(
        "POST",
        "/api/embeddings",
        embeddings,
        body=(EmbeddingsRequest,),
        reply=(EmbeddingsReply,),
        dialect=OLLAMA,
        generates=True,
        operation="embeddings",
    ),
)
