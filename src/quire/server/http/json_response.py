"""JSON bodies of replies: they end with a newline, so that a terminal's prompt does not follow the last brace."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class JsonResponse(Response):
    """Encoded JSON and a newline."""

    media_type = "application/json"

    def render(self, content: bytes) -> bytes:
        """The body of the response."""
        return content + b"\n"


class PartsResponse(Response):
    """JSON in `parts` and a newline, each sent when the client has taken most of those before."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = [*parts, b"\n"]
        super().__init__(headers={"content-length": str(sum(map(len, self._parts)))}, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them (ASGI), and keep none that was sent."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._parts.reverse()
        while self._parts:
            part = self._parts.pop()
            await send({"type": "http.response.body", "body": part, "more_body": bool(self._parts)})
