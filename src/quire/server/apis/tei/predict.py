"""TEI's classes and ranks: /predict and /rerank, whose path has Jina's and Cohere's body beside TEI's."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest
from quire.core.pooling import Pooling
from quire.features.pooling.edge_embedding import (
    Vector,
    check_classifies,
    likely_relevance,
    probabilities,
    raw_relevance,
    vector_of,
)
from quire.server.apis.openai.prompts import encode_pairs, encode_prompts
from quire.server.apis.openai.scoring import Pairs, Ranking, RerankRequest, best_first, rank
from quire.server.apis.openai.vectors import NUMBER_BYTES, ROW_BYTES, Given, VectorFields, answers, texts_of
from quire.server.apis.tei.bodies import TeiPredictRequest, TeiRerankRequest, fitted
from quire.server.http.body import off_loop, read_struct
from quire.server.http.dialects import TEI
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import Route
from quire.server.service import Service


class Prediction(msgspec.Struct, kw_only=True):
    """A class and its score."""

    score: float
    label: str


class TeiRank(msgspec.Struct, kw_only=True):
    """A text's place in the list that was sent, and its score."""

    index: int
    text: str | UnsetType = UNSET
    score: float


async def predict(service: Service, request: Request) -> Response:
    """Return the classes of a text, a pair, or several of them in TEI's format, the likeliest first."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: TeiPredictRequest)
    pooling = service.engine.info.pooling
    check_classifies(pooling)
    sequences, single = sequences_of(body.inputs)
    prompts, seconds = await _encoded(service, sequences, body, pooling)
    given = Given(prompts, arrival, "inputs", seconds=seconds)
    found = await answers(service, request, VectorFields(), given)

    def written() -> bytes:
        made = [_predictions(pooling, vector_of(output), bool(body.raw_scores)) for _, output in found]
        return msgspec.json.encode(made[0] if single else made)

    return JsonResponse(await off_loop((ROW_BYTES + 2 * NUMBER_BYTES * pooling.width) * len(found), written))


def sequences_of(inputs: str | list[str | list[str]]) -> tuple[list[list[str]], bool]:
    """The texts and pairs of `inputs`, and whether it is one alone. `BadRequest` naming what is neither."""
    if isinstance(inputs, str):
        return [[inputs]], True
    single = bool(inputs) and isinstance(inputs[0], str)
    found: list[list[str]] = []
    for i, each in enumerate([inputs] if single else inputs):
        at = "inputs" if single else f"inputs[{i}]"
        texts = [text for text in each if isinstance(text, str)] if isinstance(each, list) else []
        if not 1 <= len(texts) <= 2 or len(texts) < len(each):
            raise BadRequest(f"{at}: must be a text or a pair of texts, in a list", param=at)
        found.append(texts)
    if not found:
        raise BadRequest("inputs: must not be empty", param="inputs")
    return found, single


async def _encoded(
    service: Service, sequences: list[list[str]], body: TeiPredictRequest, pooling: Pooling
) -> tuple[list[list[int]], list[int]]:
    """Token ids of texts and pairs, and where the second text of each begins (`Request.second`)."""
    name = None if body.truncate else "inputs"
    texts = [each[0] for each in sequences if len(each) == 1]
    alone = iter(await encode_prompts(service, await fitted(service, texts, body), True, name) if texts else ())
    pairs = [(each[0], each[1]) for each in sequences if len(each) == 2]
    if pooling.pairs:
        joined = iter(await encode_pairs(service, pairs, -1 if body.truncate else None, body.last))
    else:
        ids = iter(await encode_prompts(service, [text for pair in pairs for text in pair], True, None))
        behind = Pairs([], [], "inputs", bool(body.truncate), body.last)
        limit = service.engine.info.max_model_len
        joined = iter([(behind.behind(one, next(ids), limit), 0) for one in ids])
    made = [(next(alone), 0) if len(each) == 1 else next(joined) for each in sequences]
    return [ids for ids, _ in made], [second for _, second in made]


def _predictions(pooling: Pooling, logits: Vector, raw: bool) -> list[Prediction]:
    scores: list[float] = (logits if raw else probabilities(pooling, logits)).tolist()
    return [Prediction(score=scores[i], label=pooling.labels[i]) for i in best_first(scores)]


async def rerank(service: Service, request: Request) -> Response:
    """Rank texts by how well they match a query, best first: in TEI's format for texts, in Jina's for documents."""
    arrival = time.monotonic()

    def chosen(value: Any) -> type[RerankRequest | TeiRerankRequest]:
        if not isinstance(value, dict) or "texts" not in value or "documents" in value:
            return RerankRequest
        request.state.exchange.dialect = TEI
        return TeiRerankRequest

    body = await read_struct(request, service.options, chosen)
    if isinstance(body, RerankRequest):
        return await rank(service, request, body, arrival, shows=body.return_documents is not False)
    texts = texts_of(body.texts, "texts")
    pairs = Pairs([body.query], texts, "texts", bool(body.truncate), body.last)
    score = raw_relevance if body.raw_scores else likely_relevance
    _, scores = await pairs.scored(service, request, VectorFields(), arrival, score)
    ranks = [TeiRank(index=i, score=scores[i], text=texts[i] if body.return_text else UNSET)
             for i in best_first(scores)]  # fmt: skip
    return JsonResponse(msgspec.json.encode(ranks))


ROUTES = (
    Route(
        "POST",
        "/predict",
        predict,
        body=(TeiPredictRequest,),
        reply_type=list[Prediction | list[Prediction]],
        dialect=TEI,
        generates=True,
    ),
    Route(
        "POST",
        "/rerank",
        rerank,
        body=(RerankRequest, TeiRerankRequest),
        reply=(Ranking,),
        reply_type=list[TeiRank],
        generates=True,
        batchable=True,
    ),
)
