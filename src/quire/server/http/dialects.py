"""Dialect of each API: the body of its error responses, and the format of its streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from quire.core.errors import QuireError
from quire.server.http.errors import ErrorReply, openai_error_body

_encode = msgspec.json.encode
SSE = b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Dialect:
    """`error`: the body of a response that is one, a `shape`. In a stream it stands between `lead` and `trail`.

    `ping`: what clients skip in a stream. `done`: ends one that went well. `untyped`: clients leave out, or get wrong,
    that bodies are JSON. `prefix`: paths below it are answered in the dialect although no route has them. `api`:
    its name in documents.
    """

    error: Callable[[QuireError], bytes]
    shape: type[msgspec.Struct]
    media_type: bytes = SSE
    ping: bytes = b": ping\n\n"
    done: bytes = b""
    lead: bytes = b"event: error\ndata: "
    trail: bytes = b"\n\n"
    untyped: bool = False
    prefix: str = ""
    api: str = "OpenAI"

    def event(self, error: QuireError) -> bytes:
        """The end of a stream that failed."""
        return self.lead + self.error(error) + self.trail


class AnthropicFields(msgspec.Struct, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """Error as Anthropic's clients read it."""

    type: Literal["error"] = "error"
    error: AnthropicFields


class LlamaCppFields(msgspec.Struct, kw_only=True):
    """What went wrong; `code` is the status."""

    code: int
    message: str
    type: str


class LlamaCppError(msgspec.Struct, kw_only=True):
    """Error as clients of llama.cpp's server read it."""

    error: LlamaCppFields


class OllamaError(msgspec.Struct, kw_only=True):
    """Error as Ollama's clients read it."""

    error: str


class TgiError(msgspec.Struct, kw_only=True):
    """Error as TGI's clients read it."""

    error: str
    error_type: str


class TeiError(msgspec.Struct, kw_only=True):
    """Error as TEI's clients read it."""

    error: str
    error_type: str


def _anthropic(error: QuireError) -> bytes:
    kind = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}.get(error.status, error.kind)
    return _encode(AnthropicError(error=AnthropicFields(type=kind, message=error.message)))


def _llama_cpp(error: QuireError) -> bytes:
    return _encode(LlamaCppError(error=LlamaCppFields(code=error.status, message=error.message, type=error.kind)))


def _ollama(error: QuireError) -> bytes:
    return _encode(OllamaError(error=error.message))


def _tgi(error: QuireError) -> bytes:
    kind = "overloaded" if error.status in (429, 503) else "generation" if error.status >= 500 else "validation"
    return _encode(TgiError(error=error.message, error_type=kind))


def _tei(error: QuireError) -> bytes:
    kind = {429: "overloaded", 503: "unhealthy"}.get(error.status, "backend" if error.status >= 500 else "validation")
    return _encode(TeiError(error=error.message, error_type=kind))


OPENAI = Dialect(openai_error_body, ErrorReply, done=b"data: [DONE]\n\n")
RESPONSES = Dialect(openai_error_body, ErrorReply)
ANTHROPIC = Dialect(_anthropic, AnthropicError, ping=b'event: ping\ndata: {"type": "ping"}\n\n', api="Anthropic")
# A space before a line is no part of its JSON; clients take an empty line for broken JSON.
OLLAMA = Dialect(_ollama, OllamaError, b"application/x-ndjson", ping=b" ", lead=b"", trail=b"\n", untyped=True,
                 prefix="/api/", api="Ollama")  # fmt: skip
LLAMA_CPP = Dialect(_llama_cpp, LlamaCppError, lead=b"data: ", api="llama.cpp")
TGI = Dialect(_tgi, TgiError, lead=b"data: ", api="TGI")
TEI = Dialect(_tei, TeiError, api="TEI")
DIALECTS = (OPENAI, RESPONSES, ANTHROPIC, OLLAMA, LLAMA_CPP, TGI, TEI)
