"""What a request over HTTP is answered with: one reply, or a stream. Each API has its own shapes of both."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import QuireError
from quire.server.http.dialects import OPENAI, Dialect
from quire.server.http.disconnect import cancel_on_disconnect
from quire.server.http.json_response import PartsResponse
from quire.server.http.sse import EventStream
from quire.server.service import Service
from quire.server.text_generation.generation import Generated, Piece
from quire.server.text_generation.reports import Report
from quire.text.structured.schema_checker import PROCESSES, SchemaError

_CHECKING = ThreadPoolExecutor(PROCESSES, "quire-check")


class Answer(ABC):
    """Made of the pieces of `generation`. `model`: its name in the answer; `request_id`: of the header x-request-id;
    `began`: when that had been read, of `time.monotonic`."""

    dialect: ClassVar[Dialect] = OPENAI

    def __init__(self, service: Service, generation: Generated, model: str, stream: bool) -> None:
        self.service = service
        self.generation = generation
        self.model = model
        self.stream = stream
        self.request_id = ""
        self.began = 0.0
        self.schema_errors: list[SchemaError] = []

    @abstractmethod
    async def events(self, pieces: list[Piece]) -> bytes:
        """The messages of one step."""

    @abstractmethod
    def tail(self) -> bytes:
        """What follows those of the last."""

    @abstractmethod
    def add(self, pieces: list[Piece]) -> None:
        """Collect for `reply`."""

    @abstractmethod
    async def reply(self) -> list[bytes]:
        """The whole response, in parts."""

    def said(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Text of each choice, and the names and arguments of calls."""
        return [(self.generation.text(choice), []) for choice in range(self.generation.count)]

    async def check(self) -> None:
        """Check what was said, when it is whole, by the schemas that were asked for."""
        checks = self.generation.checks
        if not checks:
            return
        said = self.said()
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(_CHECKING, lambda: [checks.errors(*each, i) for i, each in enumerate(said)])
        self.schema_errors = [error for errors in found for error in errors]
        self.service.http.checked(sum(map(bool, found)))

    @property
    def verdict(self) -> Report | UnsetType:
        """Report that an answer is not all that the schemas ask for; nothing where it is."""
        if not self.schema_errors:
            return UNSET
        return Report(request_id=self.request_id, schema_errors=self.schema_errors)

    def failed(self, error: QuireError) -> bytes:
        """The end of a stream that failed."""
        return self.dialect.event(error)


async def respond(request: Request, answer: Answer) -> Response:
    """What was generated, whole or as a stream. Of the body little is left: images have gone to the engine."""
    generation, exchange = answer.generation, request.state.exchange
    exchange.generation, exchange.model = generation, answer.model
    answer.request_id, answer.began = exchange.request_id, exchange.began
    exchange.body.release()
    if answer.stream:
        return EventStream(answer, answer.service.options.stream_ping_interval)
    try:
        async with cancel_on_disconnect(request.receive):
            async for pieces in generation.pieces():
                answer.add(pieces)
            await answer.check()
    finally:
        generation.close()
    return PartsResponse(await answer.reply())
