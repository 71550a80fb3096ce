"""A small HTTP/1.1 client over asyncio streams: one connection per request, JSON in, JSON or server-sent events out."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from quire.core.errors import ConfigError, QuireError, Unavailable

MAX_LINE = 1 << 20
MAX_BODY = 64 << 20


class HttpFailure(QuireError):
    """The server answered with an error."""


class Client:
    """Requests to one server, `base_url` being like http://127.0.0.1:8000."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {base_url!r} is not like http://127.0.0.1:8000", param="base_url")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._key = api_key

    async def get(self, path: str) -> Any:
        """The JSON at `path`."""
        async with self._request("GET", path, None) as reader:
            return json.loads(b"".join([part async for part in reader]))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that `body` is answered with."""
        async with self._request("POST", path, body) as reader:
            return json.loads(b"".join([part async for part in reader]))

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, up to `[DONE]`. An error event raises `HttpFailure`."""
        async with self._request("POST", path, body) as reader:
            buffer = b""
            async for part in reader:
                buffer += part
                *events, buffer = buffer.split(b"\n\n")
                for event in events:
                    data = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
                    if data == b"[DONE]":
                        return
                    if data:
                        value = json.loads(data)
                        if "error" in value:
                            raise HttpFailure(str(value["error"].get("message")))
                        yield value
        raise HttpFailure("the stream ended without [DONE]")

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request and yield the parts of its body."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=MAX_LINE)
        except OSError as error:
            raise Unavailable(f"{self._host}:{self._port}: {error.strerror or error}; is the server up?") from None
        try:
            writer.write(self._head(method, path, body))
            await writer.drain()
            yield await _response(reader)
        except (OSError, EOFError, ValueError) as error:
            raise HttpFailure(f"the connection broke or the response is malformed: {error}") from None
        finally:
            writer.close()

    def _head(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {self._prefix}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Connection: close",
            *([f"Authorization: Bearer {self._key}"] if self._key else []),
            *(["Content-Type: application/json", f"Content-Length: {len(content)}"] if body is not None else []),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + content


async def _response(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body of a response whose status is 200; `HttpFailure` with the server's message otherwise."""
    status = int(b"".join((await reader.readline()).split(b" ", 2)[1:2]))
    headers: dict[bytes, bytes] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    parts = _chunks(reader) if headers.get(b"transfer-encoding") == b"chunked" else _plain(reader, headers)
    if status == 200:
        return parts
    text = b"".join([part async for part in parts])
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200].decode(errors="replace")
    raise HttpFailure(f"HTTP {status}: {message}")


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readline()


async def _plain(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    length = headers.get(b"content-length")
    if length is None:
        yield await reader.read(MAX_BODY)
    else:
        yield await reader.readexactly(min(int(length), MAX_BODY))
