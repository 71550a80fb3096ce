"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.errors import NotFound, Overloaded, QuireError, Unavailable

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "internal_error",
    503: "service_unavailable",
}


class HttpError(QuireError):
    """A refusal that belongs to HTTP and to no other edge; `code` is the short word a program can test for."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.kind = _KINDS.get(status, "invalid_request_error")
        self.code = code


class ModelNotFound(NotFound):
    """The `model` of a request is not the one served here."""

    code = "model_not_found"


class ErrorFields(msgspec.Struct, kw_only=True):
    """`param` names the field that is to blame, `code` is a word that a program can test for."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, kw_only=True):
    """The body of an error's response, and an SSE event."""

    error: ErrorFields


def brief(value: Any) -> str:
    """A value of a body as an error shows it: of a list or an object, which may be as large as the body, its kind."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value[:40] if isinstance(value, str) else str(value))


def error_headers(error: QuireError) -> list[tuple[bytes, bytes]]:
    """The headers that tell a client what to do about an error."""
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, (Overloaded, Unavailable)):
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def openai_error_body(error: QuireError) -> bytes:
    """The JSON body of an error response."""
    code = getattr(error, "code", None)
    fields = ErrorFields(message=error.message, type=error.kind, param=error.param, code=code)
    return msgspec.json.encode(ErrorReply(error=fields))
