"""Reading a request body: bounded in size and time, JSON only, strictly typed, off the event loop when large.

Fields that nobody knows are taken out, unless the server is `--strict`, and named in a `Warning` header.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec
from msgspec.inspect import Field, ListType, Metadata, StructType, Type, UnionType, type_info
from starlette.requests import ClientDisconnect, Request

from quire.core.errors import BadRequest
from quire.server.http.bounds import check_counts
from quire.server.http.errors import HttpError
from quire.server.http.parsing import read_json
from quire.server.server_options import ServerOptions
from quire.server.text_generation.generation import TURN

T = TypeVar("T")
P = ParamSpec("P")

ID_BYTES = 4
"""Of text, which a token id takes as long as."""
MAX_COMPLAINT = 512
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
"""What `curl -d` says of JSON unless it is told otherwise."""
LARGE = 16 << 10  # bytes of text above which parsing and tokenizing leave the event loop: about 1 ms of work


class Read(NamedTuple):
    """The JSON of a body that was read before its route was known, and its bytes. In `request.state.read`, once."""

    value: Any
    size: int


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in a thread if it works on more than `LARGE` bytes, else here."""
    if size > LARGE:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Each of `items`, with a turn of the event loop for others now and then."""
    for i, item in enumerate(items):
        if i % TURN == TURN - 1:
            await asyncio.sleep(0)
        yield item


async def off_read(request: Request, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`, which works on the body that was read of `request`, as `off_loop` does."""
    return await off_loop(request.state.exchange.body.size, function, *args, **kwargs)


async def read_struct(request: Request, options: ServerOptions, choose: Callable[[Any], type[T]]) -> T:
    """The body of `request` as the kind of struct that `choose` sees in its JSON.

    Fields that the kind does not have are noted in `request.state.ignored`, unless `options.strict` refuses them.
    Raises `BadRequest`, `Overloaded` where others have sent too much, or `HttpError` 408, 413 or 415.
    """
    found: Read | None = request.scope["state"].pop("read", None)
    data = await read_bytes(request, options.max_body_bytes, options.body_timeout) if found is None else b""

    def parse() -> tuple[T, list[str]]:
        value = read_json(data) if found is None else found.value
        check_counts(value, size)
        kind = choose(value)
        value, ignored = (value, []) if options.strict else drop_unknown(value, kind)
        return shaped(value, kind), ignored

    size = len(data) if found is None else found.size
    body, ignored = await off_loop(size, parse)
    request.state.ignored.extend(ignored)
    return body


async def read_bytes(request: Request, limit: int, timeout: float, kind: str = JSON) -> bytes:
    """Read at most `limit` bytes of the content type `kind` within `timeout` seconds."""
    _check_headers(request, limit, kind)
    try:
        async with asyncio.timeout(timeout):
            return await _read(request, limit)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {timeout:g} s", code="request_timeout") from None


def shaped(value: Any, kind: type[T]) -> T:
    """What `read_json` gave as a `kind`: nothing converted, no unknown fields; errors name the field."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _named(message: str) -> BadRequest:
    """A msgspec complaint with the field first, as everywhere else. It may have a name in it of any length."""
    if len(message) > 2 * MAX_COMPLAINT:
        message = message[:MAX_COMPLAINT] + "..." + message[-MAX_COMPLAINT:]
    unknown = re.match(r"Object contains unknown field `(.{0,200}?)`(?: - at `\$\.?(.*)`)?$", message, re.DOTALL)
    if unknown:
        path = ".".join(part for part in (unknown[2], unknown[1]) if part)
        return BadRequest(f"{path}: this server knows no such field; it would have no effect", param=path)
    missing = re.match(r"Object missing required field `(\w+)`(?: - at `\$\.?(.*)`)?", message)
    if missing:
        path = ".".join(part for part in (missing[2], missing[1]) if part)
        return BadRequest(f"{path}: required, and missing", param=path)
    at = re.search(r"(.*) - at `(?:key` in `)?\$\.?(.*)`$", message, re.DOTALL)
    if at and at[2]:
        return BadRequest(f"{at[2]}: {at[1]}", param=at[2])
    return BadRequest(f"the body: {message}")


def _check_headers(request: Request, limit: int, wanted: str) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise HttpError(415, "content-encoding: bodies must not be compressed", code="unsupported_encoding")
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    # Pages of other sites could send JSON as a plain text, unasked: browsers name them in `Origin`.
    untyped = request.state.exchange.dialect.untyped and "origin" not in request.headers
    form = kind == FORM and "origin" not in request.headers
    if kind != wanted and (wanted != JSON or not (untyped or form)):
        told = "content-type: must be application/json" if wanted == JSON else f"content-type: must be {wanted}"
        raise HttpError(415, told, code="unsupported_media_type")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > limit:
        raise _too_large(limit)


async def _read(request: Request, limit: int) -> bytes:
    data, counted = bytearray(), request.state.exchange.body
    counted.release()  # of several models the server reads it first, and its model again
    try:
        async for chunk in request.stream():
            if len(data) + len(chunk) > limit:
                raise _too_large(limit)
            counted.take(len(chunk))
            data += chunk
    except ClientDisconnect:
        raise HttpError(499, "the client left before its request was complete", code="client_gone") from None
    return bytes(data)


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body exceeds this server's limit of {limit} bytes", code="body_too_large")


logger = logging.getLogger("quire.requests")
MAX_TOLD = 100
MAX_NAMED = 10
MAX_NAME = 100


def drop_unknown(value: Any, kind: type) -> tuple[Any, list[str]]:
    """The JSON `value` without fields that the struct `kind` and the structs in it do not have, and their paths."""
    found: list[str] = []
    return _dropped(value, _type(kind), "", found), found


def warning(text: str) -> bytes:
    """The value of a `Warning` header (RFC 7234, 5.5; code 299) that says a text of printable ASCII characters."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'299 quire "{quoted}"'.encode("ascii")


def ignored_warning(names: list[str]) -> bytes:
    """The value of a `Warning` header that names ignored fields, printable and short."""
    shown = [name[:MAX_NAME].encode("unicode_escape").decode() for name in names[:MAX_NAMED]]
    text = ", ".join(shown) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
    return warning(f"ignored, without effect here: {text}")


class IgnoredFields:
    """Logs fields of requests that mean nothing here, each of them once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def note(self, names: Iterable[str], path: str) -> None:
        """Log those that were not logged before: of clients' names no more than `MAX_TOLD`, and none that is long."""
        for name in names:
            shown = re.sub(r"\[\d+\]", "[]", name[:MAX_NAME]).encode("unicode_escape").decode()
            if shown not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(shown)
                logger.warning("%s: the field %s is ignored, as it has no effect here (told once)", path, shown)


def _dropped(value: Any, kind: Type, path: str, found: list[str]) -> Any:
    """`value`, or a copy without what is unknown. What is of another type than `kind` stays, to be refused later."""
    kind = _plain(kind)
    if isinstance(kind, UnionType):
        parts = [part for part in kind.types if isinstance(part, (StructType, ListType))]
        wanted = ListType if isinstance(value, list) else StructType
        kind = next((part for part in parts if isinstance(part, wanted)), kind)
    if isinstance(kind, ListType) and isinstance(value, list) and _holds_structs(kind.item_type):
        return [_dropped(item, kind.item_type, f"{path}[{i}]", found) for i, item in enumerate(value)]
    if not isinstance(kind, StructType) or not isinstance(value, dict):
        return value
    fields = _fields(kind.cls)
    below = f"{path}." if path else ""
    found += [f"{below}{name}" for name in value if name not in fields]
    return {
        name: _dropped(item, fields[name].type, f"{below}{name}", found)
        for name, item in value.items()
        if name in fields
    }


@cache
def _type(kind: type) -> Type:
    """Looking at a kind takes 1 ms, which is more than all else that a short request needs here."""
    return type_info(kind)


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, Field]:
    info = _type(kind)
    assert isinstance(info, StructType)
    return {field.encode_name: field for field in info.fields}


def _plain(kind: Type) -> Type:
    """A type without the help that stands beside it."""
    return kind.type if isinstance(kind, Metadata) else kind


def _holds_structs(kind: Type) -> bool:
    parts = kind.types if isinstance(kind, UnionType) else (kind,)
    return any(isinstance(part, StructType) for part in parts)
