"""POST /v1/embeddings, /v1/score and /v1/rerank: OpenAI's, vLLM's and Jina's shapes over vectors of one engine."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.core.options.fields import about
from quire.core.options.ranges import check_ranges, within
from quire.core.pooling import Pooling
from quire.core.request import Output, Request, random_id
from quire.engine.frontend.async_engine import AsyncEngine
from quire.engine.frontend.request_times import Timings, timings
from quire.features.pooling.edge_embedding import (
    PoolingParams,
    Vector,
    check_scores,
    cosine,
    embedding,
    pooled_request,
    relevance,
    vector_of,
)
from quire.server.apis.fields import (
    PRIORITY,
    AddSpecialTokensField,
    CacheSaltField,
    DimensionsField,
    ModelField,
    TruncatePromptTokensField,
    UserField,
)
from quire.server.apis.openai.prompts import Prompts, encode_prompts, listed, truncate
from quire.server.apis.openai.protocol import Prompt
from quire.server.http.body import ID_BYTES, in_turns, off_loop, read_struct
from quire.server.http.disconnect import cancel_on_disconnect
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import Handler, Kinds, Route
from quire.server.keys import Tenant
from quire.server.service import Service
from quire.server.text_generation.reports import CachedTokens, Usage, details

Texts = str | list[str]
TopN = Annotated[int, within(ge=1)]
NUMBER_BYTES = 20
"""Of a number in JSON, about."""
ROW_BYTES = 256
"""Of text, which it takes as long as to make a vector of what the engine gave."""


class VectorFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the three have in common."""

    model: ModelField = None
    user: UserField = None
    truncate_prompt_tokens: TruncatePromptTokensField = None
    priority: Annotated[int | None, PRIORITY] = None
    cache_salt: CacheSaltField = None


class EmbeddingRequest(VectorFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    input: Annotated[Prompt, about("A text, token ids, or a list of either; each gets a vector.")]
    encoding_format: Annotated[str | None, about("float, or base64 of little-endian f32.")] = None
    dimensions: DimensionsField = None
    normalize: Annotated[
        bool | None, about("Whether a vector is divided by its length; as the model's files say if not given.")
    ] = None
    add_special_tokens: AddSpecialTokensField = None


class ScoreRequest(VectorFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score: one text and many, or as many of each."""

    text_1: Annotated[Texts, about("A text, or a list as long as text_2.")]
    text_2: Annotated[Texts, about("A text, or a list.")]


class RerankRequest(VectorFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank."""

    query: Annotated[str, about("The query to rank documents by.")]
    documents: Annotated[list[str], about("The texts to rank.")]
    top_n: Annotated[TopN | None, about("Number of documents to return. The default is all.")] = None
    return_documents: Annotated[bool | None, about("Return the texts with their scores.")] = None


class VectorUsage(msgspec.Struct, kw_only=True):
    """Tokens read; nothing is written."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


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


class ScoreData(msgspec.Struct, kw_only=True):
    """How well a pair fits."""

    index: int
    score: float
    object: str = "score"


class Scores(msgspec.Struct, kw_only=True):
    """The reply of /v1/score."""

    id: str
    created: int
    model: str
    data: list[ScoreData]
    usage: VectorUsage
    object: str = "list"


class RankedText(msgspec.Struct, kw_only=True):
    """A document as it was sent."""

    text: str


class Ranked(msgspec.Struct, kw_only=True):
    """A document's place in the list that was sent, and how well it fits."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(msgspec.Struct, kw_only=True):
    """The reply of /v1/rerank, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: VectorUsage


Answers = list[tuple[Request, Output]]


class Pooled:
    """The vectors of one HTTP request as the engine makes them, submitted on construction, and what they took
    (`Work`)."""

    def __init__(self, engine: AsyncEngine, requests: Sequence[Request]) -> None:
        self.requests = requests
        self._stream = engine.submit(requests)
        self._found: dict[str, Output] = {}

    async def all(self) -> Answers:
        """Wait for all vectors."""
        try:
            while outputs := await self._stream.next():
                self._found |= {output.request_id: output for output in outputs}
        finally:
            self._stream.close()
        return [(each, self._found[each.id]) for each in self.requests]

    def usage(self) -> Usage:
        """Tokens read; nothing is written."""
        read = sum(len(request.prompt) for request in self.requests)
        cached = sum(output.cached_tokens for output in self._found.values())
        return Usage(prompt_tokens=read, completion_tokens=0, total_tokens=read,
                     prompt_tokens_details=details(cached, self.requests))  # fmt: skip

    def timings(self, request: Request | None = None) -> Timings:
        """Where the time of a vector, or of all, went so far."""
        asked = self.requests if request is None else (request,)
        clocks = [clock for each in asked for clock in self._stream.clocks(each.id)]
        return timings(clocks, sum(len(each.prompt) for each in asked))

    @property
    def finish_reasons(self) -> list[str | None]:
        """Why each ended, if it did."""
        return [reason for request in self.requests for reason in self.finish_reasons_of(request)]

    def finish_reasons_of(self, request: Request) -> list[str | None]:
        """Reasons why one request ended."""
        return [clock.finish_reason for clock in self._stream.clocks(request.id)]


async def create_embedding(service: Service, request: HttpRequest) -> Response:
    """Return embeddings of one or several texts or lists of token ids."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: EmbeddingRequest)
    pooling = service.engine.info.pooling
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)
    if body.encoding_format not in (None, "float", "base64"):
        raise BadRequest("encoding_format: must be float or base64", param="encoding_format")
    params.validate(pooling)
    check_embeds(pooling)
    given = await off_loop(ID_BYTES * len(body.input), listed, service, body.input, "input")
    found = await answers(service, request, body, given, arrival, "input", body.add_special_tokens is not False)

    def written() -> bytes:
        rows = [embedding(pooling, vector_of(output), params) for _, output in found]
        plain = body.encoding_format != "base64"
        data = [EmbeddingData(index=i, embedding=row.tolist() if plain else base64.b64encode(row.tobytes()).decode())
                for i, row in enumerate(rows)]  # fmt: skip
        return msgspec.json.encode(Embeddings(data=data, model=service.answering(body.model), usage=_usage(found)))

    return _json(await off_loop((ROW_BYTES + NUMBER_BYTES * pooling.width) * len(found), written))


async def create_score(service: Service, request: HttpRequest) -> Response:
    """Score how well two texts match, by cosine similarity or by a model with a classification head."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: ScoreRequest)
    left, right = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
    if len(left) not in (1, len(right)):
        raise BadRequest(
            f"text_1: has {len(left)} texts for {len(right)} of text_2; send one, or one each", param="text_1"
        )
    found, scores = await _scored(service, request, body, left, right, arrival, "text_2")
    data = [ScoreData(index=i, score=score) for i, score in enumerate(scores)]
    reply = Scores(id=f"score-{random_id()}", created=int(time.time()), model=service.answering(body.model),
                   data=data, usage=_usage(found))  # fmt: skip
    return _json(msgspec.json.encode(reply))


async def create_rerank(service: Service, request: HttpRequest) -> Response:
    """Rank documents by how well they match a query, best first. Documents with equal scores keep their order."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: RerankRequest)
    documents = _texts(body.documents, "documents")
    check_ranges(body, ("top_n",))
    found, scores = await _scored(service, request, body, [body.query], documents, arrival, "documents")
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    shows = body.return_documents is not False
    results = [Ranked(index=i, relevance_score=scores[i], document=RankedText(text=documents[i]) if shows else UNSET)
               for i in order]  # fmt: skip
    reply = Ranking(
        id=f"rerank-{random_id()}", model=service.answering(body.model), results=results, usage=_usage(found)
    )
    return _json(msgspec.json.encode(reply))


async def _scored(
    service: Service,
    request: HttpRequest,
    body: VectorFields,
    left: list[str],
    right: list[str],
    arrival: float,
    name: str,
) -> tuple[Answers, list[float]]:
    """What came of one `left` or as many as `right`, which came as the field `name`, and a score for each `right`."""
    pooling, copies = service.engine.info.pooling, len(right) if len(left) == 1 else 1
    check_scores(pooling)
    if pooling.labels:
        ids = await encode_prompts(service, [*left, *right], True, None)
        pairs = zip(ids[: len(left)] * copies, ids[len(left) :], strict=True)
        found = await answers(service, request, body, [[*one, *other] for one, other in pairs], arrival, name)
        return found, [relevance(pooling, vector_of(output)) for _, output in found]
    found = await answers(service, request, body, [*left, *right], arrival, name)
    rows: list[Vector] = [vector_of(output) for _, output in found]
    return found, [cosine(a, b) for a, b in zip(rows[: len(left)] * copies, rows[len(left) :], strict=True)]


def check_embeds(pooling: Pooling) -> None:
    """`BadRequest` for a model of classes."""
    if pooling.labels and not pooling.refused:
        raise BadRequest("this model classifies, and makes no embeddings; use /v1/score or /v1/rerank")


async def answers(
    service: Service,
    request: HttpRequest,
    body: VectorFields,
    given: Prompts,
    arrival: float,
    name: str,
    special: bool = True,
) -> Answers:
    """A vector for each prompt, all of which run at one time."""
    tenant: Tenant = request.state.tenant
    service.check_model(body.model)
    if body.priority and service.config.scheduler.scheduling_policy != "priority":
        raise BadRequest(
            "priority: has no effect unless the server runs --scheduling-policy priority", param="priority"
        )
    info = service.engine.info
    with service.engine.reserve(len(given), tenant.called(body.user), tenant.max_sequences):
        prompts = await encode_prompts(service, given, special, name if body.truncate_prompt_tokens is None else None)
        own = {
            "arrival": arrival,
            "cache_salt": tenant.salt + (body.cache_salt or ""),
            "tenant": tenant.called(body.user),
            "weight": tenant.weight,
            "priority": body.priority or 0,
        }
        requests = list[Request]()
        async for ids in in_turns(prompts):
            cut = truncate(ids, body.truncate_prompt_tokens, info.max_model_len)
            requests.append(replace(await off_loop(ID_BYTES * len(cut), pooled_request, info, cut, name), **own))
    pooled, exchange = Pooled(service.engine, requests), request.state.exchange
    exchange.generation, exchange.model = pooled, service.answering(body.model)
    async with cancel_on_disconnect(request.receive):
        return await pooled.all()


def _texts(given: Texts, field: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise BadRequest(f"{field}: must not be empty", param=field)
    return texts


def _usage(found: Sequence[tuple[Request, Output]]) -> VectorUsage:
    read = sum(len(request.prompt) for request, _ in found)
    cached = CachedTokens(cached_tokens=sum(output.cached_tokens for _, output in found))
    return VectorUsage(prompt_tokens=read, total_tokens=read, prompt_tokens_details=cached)


def _json(body: bytes) -> Response:
    return JsonResponse(body)


def _routes(paths: tuple[str, ...], handler: Handler, body: Kinds, reply: Kinds, operation: str | None) -> list[Route]:
    """Make one route for each of the paths."""
    return [
        Route("POST", path, handler, body, reply, generates=True, operation=operation, batchable=True) for path in paths
    ]


ROUTES = (
    *_routes(("/v1/embeddings",), create_embedding, (EmbeddingRequest,), (Embeddings,), "embeddings"),
    *_routes(("/v1/score", "/score"), create_score, (ScoreRequest,), (Scores,), None),
    *_routes(("/v1/rerank", "/rerank"), create_rerank, (RerankRequest,), (Ranking,), None),
)
