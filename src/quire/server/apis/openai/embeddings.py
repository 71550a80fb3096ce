"""POST /v1/embeddings: OpenAI's shape over vectors of one engine."""

from __future__ import annotations

import base64
import time
from typing import Annotated

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.core.options.fields import about
from quire.core.pooling import Pooling
from quire.features.pooling.edge_embedding import PoolingParams, embedding, task_prompt, vector_of
from quire.server.apis.fields import AddSpecialTokensField, DimensionsField
from quire.server.apis.openai.protocol import Prompt
from quire.server.apis.openai.vectors import (
    NUMBER_BYTES,
    ROW_BYTES,
    Given,
    VectorFields,
    VectorUsage,
    answers,
    check_embeds,
    prompts_of,
    usage_of,
    vector_routes,
)
from quire.server.http.body import off_loop, read_struct
from quire.server.http.json_response import JsonResponse
from quire.server.service import Service

TASKS = (
    ("query", "search_query", "retrieval.query"),
    ("document", "passage", "search_document", "retrieval.passage"),
    ("text-matching", "similarity", "STS"),
    ("classification", "Classification"),
    ("clustering", "separation", "Clustering"),
)
"""Names of the same task in several APIs and models."""


class EmbeddingRequest(VectorFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    input: Annotated[Prompt, about("A text, token ids, or a list of either; each gets a vector.")]
    encoding_format: Annotated[str | None, about("float, or base64 of little-endian f32.")] = None
    dimensions: DimensionsField = None
    normalize: Annotated[
        bool | None, about("Whether a vector is divided by its length; as the model's files say if not given.")
    ] = None
    prompt_name: Annotated[
        str | None, about("Task whose prompt of the model's files stands before texts, as query; none if empty.")
    ] = None
    input_type: Annotated[
        str | None, about("Cohere's, Voyage's and NVIDIA's name of the task, which chooses the model's prompt for it.")
    ] = None
    task: Annotated[str | None, about("Jina's name of the task, as input_type.")] = None
    add_special_tokens: AddSpecialTokensField = None


class EmbeddingData(msgspec.Struct, kw_only=True):
    """One vector: numbers, or base64 of little-endian f32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Embeddings(msgspec.Struct, kw_only=True):
    """The reply of /v1/embeddings."""

    data: list[EmbeddingData]
    model: str
    usage: VectorUsage
    object: str = "list"


async def create_embedding(service: Service, request: HttpRequest) -> Response:
    """Return embeddings of one or several texts or lists of token ids."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: EmbeddingRequest)
    pooling = service.engine.info.pooling
    task = _prompt_name(pooling, body, request.state.ignored)
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize, prompt_name=task)
    if body.encoding_format not in (None, "float", "base64"):
        raise BadRequest("encoding_format: must be float or base64", param="encoding_format")
    params.validate(pooling)
    check_embeds(pooling)
    given = await prompts_of(service, body.input, "input", task_prompt(pooling, params.prompt_name))
    special = body.add_special_tokens is not False
    found = await answers(service, request, body, Given(given, arrival, "input", special))

    def written() -> bytes:
        rows = [embedding(pooling, vector_of(output), params) for _, output in found]
        plain = body.encoding_format != "base64"
        data = [EmbeddingData(index=i, embedding=row.tolist() if plain else base64.b64encode(row.tobytes()).decode())
                for i, row in enumerate(rows)]  # fmt: skip
        return msgspec.json.encode(Embeddings(data=data, model=service.answering(body.model), usage=usage_of(found)))

    return JsonResponse(await off_loop((ROW_BYTES + NUMBER_BYTES * pooling.width) * len(found), written))


def _prompt_name(pooling: Pooling, body: EmbeddingRequest, ignored: list[str]) -> str | None:
    """The name of the prompt that `body` asks for. A task that the model has no prompt for is `ignored`."""
    name = "input_type" if body.input_type is not None else "task"
    asked = body.task if body.input_type is None else body.input_type
    if asked is None:
        return body.prompt_name
    if body.prompt_name is not None or None not in (body.input_type, body.task):
        raise BadRequest(f"{name}: give one of prompt_name, input_type and task", param=name)
    names = next((group for group in TASKS if asked in group), ())
    found = next((each for each in (asked, *names) if each in pooling.prompts), None)
    if found is None:
        ignored.append(name)
    return found


ROUTES = (*vector_routes(("/v1/embeddings",), create_embedding, (EmbeddingRequest,), (Embeddings,), "embeddings"),)
