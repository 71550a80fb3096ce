"""/v1/responses: OpenAI's Responses API over chat completions, with a bounded memory of what was answered."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import BadRequest, NotFound, QuireError
from quire.server.apis.answer import respond
from quire.server.apis.openai.chat import submit_chat
from quire.server.apis.openai.responses_answer import ResponseAnswer, ResponseReply
from quire.server.apis.openai.responses_bodies import FIELD_NAMES, Item, ResponsesRequest, chat_of, ignored_of, items_of
from quire.server.apis.openai.sampling_params import check_body, mapped_fields
from quire.server.apis.openai.tools import warn_of_hidden_tools
from quire.server.http.body import LARGE, off_loop, off_read, read_struct
from quire.server.http.dialects import RESPONSES
from quire.server.http.exchange import Exchange
from quire.server.http.gateway import ServerState
from quire.server.http.json_response import JsonResponse
from quire.server.http.routes import SSE, Route
from quire.server.service import Service
from quire.server.text_generation.generation import Generated
from quire.server.text_generation.output_parsing import OutputParsing

MAX_COUNT = 1000
MAX_TENANT_BYTES = 16 << 20
MAX_BYTES = 128 << 20


class Stored(NamedTuple):
    """A response as clients read it, and the items of the conversation up to its end; both are JSON."""

    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.items)


class ResponseStore:
    """Responses by tenant and id: nobody finds another's. `count` and `tenant_bytes` bound one tenant, `total` all."""

    def __init__(self, count: int = MAX_COUNT, tenant_bytes: int = MAX_TENANT_BYTES, total: int = MAX_BYTES) -> None:
        self._count, self._tenant_bytes, self._total = count, tenant_bytes, total
        self._held: dict[str, OrderedDict[str, Stored]] = {}
        self._sizes: dict[str, int] = {}

    def put(self, tenant: str, name: str, stored: Stored) -> bool:
        """Keep it; False where it alone is too large."""
        self.drop(tenant, name)
        if stored.size > min(self._tenant_bytes, self._total):
            return False
        self._held.setdefault(tenant, OrderedDict())[name] = stored
        self._sizes[tenant] = self._sizes.get(tenant, 0) + stored.size
        while len(self._held[tenant]) > self._count or self._sizes[tenant] > self._tenant_bytes:
            self.drop(tenant, next(iter(self._held[tenant])))
        while sum(self._sizes.values()) > self._total:
            most = max(self._sizes, key=lambda each: (self._sizes[each], each != tenant))
            self.drop(most, next(iter(self._held[most])))
        return name in self._held.get(tenant, ())

    def get(self, tenant: str, name: str) -> Stored | None:
        """What was kept, if it still is."""
        held = self._held.get(tenant)
        return None if held is None else held.get(name)

    def drop(self, tenant: str, name: str) -> bool:
        """Whether there was one to forget."""
        held = self._held.get(tenant)
        if held is None or (found := held.pop(name, None)) is None:
            return False
        self._sizes[tenant] -= found.size
        if not held:
            del self._held[tenant], self._sizes[tenant]
        return True


_encode = msgspec.json.encode
_WALKED = LARGE + 1
"""A conversation that goes on may have any size."""


class Deleted(msgspec.Struct, kw_only=True):
    """Response of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


@dataclass
class Responses:
    """What is remembered: responses that ended, and those that are made in the background, by tenant and id."""

    store: ResponseStore = field(default_factory=ResponseStore)
    made: dict[tuple[str, str], _Answer] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def before(self, tenant: str, name: str | None) -> list[Item]:
        """The conversation that a response is to follow."""
        if name is None:
            return []
        param = "previous_response_id"
        if (tenant, name) in self.made:
            raise BadRequest(f"{param}: {name[:100]!r} is not done yet; ask again when it is", param=param)
        stored = self.store.get(tenant, name)
        if stored is None:
            raise NotFound(f"{param}: {name[:100]!r} is not stored here any more; send all items", param=param)
        found: list[Item] = msgspec.json.decode(stored.items)
        return found


class _Answer(ResponseAnswer):
    """Remembered when it ends, if its request allows that."""

    def __init__(
        self, service: Service, generation: Generated, parsing: OutputParsing, body: ResponsesRequest, asked: _Asked
    ) -> None:
        super().__init__(service, generation, parsing, body, store=asked.store)
        self._asked = asked

    def finish(self) -> None:
        """All was said."""
        super().finish()
        self.remember()

    def remember(self) -> None:
        """Keep it, with all items of the conversation."""
        if self._asked.store:
            items = _encode([*self._asked.items, *self.output()])
            self._asked.responses.store.put(self._asked.tenant, self.id, Stored(_encode(self.whole()), items))

    async def reply(self) -> list[bytes]:
        """The whole response."""
        self.finish()
        return await super().reply()


@dataclass(frozen=True, slots=True)
class _Asked:
    """Whose a response is, the items before its own, and whether it is remembered."""

    responses: Responses
    tenant: str
    items: list[Item]
    store: bool


async def create_response(service: Service, request: Request) -> Response:
    """Create a response of OpenAI's Responses API: whole, as a stream of events, or in the background."""
    arrival = time.monotonic()
    body = await read_struct(request, service.options, lambda _: ResponsesRequest)
    request.state.ignored.extend(await off_read(request, ignored_of, body))
    store = body.store is not False
    if body.background and (body.stream or not store):
        named = "stream" if body.stream else "store"
        raise BadRequest(f"{named}: a response in the background is stored, and read by its id", param=named)
    tenant, memory = request.state.tenant, responses_of(request)
    before = memory.before(tenant.name, body.previous_response_id)
    chat = await off_loop(_WALKED if before else request.state.exchange.body.size, chat_of, body, before)
    with mapped_fields(FIELD_NAMES):
        check_body(service, chat)
        await warn_of_hidden_tools(service, request, chat)
        generation, parsing = await submit_chat(service, chat, arrival, tenant)
    asked = _Asked(memory, tenant.name, [*before, *items_of(body)], store)
    answer = _Answer(service, generation, parsing, body, asked)
    if not body.background:
        return await respond(request, answer)
    answer.request_id = request.state.exchange.request_id
    memory.made[tenant.name, answer.id] = answer
    left = request.state.exchange.left(generation, answer.model)
    task = asyncio.create_task(_make(request.app.state.server, answer, asked, left))
    memory.tasks.add(task)
    task.add_done_callback(memory.tasks.discard)
    return _json(answer.whole())


async def _make(server: ServerState, answer: _Answer, asked: _Asked, left: Exchange) -> None:
    """Answer in the background: counted as a request, so that a server that drains waits for it.

    Who watches is told at its end what it took.
    """
    server.active += 1
    left.status = 500
    try:
        async for pieces in answer.generation.pieces():
            answer.add(pieces)
        await answer.check()
        if answer.status == "in_progress":
            answer.finish()
        left.status = 200
    except QuireError as error:
        answer.status, answer.error = "failed", error
        left.status = error.status
        answer.remember()
    finally:
        server.active -= 1
        answer.generation.close()
        asked.responses.made.pop((asked.tenant, answer.id), None)
        left.end()
        server.ended(left)


async def read_response(server: ServerState, request: Request) -> Response:
    """Return a stored response, or one that runs in the background."""
    if request.query_params.get("stream") == "true":
        raise BadRequest("stream: a response that is stored cannot be streamed again", param="stream")
    memory, key = responses_of(request), _key(request)
    if key in memory.made:
        return _json(memory.made[key].whole())
    stored = memory.store.get(*key)
    if stored is None:
        raise _unknown(key[1])
    return JsonResponse(stored.response)


async def cancel_response(server: ServerState, request: Request) -> Response:
    """Cancel a response that runs in the background."""
    memory, key = responses_of(request), _key(request)
    answer = memory.made.pop(key, None)
    if answer is None:
        if memory.store.get(*key) is None:
            raise _unknown(key[1])
        raise BadRequest("only a response that is made in the background can be cancelled; this one is done")
    answer.status = "cancelled"
    answer.generation.close()
    answer.remember()
    return _json(answer.whole())


async def delete_response(server: ServerState, request: Request) -> Response:
    """Delete a stored response."""
    key = _key(request)
    if not responses_of(request).store.drop(*key):
        raise _unknown(key[1])
    return _json(Deleted(id=key[1]))


def responses_of(request: Request) -> Responses:
    """The memory of the server that `request` came to."""
    found: Responses = request.app.state.responses
    return found


def _key(request: Request) -> tuple[str, str]:
    return request.state.tenant.name, request.path_params["response_id"]


def _unknown(name: str) -> NotFound:
    return NotFound(f"response_id: {name[:100]!r} is not stored here", param="response_id")


def _json(value: ResponseReply | Deleted) -> Response:
    data: Any = _encode(value)
    return JsonResponse(data)


_ONE = {404: "No such response", 429: "The queue, or the rate of the key, is full", 503: "Draining, or no engine"}
ROUTES = (
    Route(
        "POST",
        "/v1/responses",
        create_response,
        body=(ResponsesRequest,),
        reply=(ResponseReply,),
        stream=SSE,
        dialect=RESPONSES,
        generates=True,
        operation="chat",
    ),
    Route(
        "GET",
        "/v1/responses/{response_id}",
        read_response,
        reply=(ResponseReply,),
        dialect=RESPONSES,
        per_model=False,
        errors=_ONE,
    ),
    Route(
        "DELETE",
        "/v1/responses/{response_id}",
        delete_response,
        reply=(Deleted,),
        dialect=RESPONSES,
        per_model=False,
        errors=_ONE,
    ),
    Route(
        "POST",
        "/v1/responses/{response_id}/cancel",
        cancel_response,
        reply=(ResponseReply,),
        dialect=RESPONSES,
        per_model=False,
        errors=_ONE,
    ),
)
