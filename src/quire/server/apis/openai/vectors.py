"""Vectors of one HTTP request, whatever API it is of: prompts run at one time, and what they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec.structs import replace
from starlette.requests import Request as HttpRequest

from quire.core.errors import BadRequest
from quire.core.options.fields import about
from quire.core.pooling import Pooling, PoolingKind
from quire.core.request import Output, Request
from quire.engine.frontend.async_engine import AsyncEngine
from quire.engine.frontend.request_times import Timings, timings
from quire.features.pooling.edge_embedding import pooled_request
from quire.features.pooling.edge_sparse import check_dense
from quire.server.apis.fields import PRIORITY, CacheSaltField, ModelField, UserField
from quire.server.apis.openai.prompts import Prompts, encode_prompts, encode_shortened, kept_tokens, listed
from quire.server.apis.openai.protocol import Prompt
from quire.server.http.body import ID_BYTES, in_turns, off_loop
from quire.server.http.disconnect import cancel_on_disconnect
from quire.server.http.routes import Handler, Kinds, Route
from quire.server.keys import Tenant
from quire.server.service import Service
from quire.server.text_generation.reports import CachedTokens, Usage, details

NUMBER_BYTES = 20
"""Of a number in JSON, about."""
ROW_BYTES = 256
"""Of text, which it takes as long as to make a vector of what the engine gave."""


class VectorFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What bodies that ask for vectors, scores and classes have in common."""

    model: ModelField = None
    user: UserField = None
    truncate_prompt_tokens: Annotated[
        int | None,
        about("Use only this many first tokens of a text, special tokens among them; -1: all that the model reads."),
    ] = None
    priority: Annotated[int | None, PRIORITY] = None
    cache_salt: CacheSaltField = None


class VectorUsage(msgspec.Struct, kw_only=True):
    """Tokens read; nothing is written."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


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


def check_embeds(pooling: Pooling) -> None:
    """`BadRequest` for a model of classes, or of sparse vectors."""
    check_dense(pooling)
    if pooling.labels and not pooling.refused:
        raise BadRequest("this model classifies, and makes no embeddings; use /v1/classify, /v1/score or /v1/rerank")


@dataclass(frozen=True, slots=True)
class Given:
    """Prompts that came as the field `name`, at the time `arrival` (`time.monotonic`).

    `special`: texts get the tokenizer's special tokens. `seconds`: of each the `second` of its `Request`; () = none has
    one. `kind`: how rows become vectors; None = as the model's files say.
    """

    prompts: Prompts
    arrival: float
    name: str
    special: bool = True
    seconds: Sequence[int] = ()
    kind: PoolingKind | None = None


async def prompts_of(service: Service, given: Prompt, name: str, task: str) -> Prompts:
    """What came as the field `name`: texts with the prompt of their `task` before them, or token ids."""
    found = await off_loop(ID_BYTES * len(given), listed, service, given, name)
    return [task + each if isinstance(each, str) else each for each in found] if task else found  # type: ignore[return-value]


async def answers(
    service: Service,
    request: HttpRequest,
    body: VectorFields,
    given: Given,
) -> Answers:
    """A vector for each prompt, all of which run at one time."""
    tenant: Tenant = request.state.tenant
    service.check_model(body.model)
    if body.priority and service.config.scheduler.scheduling_policy != "priority":
        raise BadRequest(
            "priority: has no effect unless the server runs --scheduling-policy priority", param="priority"
        )
    info = service.engine.info
    with service.engine.reserve(len(given.prompts), tenant.called(body.user), tenant.max_sequences):
        if (keep := body.truncate_prompt_tokens) is None:
            prompts = await encode_prompts(service, given.prompts, given.special, given.name)
        else:
            most = kept_tokens(keep, info.max_model_len)
            prompts = await encode_shortened(service, given.prompts, most, special=given.special)
        own = {
            "arrival": given.arrival,
            "cache_salt": tenant.salt + (body.cache_salt or ""),
            "tenant": tenant.called(body.user),
            "weight": tenant.weight,
            "priority": body.priority or 0,
            "adapter": service.adapter(body.model),
        }
        requests = list[Request]()
        async for number, ids in in_turns(list(enumerate(prompts))):
            second = given.seconds[number] if given.seconds else 0
            made = await off_loop(ID_BYTES * len(ids), pooled_request, info, ids, given.name, second)
            requests.append(replace(made, **own, pooling=given.kind or made.pooling))
    pooled, exchange = Pooled(service.engine, requests), request.state.exchange
    exchange.generation, exchange.model = pooled, service.answering(body.model)
    async with cancel_on_disconnect(request.receive):
        return await pooled.all()


def texts_of(given: str | list[str], field: str) -> list[str]:
    """The texts of a field that has one or several; `BadRequest` where there are none."""
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise BadRequest(f"{field}: must not be empty", param=field)
    return texts


def usage_of(found: Answers) -> VectorUsage:
    """Tokens that were read for these."""
    read = sum(len(request.prompt) for request, _ in found)
    cached = CachedTokens(cached_tokens=sum(output.cached_tokens for _, output in found))
    return VectorUsage(prompt_tokens=read, total_tokens=read, prompt_tokens_details=cached)


def vector_routes(
    paths: tuple[str, ...], handler: Handler, body: Kinds, reply: Kinds, operation: str | None
) -> list[Route]:
    """Make one route for each of the paths."""
    return [
        Route("POST", path, handler, body, reply, generates=True, operation=operation, batchable=True) for path in paths
    ]
