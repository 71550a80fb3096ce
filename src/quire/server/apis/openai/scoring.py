"""POST /v1/score, /v1/rerank and /v2/rerank: vLLM's, Jina's and Cohere's shapes over vectors and classes."""

from __future__ import annotations

import time
from collections.abc import Callable
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
from quire.core.request import random_id
from quire.features.pooling.edge_embedding import (
    Vector,
    check_scores,
    cosine,
    relevance,
    task_prompt,
    usual_vector,
    vector_of,
)
from quire.server.apis.openai.prompts import encode_pairs, encode_prompts, encode_shortened, shortened_texts
from quire.server.apis.openai.vectors import (
    Answers,
    Given,
    VectorFields,
    VectorUsage,
    answers,
    texts_of,
    usage_of,
    vector_routes,
)
from quire.server.http.body import read_struct
from quire.server.http.json_response import JsonResponse
from quire.server.service import Service

Texts = str | list[str]
TopN = Annotated[int, within(ge=1)]
Scores = Callable[[Pooling, Vector], float]
"""The score of a pair by the logits of classes."""


class ScoreRequest(VectorFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score: one text and many, or as many of each."""

    text_1: Annotated[Texts, about("A text, or a list as long as text_2.")]
    text_2: Annotated[Texts, about("A text, or a list.")]


class DocumentText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankRequest(VectorFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank."""

    query: Annotated[str, about("The query to rank documents by.")]
    documents: Annotated[list[str | DocumentText], about("The documents to rank: texts, or objects with a text.")]
    top_n: Annotated[TopN | None, about("Number of documents to return. The default is all.")] = None
    return_documents: Annotated[
        bool | None, about("Return the texts with their scores. The default is true, and for /v2/rerank false.")
    ] = None
    max_tokens_per_doc: Annotated[
        TopN | None, about("Use only this many first tokens of a document. The default is all.")
    ] = None


class ScoreData(msgspec.Struct, kw_only=True):
    """How well a pair fits."""

    index: int
    score: float
    object: str = "score"


class ScoreReply(msgspec.Struct, kw_only=True):
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


async def create_score(service: Service, request: HttpRequest) -> Response:
    """Score how well two texts match, by cosine similarity or by a model with a classification head."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: ScoreRequest)
    left, right = texts_of(body.text_1, "text_1"), texts_of(body.text_2, "text_2")
    if len(left) not in (1, len(right)):
        raise BadRequest(
            f"text_1: has {len(left)} texts for {len(right)} of text_2; send one, or one each", param="text_1"
        )
    found, scores = await Pairs(left, right, "text_2").scored(service, request, body, arrival)
    data = [ScoreData(index=i, score=score) for i, score in enumerate(scores)]
    reply = ScoreReply(id=f"score-{random_id()}", created=int(time.time()), model=service.answering(body.model),
                       data=data, usage=usage_of(found))  # fmt: skip
    return JsonResponse(msgspec.json.encode(reply))


async def create_rerank(service: Service, request: HttpRequest) -> Response:
    """Rank documents by how well they match a query, best first. Documents with equal scores keep their order."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: RerankRequest)
    return await rank(service, request, body, arrival, shows=body.return_documents is not False)


async def create_rerank_alone(service: Service, request: HttpRequest) -> Response:
    """Rank documents in Cohere's newer format, best first. The reply has their places and no texts."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: RerankRequest)
    return await rank(service, request, body, arrival, shows=body.return_documents is True)


async def rank(service: Service, request: HttpRequest, body: RerankRequest, arrival: float, shows: bool) -> Response:
    """The reply to `body`; `shows`: with the documents."""
    documents = texts_of([each if isinstance(each, str) else each.text for each in body.documents], "documents")
    check_ranges(body, ("top_n", "max_tokens_per_doc"))
    read = documents
    if body.max_tokens_per_doc is not None:
        read = await shortened_texts(service, documents, body.max_tokens_per_doc)
    found, scores = await Pairs([body.query], read, "documents").scored(service, request, body, arrival)
    results = [Ranked(index=i, relevance_score=scores[i], document=RankedText(text=documents[i]) if shows else UNSET)
               for i in best_first(scores)[: body.top_n]]  # fmt: skip
    reply = Ranking(
        id=f"rerank-{random_id()}", model=service.answering(body.model), results=results, usage=usage_of(found)
    )
    return JsonResponse(msgspec.json.encode(reply))


def best_first(scores: list[float]) -> list[int]:
    """The places of `scores`, the highest first; of equal ones the earlier."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])


class Pairs:
    """Pairs of one `left` text, or as many as `right`, with each `right`, which came as the field `name`.

    `fit`: what is longer than the model reads is cut; `last`: so that the ends of texts stay.
    """

    def __init__(self, left: list[str], right: list[str], name: str, fit: bool = False, last: bool = False) -> None:
        self.copies = len(right) if len(left) == 1 else 1
        self.left, self.right, self.name, self.fit, self.last = left, right, name, fit, last

    async def scored(
        self, service: Service, request: HttpRequest, body: VectorFields, arrival: float, score: Scores = relevance
    ) -> tuple[Answers, list[float]]:
        """What came of them, and a score for each: of a model of classes by `score`, else a cosine."""
        pooling = service.engine.info.pooling
        check_scores(pooling)
        if pooling.labels:
            found = await self._classified(service, request, body, arrival, pooling)
            return found, [score(pooling, vector_of(output)) for _, output in found]
        task = task_prompt(pooling, None)
        count, given = len(self.left), [task + each for each in (*self.left, *self.right)]
        if self.fit:
            ids = await encode_shortened(service, given, service.engine.info.max_model_len, self.last)
        found = await answers(service, request, body, Given(ids if self.fit else given, arrival, self.name))
        rows: list[Vector] = [usual_vector(pooling, output) for _, output in found]
        return found, [cosine(a, b) for a, b in zip(rows[:count] * self.copies, rows[count:], strict=True)]

    async def _classified(
        self, service: Service, request: HttpRequest, body: VectorFields, arrival: float, pooling: Pooling
    ) -> Answers:
        """The logits of pairs: of texts as the tokenizer joins two, or behind each other."""
        if pooling.pairs:
            keep = -1 if self.fit else body.truncate_prompt_tokens
            pairs = list(zip(self.left * self.copies, self.right, strict=True))
            joined = await encode_pairs(service, pairs, keep, self.last)
            whole, seconds = replace(body, truncate_prompt_tokens=None), [second for _, second in joined]
            given = Given([ids for ids, _ in joined], arrival, self.name, seconds=seconds)
            return await answers(service, request, whole, given)
        ids = await encode_prompts(service, [*self.left, *self.right], True, None)
        count = len(self.left)
        behind = [self.behind(one, other, service.engine.info.max_model_len)
                  for one, other in zip(ids[:count] * self.copies, ids[count:], strict=True)]  # fmt: skip
        return await answers(service, request, body, Given(behind, arrival, self.name))

    def behind(self, one: list[int], other: list[int], limit: int) -> list[int]:
        """The tokens of both; of `other` no more than have room if the pair is to fit."""
        room = limit - len(one)
        if not self.fit or room < 1 or len(other) <= room:
            return [*one, *other]
        return [*one, *(other[-room:] if self.last else other[:room])]


ROUTES = (
    *vector_routes(("/v1/score", "/score"), create_score, (ScoreRequest,), (ScoreReply,), None),
    *vector_routes(("/v1/rerank",), create_rerank, (RerankRequest,), (Ranking,), None),
    *vector_routes(("/v2/rerank",), create_rerank_alone, (RerankRequest,), (Ranking,), None),
)
