"""How each API says errors and how its streams lie on the wire; which API a path belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.core.errors import QuireError
from quire.server.http.errors import encode_error

SSE = b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Dialect:
    """`error`: the body of a response that is one. In a stream it stands between `lead` and `trail`.

    `ping`: what clients skip in a stream. `done`: ends one that went well.
    """

    error: Callable[[QuireError], bytes]
    media_type: bytes = SSE
    ping: bytes = b": ping\n\n"
    done: bytes = b""
    lead: bytes = b"event: error\ndata: "
    trail: bytes = b"\n\n"

    def event(self, error: QuireError) -> bytes:
        """The end of a stream that failed."""
        return self.lead + self.error(error) + self.trail


def _anthropic(error: QuireError) -> bytes:
    kind = {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}.get(error.status, error.kind)
    if error.status == 500:
        kind = "api_error"
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


def _llama_cpp(error: QuireError) -> bytes:
    fields: dict[str, Any] = {"code": error.status, "message": error.message, "type": error.kind}
    return msgspec.json.encode({"error": fields})


def _ollama(error: QuireError) -> bytes:
    return msgspec.json.encode({"error": error.message})


def _tgi(error: QuireError) -> bytes:
    kind = "validation" if error.status < 429 else "overloaded" if error.status in (429, 503) else "generation"
    return msgspec.json.encode({"error": error.message, "error_type": kind})


OPENAI = Dialect(encode_error, done=b"data: [DONE]\n\n")
RESPONSES = Dialect(encode_error)
ANTHROPIC = Dialect(_anthropic, ping=b'event: ping\ndata: {"type": "ping"}\n\n')
# A space before a line is no part of its JSON; clients take an empty line for broken JSON.
OLLAMA = Dialect(_ollama, b"application/x-ndjson", ping=b" ", lead=b"", trail=b"\n")
LLAMA_CPP = Dialect(_llama_cpp, lead=b"data: ")
TGI = Dialect(_tgi, lead=b"data: ")

_PATHS = {
    "/v1/messages": ANTHROPIC,
    "/v1/messages/count_tokens": ANTHROPIC,
    "/completion": LLAMA_CPP,
    "/props": LLAMA_CPP,
    "/slots": LLAMA_CPP,
    "/": TGI,
    "/generate": TGI,
    "/generate_stream": TGI,
    "/info": TGI,
}


def dialect_of(path: str) -> Dialect:
    """That of the API which has `path`; OpenAI's where none is known."""
    return OLLAMA if path.startswith("/api/") else _PATHS.get(path, OPENAI)
