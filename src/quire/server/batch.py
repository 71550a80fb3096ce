"""Files of requests in OpenAI's batch format, answered by the application itself, without a socket.

Each answer is a line that is written whole. A run that was cut off goes on behind the good answers that are there; the
id of each is a digest of its request, so that no answer is taken for that to another request.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
from starlette.types import ASGIApp

from quire.core.errors import BadRequest, ConfigError, EngineFailure
from quire.core.files import becoming
from quire.core.request import random_id
from quire.server.http.parsing import read_json
from quire.server.routes import TABLE

URLS = frozenset(route.path for route in TABLE.routes if route.batchable)
TOGETHER = 256
"""Requests that are under way at one time at most: more than the steps hold are only in the queue."""
MAX_ID = 512
RETRIES, RETRY_SECONDS = 2400, 0.25


class Response(msgspec.Struct, kw_only=True):
    """What a server would have answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, kw_only=True):
    """Why a line was no request."""

    code: str
    message: str


class BatchAnswer(msgspec.Struct, kw_only=True):
    """One line of the output."""

    id: str
    custom_id: str | None
    response: Response | None
    error: BatchError | None


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the input."""

    custom_id: str
    url: str
    body: bytes


def read_line(text: bytes) -> Line:
    """`BadRequest` that says what is wrong with a line."""
    value = read_json(text)
    if not isinstance(value, dict):
        raise BadRequest("the line is no JSON object")
    name, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID:
        raise BadRequest(f"custom_id: must be a string of 1 to {MAX_ID} characters", param="custom_id")
    if value.get("method", "POST") != "POST":
        raise BadRequest("method: must be POST", param="method")
    if url not in URLS:
        raise BadRequest(f"url: must be one of {', '.join(sorted(URLS))}", param="url")
    if not isinstance(body, dict):
        raise BadRequest("body: must be an object", param="body")
    if body.get("stream"):
        raise BadRequest("body.stream: a batch has no streams; leave it out", param="body.stream")
    return Line(custom_id=name, url=url, body=msgspec.json.encode(body))


def name_of(text: bytes) -> str | None:
    """The custom_id of a line, however wrong the rest is; None where it has none."""
    try:
        name = read_json(text).get("custom_id")
    except (BadRequest, AttributeError):
        return None
    return name if isinstance(name, str) else None


def id_of(number: int) -> str:
    """The id of the answer to the line of that number where a custom_id does not tell it from others."""
    return f"batch_req_line_{number}"


def request_id(text: bytes) -> str:
    """The id of the answer to a line: the same for the same request alone."""
    return f"batch_req_{hashlib.blake2b(text.strip(), digest_size=16).hexdigest()}"


def lines_of(path: Path, most: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers from 1; one of more than `most` bytes is cut there,
    and so no JSON."""
    number = 0
    with path.open("rb") as file:
        while text := file.readline(most + 1):
            number += 1
            whole = text
            while not whole.endswith(b"\n") and (whole := file.readline(most)):
                pass
            if text.strip():
                yield number, text


def answered(path: Path) -> dict[str, str]:
    """The good answers that `path` has: custom_id -> id, which is that of the request (`request_id`). A last line that
    is not whole is none.

    `ConfigError` for a file that is no output of a batch.
    """
    return {name: answer_id for _, name, answer_id in _good_lines(path)}


def _good_lines(path: Path) -> Iterator[tuple[bytes, str, str]]:
    """Lines of an output without an error, with their custom_ids and ids."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                answer = msgspec.json.decode(text)
                name, answer_id, response = answer["custom_id"], answer["id"], answer["response"]
                good = response is not None and response["status_code"] < 400
            except (msgspec.DecodeError, KeyError, TypeError):
                raise ConfigError(f"{path}: line {number} is no answer of a batch; name another file") from None
            if good:
                yield text, name, answer_id


def check_unchanged(source: Path, target: Path, most: int) -> None:
    """`ConfigError` where `target` has a good answer to an earlier request of the same custom_id."""
    known = answered(target)
    for number, text in lines_of(source, most) if known else ():
        name = name_of(text)
        if name is not None and known.pop(name, request_id(text)) != request_id(text):
            raise ConfigError(
                f"{target}: has an answer to another request with the custom_id {name!r} than line {number} of "
                f"{source}; remove that file, or name another as --output-file",
                param="output_file",
            )


def _drop_errors(target: Path) -> None:
    """Leave good answers only in an output: lines with an error are asked again."""
    if not target.is_file():
        return
    with becoming(target) as part, part.open("wb") as out:
        out.writelines(text for text, _, _ in _good_lines(target))


async def run(app: ASGIApp, source: Path, target: Path, most: int, done: Callable[[bool], None]) -> tuple[int, int]:
    """Answer the requests of `source` in `target`; (answered now, of which are errors). `most`: bytes of a line.

    `done` is called for each line, with whether it went well; those that `target` has count, too. Lines that ended with
    an error are asked again. Answers are written in the order in which they end. Errors as of `check_unchanged`.
    """
    check_unchanged(source, target, most)
    _drop_errors(target)
    known = answered(target)
    counts, lock = [0, 0], asyncio.Lock()
    room = asyncio.Semaphore(TOGETHER)
    seen = set[str]()
    with target.open("ab") as out:

        async def one(number: int, text: bytes, twice: bool) -> None:
            try:
                answer = await _answer(app, number, text, twice)
            finally:
                room.release()
            async with lock:
                await asyncio.to_thread(_write, out, answer)
            bad = answer.response is None or answer.response.status_code >= 400
            counts[0], counts[1] = counts[0] + 1, counts[1] + bad
            done(not bad)

        try:
            async with asyncio.TaskGroup() as group:
                for number, text in lines_of(source, most):
                    name = name_of(text)
                    twice = name in seen
                    if name in known and not twice:
                        seen.add(name)
                        done(True)
                        continue
                    seen |= {name} if name is not None else set()
                    await room.acquire()
                    group.create_task(one(number, text, twice))
        except* EngineFailure as failed:
            raise EngineFailure(str(failed.exceptions[0])) from None
    return counts[0], counts[1]


async def _answer(app: ASGIApp, number: int, text: bytes, twice: bool) -> BatchAnswer:
    """Answer a line; `twice`: its custom_id is that of an earlier one, whose answer alone is to be found by it."""
    name = name_of(text)
    answer = BatchAnswer(id=request_id(text), custom_id=name, response=None, error=None)
    if name is None or twice:
        answer.id, answer.custom_id = id_of(number), None
    try:
        if twice:
            raise BadRequest(f"custom_id: an earlier line has {name!r}, too; give each line one of its own")
        line = read_line(text)
    except BadRequest as error:
        answer.error = BatchError(code="invalid_request", message=f"line {number}: {error.message}")
        return answer
    for _ in range(RETRIES):
        answer.response = await call(app, line.url, line.body)
        if answer.response.status_code == 503:
            raise EngineFailure("the engine is gone, its log says why; run the same command again to go on")
        if answer.response.status_code != 429:
            break
        await asyncio.sleep(RETRY_SECONDS)  # others of this file fill the queue
    return answer


def _write(out: IO[bytes], answer: BatchAnswer) -> None:
    out.write(msgspec.json.encode(answer) + b"\n")
    out.flush()


async def call(app: ASGIApp, url: str, body: bytes) -> Response:
    """What the application answers to a POST of `body`: the whole exchange of ASGI, within this process."""
    name = random_id()
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": "", "client": None,
        "server": ("localhost", 0),
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode()), (b"x-request-id", name.encode())],
    }  # fmt: skip
    sent, status, parts = False, 500, list[bytes]()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # nobody leaves
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return Response(status_code=status, request_id=name, body=msgspec.Raw(b"".join(parts).rstrip(b"\n") or b"null"))
