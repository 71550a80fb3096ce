"""TEI's vectors: /embed, /embed_sparse, /embed_all and /similarity."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.features.pooling.edge_embedding import (
    PoolingParams,
    cosine,
    embedding,
    task_prompt,
    usual_vector,
    vector_of,
)
from quire.features.pooling.edge_sparse import check_sparse, filled, sparse_of
from quire.server.apis.openai.prompts import encode_prompts
from quire.server.apis.openai.vectors import (
    NUMBER_BYTES,
    ROW_BYTES,
    Answers,
    Given,
    VectorFields,
    answers,
    check_embeds,
    prompts_of,
    texts_of,
)
from quire.server.apis.tei.bodies import (
    TeiEmbedAllRequest,
    TeiEmbedRequest,
    TeiEmbedSparseRequest,
    TeiSimilarityParameters,
    TeiSimilarityRequest,
    fitted,
)
from quire.server.http.body import off_loop, read_struct
from quire.server.http.dialects import TEI
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import Handler, Route
from quire.server.service import Service

MOST_NUMBERS = 1 << 22
"""Of a reply with a vector per token, or with a number per token of the vocabulary: about 80 MB of JSON."""


class SparseValue(msgspec.Struct, kw_only=True):
    """A token of the vocabulary and its weight."""

    index: int
    value: float


async def embed(service: Service, request: Request) -> Response:
    """Return embeddings in TEI's format: a list with a vector for each input."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: TeiEmbedRequest)
    pooling = service.engine.info.pooling
    params = PoolingParams(
        dimensions=body.dimensions, normalize=body.normalize is not False, prompt_name=body.prompt_name
    )
    params.validate(pooling)
    found = await _answers(service, request, body, arrival)
    sparse = pooling.kind == "splade"

    def written() -> bytes:
        rows = (filled(pooling, output) if sparse else vector_of(output) for _, output in found)
        return msgspec.json.encode([embedding(pooling, row, params).tolist() for row in rows])

    return JsonResponse(await off_loop((ROW_BYTES + NUMBER_BYTES * pooling.width) * len(found), written))


async def embed_sparse(service: Service, request: Request) -> Response:
    """Return sparse embeddings of a SPLADE model in TEI's format: for each input the tokens whose weight is not 0."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: TeiEmbedSparseRequest)
    check_sparse(service.engine.info.pooling)
    found = await _answers(service, request, body, arrival)

    def written() -> bytes:
        pairs = (zip(*(part.tolist() for part in sparse_of(output)), strict=True) for _, output in found)
        return msgspec.json.encode([[SparseValue(index=i, value=v) for i, v in each] for each in pairs])

    numbers = sum(len(output.pooled) // 8 for _, output in found)
    return JsonResponse(await off_loop(ROW_BYTES * len(found) + 3 * NUMBER_BYTES * numbers, written))


async def embed_all(service: Service, request: Request) -> Response:
    """Return a vector for each token in TEI's format, before pooling."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: TeiEmbedAllRequest)
    pooling = service.engine.info.pooling
    if pooling.dense:
        raise BadRequest(f"this model has {len(pooling.dense)} layers behind its pooled vector, and none per token")
    found = await _answers(service, request, body, arrival, every=True)

    def written() -> bytes:
        rows = (vector_of(output).reshape(len(asked.prompt), -1) for asked, output in found)
        return msgspec.json.encode([each.tolist() for each in rows])

    numbers = pooling.width * sum(len(asked.prompt) for asked, _ in found)
    return JsonResponse(await off_loop(NUMBER_BYTES * numbers, written))


async def similarity(service: Service, request: Request) -> Response:
    """Return cosine similarities of a sentence with others in TEI's format."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: TeiSimilarityRequest)
    pooling, how = service.engine.info.pooling, body.parameters or TeiSimilarityParameters()
    task = task_prompt(pooling, how.prompt_name)
    check_embeds(pooling)
    name = "inputs.sentences"
    texts = [task + each for each in (body.inputs.source_sentence, *texts_of(body.inputs.sentences, name))]
    given = Given(await fitted(service, texts, how), arrival, name)
    found = await answers(service, request, VectorFields(), given)

    def written() -> bytes:
        source, *others = (usual_vector(pooling, output) for _, output in found)
        return msgspec.json.encode([cosine(source, other) for other in others])

    return JsonResponse(await off_loop(ROW_BYTES * len(found), written))


async def _answers(
    service: Service, request: Request, body: TeiEmbedAllRequest, arrival: float, every: bool = False
) -> Answers:
    """A vector for each input; `every`: one for each of its tokens."""
    pooling = service.engine.info.pooling
    if every or pooling.kind != "splade":
        check_embeds(pooling)
    prompts = await prompts_of(service, body.inputs, "inputs", task_prompt(pooling, body.prompt_name))
    prompts = await fitted(service, prompts, body)
    if isinstance(body, TeiEmbedRequest) and pooling.kind == "splade":
        _check_size(pooling.width * len(prompts), "the vocabulary")
    if not every:
        return await answers(service, request, VectorFields(), Given(prompts, arrival, "inputs"))
    ids = await encode_prompts(service, prompts, True, "inputs")
    _check_size(pooling.width * sum(map(len, ids)), "all tokens")
    return await answers(service, request, VectorFields(), Given(ids, arrival, "inputs", kind="all"))


def _check_size(numbers: int, of: str) -> None:
    """`BadRequest` for a reply that would be too long."""
    if numbers > MOST_NUMBERS:
        raise BadRequest(
            f"inputs: vectors of {of} have {numbers} numbers, more than {MOST_NUMBERS}; send fewer texts",
            param="inputs",
        )


def _route(path: str, handler: Handler, body: type[msgspec.Struct], reply: Any) -> Route:
    return Route("POST", path, handler, body=(body,), reply_type=reply, dialect=TEI, generates=True,
                 operation="embeddings")  # fmt: skip


ROUTES = (
    _route("/embed", embed, TeiEmbedRequest, list[list[float]]),
    _route("/embed_sparse", embed_sparse, TeiEmbedSparseRequest, list[list[SparseValue]]),
    _route("/embed_all", embed_all, TeiEmbedAllRequest, list[list[list[float]]]),
    _route("/similarity", similarity, TeiSimilarityRequest, list[float]),
)
